"""What the stages of a run are made of: the services that they ask, by role, and their limits.

It opens nothing and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from spot_async.config import SamplingConfig, StagesConfig, teacher_role
from spot_async.models.common_vocabulary import CommonVocabulary
from spot_async.models.episodes import Tools
from spot_async.models.own_tokens import OwnTokens
from spot_async.models.vocabulary import Vocabulary
from spot_async.protocols import BaseScorer, CandidateScorer, Environment, Generator, Scorer, Verifier
from spot_async.replicas.leasing import ServicePool
from spot_async.spending.teacher_cache import KeptScores
from spot_async.stages.episode import Rules
from spot_async.types import Capabilities, ChatTurn, IntArray, PolicyNeeds

# The role whose servers answer a stage's requests. Of several teachers each has stages of its own: see `stage_server`.
STAGE_SERVERS = {
    "rollout": "student",
    "score": "teacher",
    "candidates": "student",
    "probe": "student",
    "verify": "verifier",
    "environment": "environment",
    "teacher_response": "teacher",
    "reference": "reference",
}


def stage_kind(stage: str) -> str:
    """Return what the configuration calls a stage: `score.math` is the `score` of a teacher among several."""
    return stage.partition(".")[0]


def stage_server(stage: str) -> str | None:
    """Return the role whose servers answer a stage's requests, such as `teachers.math`; None for what is no stage."""
    server = STAGE_SERVERS.get(stage_kind(stage))
    return teacher_role(stage.partition(".")[2]) if server == "teacher" else server


# The field of `PolicyNeeds` that allows a stage more requests.
STATED_BY = {
    "rollout": "rollouts_per_prompt",
    "score": "scores_per_prompt",
    "candidates": "rollouts_per_prompt",
    "probe": "probes_per_prompt",
    "verify": "rollouts_per_prompt",
    "environment": "rollouts_per_prompt",
    "teacher_response": "teacher_responses",
    "reference": "rollouts_per_prompt",
}


def requests_per_prompt(needs: PolicyNeeds) -> dict[str, int]:
    """Return the most requests that a prompt has at each stage at the same time."""
    samples, rollouts, scores = needs.samples_per_prompt, needs.rollouts_per_prompt, needs.scores_per_prompt
    responses = max(samples, rollouts or 0)
    return {
        "rollout": samples if rollouts is None else rollouts,
        "score": samples if scores is None else scores,
        "candidates": responses,
        "probe": needs.probes_per_prompt,
        "verify": responses + needs.teacher_responses + needs.probes_per_prompt,
        "environment": responses + needs.teacher_responses + needs.probes_per_prompt,
        "teacher_response": needs.teacher_responses,
        "reference": responses,
    }


class StudentService(Generator, CandidateScorer, Protocol):
    """What the stages ask of a student."""


@dataclass(frozen=True, kw_only=True)
class TeacherService:
    """A teacher to ask, and what is known of it."""

    # As the policy's needs say. One whose responses are needed must generate.
    server: Scorer | ServicePool[Any] | None = None
    vocabulary: Vocabulary | None = None  # None: the student's; its responses may end with another token
    own_tokens: OwnTokens | None = None  # how it reads a response in tokens of its own; None: in the student's
    kept_scores: KeptScores | None = None  # answers again what it was asked before
    temperature: float | None = None  # of its scores and responses; None: that of the rollouts
    # Makes a prompt for it of a chat and the tools that it may call.
    render_turns: Callable[[Sequence[ChatTurn], Tools], IntArray] | None = None
    weight: float = 1.0  # beside those of others that a prompt asks


@dataclass(frozen=True, kw_only=True, eq=False)
class EnvironmentService:
    """An environment that answers a model's turns, and how they are played."""

    server: Environment | ServicePool[Environment]
    rules: Rules
    judge: Literal["verifier", "environment"] = "verifier"


@dataclass(frozen=True, kw_only=True)
class Services:
    """What stages send their requests to, pools of replicas or single services, and what is known of them."""

    student: StudentService | ServicePool[Any]
    verifier: Verifier | ServicePool[Verifier]
    vocabulary: Vocabulary  # the student's
    teachers: Mapping[str, TeacherService] = field(default_factory=dict)  # by name; an only one's is empty
    reference: Scorer | BaseScorer | ServicePool[Any] | None = None
    # By the key of the problems' set (`Problem.set_key`). To problems of other sets a response is one turn.
    environments: Mapping[str, EnvironmentService] = field(default_factory=dict)
    are_base: Collection[str] = ()  # the roles for which servers of the student are asked for its base (`BaseScorer`)
    following: Collection[str] = ()  # the roles of teachers that follow the student
    common: CommonVocabulary = field(default_factory=CommonVocabulary)  # where one softmax is padded further
    capabilities: Mapping[str, Capabilities] = field(default_factory=dict)  # by role; one that is missing offers all


@dataclass(frozen=True, kw_only=True)
class StagesSettings:
    """How stages ask: their limits, what is sampled, and for how many prompts at once."""

    limits: StagesConfig = field(default_factory=StagesConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int = 0  # this and the prompt's ordinal decide what is sampled
    max_prompts: int = 1024  # the most that are supervised at once
    bounds_prompts: bool = True  # by what the policy's needs state; false where one prompt stands for several
    # The student may get new weights while a prompt is under way. So candidates are asked of the weights that its
    # servers hold then, and deadlines are put off while they load.
    weights_may_change: bool = False
