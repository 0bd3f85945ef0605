"""Judges responses: by the last box, the paper's string match, and Math-Verify in processes that can be killed.

Importing this room imports neither sympy nor Math-Verify: only the worker processes do.
"""

from spot_async.types import Verdict
from spot_async.verification.boxed_match import BoxedMatch, boxed_match
from spot_async.verification.math_match import MathMatch
from spot_async.verification.math_verify import MathVerify
from spot_async.verification.normalization import extract_boxed, normalize_answer

__all__ = ["BoxedMatch", "MathMatch", "MathVerify", "Verdict", "boxed_match", "extract_boxed", "normalize_answer"]
