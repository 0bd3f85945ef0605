"""Reads problem sets from files of many layouts, mends known damage in them, and makes prompts of the problems.

A run calls `load_problem_set`; `prompts.py` renders and orders the prompts. Whether an answer is right is decided in
`verification/`. The command `check` is in `tools/check/`.
"""

from spot_async.data.problem_set import ProblemSet, load_problem_set, require_answers, require_responses

__all__ = ["ProblemSet", "load_problem_set", "require_answers", "require_responses"]
