"""Problem sets: reading files of many layouts, mending what is known to be damaged in them, and checking them.

`load_problem_set` is what a run calls. `tools/data_check/` is behind `spot-async data check`. What a problem looks like
to a model is `prompts.py`; what makes an answer right is `verification/`.
"""

from spot_async.data.problem_set import ProblemSet, load_problem_set, require_answers

__all__ = ["ProblemSet", "load_problem_set", "require_answers"]
