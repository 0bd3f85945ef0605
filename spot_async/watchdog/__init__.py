"""Notices that a run makes no progress any more, says what it waits for, and ends it. It retries and repairs nothing.

`silence.py` decides what counts as progress and how long a run may go without, `report.py` names who is at fault and
writes the report. `monitor.py` is the shell with clock and thread.
"""
