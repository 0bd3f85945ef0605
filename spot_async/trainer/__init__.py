"""Trains the student: ranks take batches of supervision, step the student and publish its weights. They know no method.

`handle.py` is the orchestrator's end, `rank.py` is the loop of a rank, and `loss.py` is the loss.
"""
