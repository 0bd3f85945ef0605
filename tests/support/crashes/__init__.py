"""Simulated runs that crash: plans of what strikes a run, a disk and an event loop that end with it, and its lives."""
