"""Notices that a run no longer gets anywhere, says what it waits for, and ends it.

What counts as getting anywhere is `progress.py`, for how long a run may get nowhere `limits.py`, whose fault it is
`culprit.py`, what the report shows `report.py` and `stacks.py`. `monitor.py` is the shell with clock, thread and
file. Nothing here retries or repairs: that is the stages' and the pools' business.
"""
