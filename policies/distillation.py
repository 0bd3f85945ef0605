"""What policies share: the sample made of a rollout and the teacher's scores, and what any sample shows people."""

from __future__ import annotations

from typing import Any

from spot_async.protocols import PromptStages
from spot_async.types import Generation, Prompt, Sample, SoftTargets, Supervision, TokenScores, Verdict, WeightVersion


def distillation_sample(
    prompt: Prompt,
    stages: PromptStages,
    rollout: Generation,
    scores: TokenScores,
    verdict: Verdict,
    *,
    soft_targets: SoftTargets | None = None,
    metrics: dict[str, float] | None = None,
    record: dict[str, Any] | None = None,
) -> Sample:
    """Supervision by the teacher's log-probabilities, with soft targets where the policy made some."""
    supervision = Supervision(
        prompt_ordinal=prompt.ordinal,
        problem_id=prompt.problem.id,
        prompt_ids=prompt.token_ids,
        response_ids=rollout.token_ids,
        behavior_logprobs=rollout.logprobs,
        version=oldest_version(rollout),
        teacher_logprobs=scores.logprobs,
        soft_targets=soft_targets,
    )
    return Sample(
        supervision=supervision,
        metrics=rollout_metrics(rollout, verdict)
        | {"teacher/entropy_nats": float(scores.entropy.mean())}
        | (metrics or {}),
        record=rollout_record(prompt, stages, rollout, verdict)
        | {"teacher_logprobs": scores.logprobs, "teacher_entropy_nats": scores.entropy}
        | (record or {}),
    )


def rollout_record(prompt: Prompt, stages: PromptStages, rollout: Generation, verdict: Verdict) -> dict[str, Any]:
    """The problem, the response and its verdict: what every line of `samples.jsonl` starts with."""
    return {
        "problem_id": prompt.problem.id,
        "problem": prompt.problem.text,
        "answer": prompt.problem.answer,
        "tier": prompt.problem.tier,
        "response": stages.decode(rollout.token_ids),
        "verdict": verdict.value,
        "finish_reason": rollout.finish_reason,
        "version": str(oldest_version(rollout)),
        "response_ids": rollout.token_ids,
        "behavior_logprobs": rollout.logprobs,
    }


def oldest_version(rollout: Generation) -> WeightVersion:
    """The oldest weights that sampled one of its tokens."""
    return min(span.version for span in rollout.version_spans)


def rollout_metrics(rollout: Generation, verdict: Verdict) -> dict[str, float]:
    """Accuracy counts outcomes only: a verdict that is missing evidence says nothing of the answer."""
    metrics = {
        "rollout/tokens": float(len(rollout.token_ids)),
        "rollout/truncated": float(rollout.finish_reason == "length"),
        "rollout/unverified": float(verdict.reward is None),
    }
    if verdict.reward is not None:
        metrics["rollout/accuracy"] = verdict.reward
    return metrics
