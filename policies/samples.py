"""Asks a prompt's teachers, and makes samples: of a student's response, and metrics and records of any."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from spot_async.base.seeds import derive_seed
from spot_async.base.tasks import gather
from spot_async.config import teacher_area
from spot_async.models.chunks import chunk_sums
from spot_async.models.responses import counted_tokens, oldest_version, sampled_tokens
from spot_async.protocols import PromptStages
from spot_async.terms import on_policy, pull
from spot_async.types import (
    BoolArray,
    FloatArray,
    Generation,
    IntArray,
    Judgement,
    Prompt,
    Pull,
    Sample,
    TokenScores,
    Verdict,
    VersionSpan,
)

Scores: TypeAlias = dict[str, TokenScores]  # of one response, by the teacher's name


async def scored(stages: PromptStages, response_ids: IntArray, *, top_k: int) -> Scores:
    """Return what each of the prompt's teachers says of a response."""
    found = await gather(stages.score(response_ids, top_k=top_k, teacher=name) for name in stages.teachers)
    return dict(zip(stages.teachers, found, strict=True))


def pulls(
    stages: PromptStages, scores: Scores, weight: float = 1.0, *, clip: tuple[float, float] | None = None
) -> tuple[Pull, ...]:
    """Return a pull towards each teacher, with its share of the weight."""
    return tuple(pull(scores[name], weight * share, clip=clip) for name, share in stages.teachers.items())


def writer(prompt: Prompt, stages: PromptStages, run_seed: int, *request: int | str) -> str:
    """Return the teacher that writes a response: a prompt's only one, or one drawn by the teachers' shares."""
    names = list(stages.teachers)
    rng = np.random.default_rng(derive_seed(run_seed, prompt.problem.id, "which teacher writes", *request))
    return names[rng.choice(len(names), p=list(stages.teachers.values()))]


def student_sample(
    prompt: Prompt,
    stages: PromptStages,
    response: Generation,
    judgement: Judgement,
    scores: TokenScores | Scores | None = None,
    **terms: Any,
) -> Sample:
    """Return a sample of a response. `terms` say what is learnt from it, as in `on_policy`.

    `scores` are those of the prompt's teacher, or of several by name. Tokens that no teacher knows have no policy term,
    unless `policy_mask` is given. A policy adds to its `metrics` and `record` what is its own.
    """
    metrics, record = rollout_metrics(response, judgement), rollout_record(prompt, stages, response, judgement)
    domain = prompt.problem.domain or prompt.problem.category
    if domain and "rollout/accuracy" in metrics:
        metrics[f"rollout/{domain}/accuracy"] = metrics["rollout/accuracy"]
    if scores:
        by_name = scores if isinstance(scores, dict) else {prompt.problem.teacher: scores}
        metrics |= teacher_metrics(by_name, record["behavior_logprobs"])
        record |= teacher_record(by_name)
        if all(each.valid is not None for each in by_name.values()):
            terms = {"policy_mask": np.any([each.known for each in by_name.values()], axis=0), **terms}
    return Sample(supervision=on_policy(prompt, response, **terms), metrics=metrics, record=record)


def teacher_metrics(scores: Scores, student: FloatArray | None = None) -> dict[str, float]:
    """Return each teacher's mean entropy over known positions, and of one that reads text the share of unknown ones.

    Of several teachers, also the mean of `log p_T - log p_S`, `student` being log p_S (T,), or NaN if not known.
    """
    metrics = {}
    for name, each in scores.items():
        area, known, rows = teacher_area(name), each.known, each.known_rows
        if each.valid is not None:
            metrics[f"{area}/masked"] = 1.0 - float(each.valid.sum() / (each.counted or len(known)))
        if each.chunks is not None and known.any():
            sizes = chunk_sums(np.ones(len(known)), each.chunks)
            metrics[f"{area}/chunked"] = float((sizes[known] > 1).mean())
            if each.topk_ids.shape[1]:
                metrics[f"{area}/rows"] = float(rows[known].mean())
        if rows.any():
            metrics[f"{area}/entropy_nats"] = float(each.entropy[rows].mean())
        if name and student is not None and (both := known & np.isfinite(student)).any():
            metrics[f"{area}/pull_nats"] = float((each.logprobs - student)[both].mean())
    return metrics


def teacher_record(scores: Scores) -> dict[str, Any]:
    """Return the teacher's values at each position; NaN (null in the file) where they are unknown.

    One of several is named. Where several scored the response, `teachers` has the values of each.
    """

    def shown(known: BoolArray, values: FloatArray) -> FloatArray:
        return values if known.all() else np.where(known, values, np.float32(np.nan))

    of_each = {
        name: {
            "teacher_logprobs": shown(each.known, each.logprobs),
            "teacher_entropy_nats": shown(each.known_rows, each.entropy),
            **({} if each.chunks is None else {"teacher_chunks": each.chunks}),
        }
        for name, each in scores.items()
    }
    if len(of_each) != 1:
        return {"teachers": of_each} if of_each else {}
    ((name, values),) = of_each.items()
    return {"teacher": name, **values} if name else values


def rollout_record(prompt: Prompt, stages: PromptStages, rollout: Generation, judgement: Judgement) -> dict[str, Any]:
    """Return `response_record` of a student's response, with the weights that wrote it and their log-probabilities.

    Where others wrote a part of it, it says who wrote which tokens.
    """
    oldest, record = oldest_version(rollout), response_record(prompt, stages, rollout, judgement)
    record |= {"version": None if oldest is None else str(oldest), "behavior_logprobs": rollout.logprobs}
    if any(span.version is None for span in rollout.version_spans):
        record["writers"] = _writers(rollout)
        sampled = sampled_tokens(rollout)
        record["behavior_logprobs"] = np.where(sampled, rollout.logprobs, np.float32(np.nan))
    return record


def _writers(response: Generation) -> list[list[Any]]:
    return [[span.start, span.end, _writer_of(span)] for span in response.version_spans]


def _writer_of(span: VersionSpan) -> str | None:
    if span.is_read:
        return "environment"
    return None if span.version is None else str(span.version)


def response_record(prompt: Prompt, stages: PromptStages, response: Generation, judgement: Judgement) -> dict[str, Any]:
    """Return the problem, the response and its verdict, with which every line of `samples.jsonl` starts.

    A reward that is not the verdict's, and feedback, follow where the verifier gave them, and who wrote an episode.
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
    if prompt.problem.domain is not None:
        record["domain"] = prompt.problem.domain
    if judgement.reward != judgement.verdict.reward:
        record["reward"] = judgement.reward
    if any(span.is_read for span in response.version_spans):
        record["writers"] = _writers(response)
    return record | ({"feedback": judgement.feedback} if judgement.feedback else {})


def rollout_metrics(rollout: Generation, judgement: Judgement) -> dict[str, float]:
    """Return the metrics of a rollout. Of a response without any token of a student's they say only that.

    Accuracy counts outcomes only, since missing evidence says nothing about the answer. A problem without an answer has
    neither accuracy nor a share that could not be judged.
    """
    verdict, sampled, counted = judgement.verdict, sampled_tokens(rollout), counted_tokens(rollout)
    if not sampled.any():
        return {"rollout/foreign": 1.0}
    metrics = {
        "rollout/tokens": float(counted.sum()),
        "rollout/truncated": float(rollout.finish_reason == "length"),
        "rollout/entropy_nats": -float(rollout.logprobs[sampled].mean()),
    }
    if (counted & ~sampled).any():
        metrics["rollout/foreign"] = 1.0 - float(sampled[counted].mean())
    if verdict is not Verdict.UNJUDGED:
        metrics["rollout/unverified"] = float(verdict.is_missing)
    if verdict.reward is not None:
        metrics["rollout/accuracy"] = verdict.reward
    if judgement.reward is not None:
        metrics["rollout/reward"] = judgement.reward
    return metrics
