"""Knows the files of a run directory, writes them and reads them back. It decides nothing about the run."""
