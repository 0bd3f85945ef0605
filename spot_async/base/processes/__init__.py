"""Helpers for a run's processes: children that cannot outlive their parent, their cores, files and memory settings."""
