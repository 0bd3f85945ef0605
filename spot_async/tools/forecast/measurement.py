"""What is measured of each prompt before any training: SPOT's own positions, candidates and probes, and more rollouts.

The policy is the product's own, with more probes a candidate than training would use. It chooses the positions and
makes the probes as in a run, and its record says what came of them. Nothing is selected or probed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from spot_async.base.tasks import both, gather
from spot_async.models.responses import token_of
from spot_async.protocols import Policy, PromptStages
from spot_async.telemetry.outcome_slope import RatioSums, ratio_sums
from spot_async.types import Prompt, Verdict
from spot_async.verification.normalization import answer_start


class PolicyKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of `policy` that a forecast depends on, and that it varies, but for the first."""

    selection: str = "score"

    gamma: float
    beta: float
    positions: int
    probe_top_k: int
    probes: int
    gate: bool

    @property
    def probes_per_prompt(self) -> int:
        return self.positions * self.probe_top_k * self.probes


class ProbedCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """One of the teacher's candidates at a position, in the order of the teacher's probabilities."""

    token: str
    token_id: int | None = None  # None in files of earlier versions
    teacher: float  # its probability in the whole vocabulary
    student: float | None = None  # likewise; None where the policy did not ask
    prior: float  # the teacher's, normalised over the candidates
    correct: int  # of its probes
    judged: int  # probes with a verdict that is an outcome


class ProbedPosition(msgspec.Struct, frozen=True, kw_only=True):
    """One position that the policy selected."""

    position: int
    sampled: str
    score_parts: dict[str, float | None] = {}
    in_answer: bool = False  # from the box on that the verifier reads
    candidates: list[ProbedCandidate]


class MeasuredPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What one prompt showed. Outcomes are 1 or 0; None without a verdict."""

    problem_id: str
    tier: str | None = None
    prompt_tokens: int
    prompt_ids: list[int] = []  # empty in files of earlier versions
    response_ids: list[int] = []  # of the rollout that was probed, likewise
    rollout_tokens: list[int]  # of each rollout; the first is the one that was probed
    outcomes: list[float | None]  # of each rollout
    scored: list[RatioSums] = []  # likewise, by the teacher; empty in files of earlier versions
    teacher_outcome: float | None = None  # of the teacher's own response
    positions: list[ProbedPosition]
    probe_requests: int
    probe_tokens: int


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was measured, from which forecasts for other keys can be computed too."""

    when: str  # in ISO 8601 with the time zone
    settings: dict[str, Any]  # by dotted key, those that decide what is measured
    keys: PolicyKeys  # of the run whose positions and candidates were probed
    rollouts: int  # for each prompt
    probes: int  # for each candidate
    notes: list[str]  # why there is less than was wanted, and what was spent
    prompts: list[MeasuredPrompt]


async def measure_prompt(
    policy: Policy, prompt: Prompt, stages: PromptStages, *, rollouts: int, teacher_writes: bool
) -> MeasuredPrompt:
    """Return what the policy's probes and further rollouts of the prompt show. Errors of stages pass through.

    `rollouts` counts the one that the policy makes. `teacher_writes`: the teacher answers once too.
    """

    async def another(n: int) -> tuple[int, float | None, RatioSums]:
        rollout = await stages.rollout(n=n)
        scores, judgement = await both(stages.score(rollout.token_ids, top_k=0), stages.verify(rollout.token_ids))
        teacher = np.where(scores.known, scores.logprobs, np.float32(np.nan))
        return len(rollout.token_ids), judgement.verdict.reward, ratio_sums(teacher, rollout.logprobs)

    async def of_teacher() -> float | None:
        if not teacher_writes:
            return None
        return (await stages.verify((await stages.teacher_response()).token_ids)).verdict.reward

    samples, (others, teacher_outcome) = await both(
        policy.supervise(prompt, stages),
        both(gather(another(n) for n in range(1, rollouts)), of_teacher()),
    )
    (sample,) = samples
    response_ids = sample.record["response_ids"]
    sums = ratio_sums(sample.record["teacher_logprobs"], sample.record["behavior_logprobs"])
    probed = len(response_ids), Verdict(sample.record["verdict"]).reward, sums
    rollout_tokens, outcomes, scored = map(list, zip(probed, *others, strict=True))
    start = answer_start(sample.record["response"])
    answer = len(response_ids) if start is None else token_of(response_ids, start, stages.decode)
    return MeasuredPrompt(
        problem_id=prompt.problem.id,
        tier=prompt.problem.tier,
        prompt_tokens=len(prompt.token_ids),
        prompt_ids=prompt.token_ids.tolist(),
        response_ids=response_ids.tolist(),
        rollout_tokens=rollout_tokens,
        outcomes=outcomes,
        scored=scored,
        teacher_outcome=teacher_outcome,
        positions=[_position(branch, in_answer=branch["position"] >= answer) for branch in sample.record["branches"]],
        probe_requests=round(sample.metrics["probe/requests"]),
        probe_tokens=round(sample.metrics["probe/tokens"]),
    )


def _position(branch: Mapping[str, Any], *, in_answer: bool) -> ProbedPosition:
    """Return what a branch of the policy's record says."""
    return ProbedPosition(
        position=branch["position"],
        sampled=branch["sampled"],
        score_parts={name: _finite(part) for name, part in branch["score_parts"].items()},
        in_answer=in_answer,
        candidates=[_candidate(candidate) for candidate in branch["candidates"]],
    )


def _finite(number: float | None) -> float | None:
    """Return the number; None for one that a server did not give."""
    return None if number is None or not np.isfinite(number) else number


def _candidate(candidate: Mapping[str, Any]) -> ProbedCandidate:
    rewards = [reward for verdict in candidate["verdicts"] if (reward := Verdict(verdict).reward) is not None]
    return ProbedCandidate(
        token=candidate["token"],
        token_id=candidate["token_id"],
        teacher=candidate["teacher"],
        student=_finite(candidate["student"]),
        prior=candidate["prior"],
        correct=round(sum(rewards)),
        judged=len(rewards),
    )
