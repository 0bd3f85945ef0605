"""Estimates before a start what a run asks of endpoints and machines, and about how long it takes. Measures nothing."""
