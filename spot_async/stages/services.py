"""What stages send their requests to, by role, and how often a prompt asks. It opens nothing and sends nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spot_async.protocols import BaseScorer, CandidateScorer, Generator, Scorer, Verifier
from spot_async.replicas.leasing import ServicePool

# The role whose servers answer a stage's requests.
STAGE_SERVERS = {
    "rollout": "student",
    "score": "teacher",
    "candidates": "student",
    "probe": "student",
    "verify": "verifier",
    "teacher_response": "teacher",
    "reference": "reference",
}


def requests_per_prompt(*, samples: int, probes: int) -> dict[str, int]:
    """Return the most requests that a prompt with so many responses and probes makes of each stage."""
    return {
        "rollout": samples,
        "score": samples,
        "candidates": samples,
        "probe": probes,
        "verify": samples + probes,
        "teacher_response": 1,
        "reference": samples,
    }


@dataclass(frozen=True)
class Services:
    """What stages send their requests to: pools of replicas, or single services."""

    generator: Generator | ServicePool[Generator]
    scorer: Scorer | ServicePool[Scorer] | None  # the teacher; None when the policy needs no scores of it
    candidate_scorer: CandidateScorer | ServicePool[CandidateScorer]
    verifier: Verifier | ServicePool[Verifier]
    # None when the policy needs no responses of the teacher
    teacher_generator: Generator | ServicePool[Generator] | None = None
    reference: Scorer | BaseScorer | ServicePool[Any] | None = None  # None when the policy needs no reference
    reference_is_base: bool = False  # the student's servers answer for it too, with their base (`BaseScorer`)
