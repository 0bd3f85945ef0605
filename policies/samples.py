"""Makes samples for policies: the one of a rollout and the teacher's scores, and metrics and records of any sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from spot_async.models.responses import sampled_tokens
from spot_async.protocols import PromptStages
from spot_async.types import (
    FloatArray,
    Generation,
    Judgement,
    Prompt,
    Sample,
    SoftTargets,
    Supervision,
    TokenScores,
    Verdict,
    WeightVersion,
)


def distillation_sample(
    prompt: Prompt,
    stages: PromptStages,
    rollout: Generation,
    scores: TokenScores,
    judgement: Judgement,
    *,
    soft_targets: SoftTargets | None = None,
) -> Sample:
    """Return a sample supervised by the teacher's log-probabilities, and by soft targets if the policy made some.

    A policy adds to its `metrics` and `record` what is its own.
    """
    return Sample(
        supervision=rollout_supervision(
            prompt, rollout, teacher_logprobs=scores.logprobs, policy_mask=scores.valid, soft_targets=soft_targets
        ),
        metrics=rollout_metrics(rollout, judgement) | teacher_metrics(scores),
        record=rollout_record(prompt, stages, rollout, judgement) | teacher_record(scores),
    )


def rollout_supervision(prompt: Prompt, rollout: Generation, **signal: Any) -> Supervision:
    """Return supervision of a rollout. `signal` are the fields that say what is learnt from it."""
    return Supervision(
        prompt_ordinal=prompt.ordinal,
        problem_id=prompt.problem.id,
        prompt_ids=prompt.token_ids,
        response_ids=rollout.token_ids,
        behavior_logprobs=rollout.logprobs,
        version=oldest_version(rollout),
        version_spans=rollout.version_spans,
        **signal,
    )


def teacher_metrics(scores: TokenScores) -> dict[str, float]:
    """Return the mean entropy over known positions; for a teacher that reads text also the share of unknown ones."""
    if scores.valid is None:
        return {"teacher/entropy_nats": float(scores.entropy.mean())}
    masked = {"teacher/masked": 1.0 - float(scores.valid.mean())}
    return masked | ({"teacher/entropy_nats": float(scores.entropy[scores.valid].mean())} if scores.valid.any() else {})


def teacher_record(scores: TokenScores) -> dict[str, Any]:
    """Return the teacher's values at each position; NaN (null in the file) where they are unknown."""

    def shown(values: FloatArray) -> FloatArray:
        return values if scores.valid is None else np.where(scores.valid, values, np.float32(np.nan))

    return {"teacher_logprobs": shown(scores.logprobs), "teacher_entropy_nats": shown(scores.entropy)}


def rollout_record(prompt: Prompt, stages: PromptStages, rollout: Generation, judgement: Judgement) -> dict[str, Any]:
    """Return `response_record` of a student's response, with the weights that wrote it and their log-probabilities.

    Where others wrote a part of it, it says who wrote which tokens.
    """
    oldest, record = oldest_version(rollout), response_record(prompt, stages, rollout, judgement)
    record |= {"version": None if oldest is None else str(oldest), "behavior_logprobs": rollout.logprobs}
    if any(span.version is None for span in rollout.version_spans):
        record["writers"] = [
            [span.start, span.end, None if span.version is None else str(span.version)]
            for span in rollout.version_spans
        ]
        sampled = sampled_tokens(rollout)
        record["behavior_logprobs"] = np.where(sampled, rollout.logprobs, np.float32(np.nan))
    return record


def response_record(prompt: Prompt, stages: PromptStages, response: Generation, judgement: Judgement) -> dict[str, Any]:
    """Return the problem, the response and its verdict, with which every line of `samples.jsonl` starts.

    A reward that is not the verdict's, and feedback, follow where the verifier gave them.
    """
    record: dict[str, Any] = {
        "problem_id": prompt.problem.id,
        "problem": prompt.problem.shown,
        "answer": prompt.problem.answer,
        "tier": prompt.problem.tier,
        "response": stages.decode(response.token_ids),
        "verdict": judgement.verdict.value,
        "finish_reason": response.finish_reason,
        "response_ids": response.token_ids,
    }
    if judgement.reward != judgement.verdict.reward:
        record["reward"] = judgement.reward
    return record | ({"feedback": judgement.feedback} if judgement.feedback else {})


def oldest_version(rollout: Generation) -> WeightVersion | None:
    """Return the oldest weights of the student that sampled a token of the response; None where none did."""
    return min((span.version for span in rollout.version_spans if span.version is not None), default=None)


def rollout_metrics(rollout: Generation, judgement: Judgement) -> dict[str, float]:
    """Return the metrics of a rollout.

    Accuracy counts outcomes only, since missing evidence says nothing about the answer. A problem without an answer has
    neither accuracy nor a share that could not be judged.
    """
    verdict = judgement.verdict
    metrics = {
        "rollout/tokens": float(len(rollout.token_ids)),
        "rollout/truncated": float(rollout.finish_reason == "length"),
    }
    if any(span.version is None for span in rollout.version_spans):
        metrics["rollout/foreign"] = 1.0 - float(sampled_tokens(rollout).mean())
    if verdict is not Verdict.UNJUDGED:
        metrics["rollout/unverified"] = float(verdict.is_missing)
    if verdict.reward is not None:
        metrics["rollout/accuracy"] = verdict.reward
    if judgement.reward is not None:
        metrics["rollout/reward"] = judgement.reward
    return metrics
