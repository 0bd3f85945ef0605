"""Makes samples for policies: the one of a student's response, and metrics and records of any sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from spot_async.models.responses import oldest_version, sampled_tokens
from spot_async.protocols import PromptStages
from spot_async.terms import on_policy
from spot_async.types import (
    FloatArray,
    Generation,
    Judgement,
    Prompt,
    Sample,
    TokenScores,
    Verdict,
)


def student_sample(
    prompt: Prompt,
    stages: PromptStages,
    response: Generation,
    judgement: Judgement,
    scores: TokenScores | None = None,
    **terms: Any,
) -> Sample:
    """Return a sample of a response. `terms` say what is learnt from it, as in `on_policy`.

    Where a teacher scored it, tokens that the scores do not know have no policy term, unless `policy_mask` is given. A
    policy adds to its `metrics` and `record` what is its own.
    """
    metrics, record = rollout_metrics(response, judgement), rollout_record(prompt, stages, response, judgement)
    if scores is not None:
        metrics, record = metrics | teacher_metrics(scores), record | teacher_record(scores)
        terms = {"policy_mask": scores.valid, **terms}
    return Sample(supervision=on_policy(prompt, response, **terms), metrics=metrics, record=record)


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
        "category": prompt.problem.category,
        "response": stages.decode(response.token_ids),
        "verdict": judgement.verdict.value,
        "finish_reason": response.finish_reason,
        "response_ids": response.token_ids,
    }
    if judgement.reward != judgement.verdict.reward:
        record["reward"] = judgement.reward
    return record | ({"feedback": judgement.feedback} if judgement.feedback else {})


def rollout_metrics(rollout: Generation, judgement: Judgement) -> dict[str, float]:
    """Return the metrics of a rollout. Of a response without any token of a student's they say only that.

    Accuracy counts outcomes only, since missing evidence says nothing about the answer. A problem without an answer has
    neither accuracy nor a share that could not be judged.
    """
    verdict, sampled = judgement.verdict, sampled_tokens(rollout)
    if not sampled.any():
        return {"rollout/foreign": 1.0}
    metrics = {
        "rollout/tokens": float(len(rollout.token_ids)),
        "rollout/truncated": float(rollout.finish_reason == "length"),
    }
    if not sampled.all():
        metrics["rollout/foreign"] = 1.0 - float(sampled.mean())
    if verdict is not Verdict.UNJUDGED:
        metrics["rollout/unverified"] = float(verdict.is_missing)
    if verdict.reward is not None:
        metrics["rollout/accuracy"] = verdict.reward
    if judgement.reward is not None:
        metrics["rollout/reward"] = judgement.reward
    return metrics
