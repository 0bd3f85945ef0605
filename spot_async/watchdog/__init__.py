"""Notices that a run makes no progress any more, says what it waits for, and ends it. It retries and repairs nothing.

`progress.py` decides what counts as progress, `silence.py` for how long a run may go without, `pumps.py` which of its
two pumps has been silent for too long, and `culprit.py` who is at fault. `report.py` and `stacks.py` write the report.
`monitor.py` is the shell with clock, thread and file.
"""
