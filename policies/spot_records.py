"""What SPOT tells of a rollout: its metrics, and what it adds to `samples.jsonl`. Nothing here decides anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from spot_async.types import Generation, IntArray

from .targets import Branch, outcome_rewards
from .truncated.selection import Selection


def probe_metrics(
    selection: Selection, branches: Sequence[Branch], retained: Sequence[Branch], baseline: float
) -> dict[str, float]:
    """Return the metrics of the probed positions, of which those `retained` are trained less `baseline` priors."""
    probes = [continuation for branch in branches for each in branch.continuations for continuation in each]
    verdicts = [judged.verdict for branch in branches for each in branch.judgements for judged in each]
    metrics = {
        "spot/selected": float(len(selection.positions)),
        "spot/retained": float(len(retained)),
        "spot/no_evidence": float(sum(branch.values is None and any(branch.judgements) for branch in branches)),
        "probe/tokens": float(sum(len(continuation.token_ids) for continuation in probes)),
        "probe/requests": float(len(probes)),
    }
    metrics |= {f"spot/{name}": float(count) for name, count in (selection.asked or {}).items()}
    rewards = outcome_rewards(verdicts)
    if rewards:
        metrics["probe/accuracy"] = sum(rewards) / len(rewards)
    if retained:
        shifts = [np.abs(branch.target - branch.prior).sum() / 2 for branch in retained]
        metrics["spot/calibration_shift"] = float(np.mean(shifts))
        if baseline:
            pulls = [np.abs(branch.target - baseline * branch.prior).sum() for branch in retained]
            metrics["spot/baseline_pull"] = float(np.mean(pulls))
    if any(any(branch.judgements) for branch in branches):
        metrics["spot/kept_share"] = len(retained) / len(branches)
    variances = [variance for branch in branches if (variance := branch.value_variance) is not None]
    if variances:
        metrics["spot/value_variance"] = float(np.mean(variances))
    return metrics


def probe_record(
    rollout: Generation,
    decode: Callable[[IntArray], str],
    selection: Selection,
    branches: Sequence[Branch],
    retained: Sequence[Branch],
) -> dict[str, Any]:
    """Return what SPOT adds to `samples.jsonl`: each branch, and what the rule knows of every position.

    Scores and gaps are null where a position is masked, gaps also where the student's row is not known.
    """
    record: dict[str, Any] = {}
    for name, known in (("acquisition_score", selection.score), ("gap", selection.gap)):
        if known is not None:
            record[name] = np.full(len(rollout.token_ids), np.nan, dtype=np.float32)
            record[name][selection.eligible] = known
    kept = {branch.position for branch in retained}
    return record | {
        "selected_positions": selection.positions.tolist(),
        "branches": [_branch_record(rollout, decode, selection, each, each.position in kept) for each in branches],
    }


def _branch_record(
    rollout: Generation, decode: Callable[[IntArray], str], selection: Selection, branch: Branch, is_retained: bool
) -> dict[str, Any]:
    """Return one branch's record. Only `prior` and `target` sum to 1; others are full-vocabulary probabilities."""
    row = int(np.searchsorted(selection.positions, branch.position))
    parts = {} if selection.parts is None else selection.parts._asdict()
    student = None if selection.student_logprobs is None else _rounded(np.exp(selection.student_logprobs[row]))
    target = _rounded(branch.target) if branch.values is not None or is_retained else None
    teacher, prior = _rounded(np.exp(branch.teacher_logprobs)), _rounded(branch.prior)
    return {
        "position": branch.position,
        "sampled": decode(rollout.token_ids[branch.position : branch.position + 1]),
        "retained": is_retained,
        "certain": bool(selection.certain[row]),
        "score_parts": {name: round(float(part[row]), 6) for name, part in parts.items()},
        "candidates": [
            {
                "token_id": token_id,
                "token": decode(branch.candidate_ids[c : c + 1]),
                "teacher": teacher[c],
                "student": None if student is None else student[c],
                "prior": prior[c],
                "value": branch.mean_rewards[c],
                "target": None if target is None else target[c],
                "verdicts": [judged.verdict.value for judged in branch.judgements[c]],
                "continuations": [decode(each.token_ids) for each in branch.continuations[c]],
            }
            for c, token_id in enumerate(branch.candidate_ids.tolist())
        ],
    }


def _rounded(values: npt.NDArray[np.floating]) -> list[float]:
    return [round(each, 6) for each in values.tolist()]
