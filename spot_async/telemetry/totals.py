"""Sums a run up for its report: what samples have in common, and where the time went.

One pass over the samples, which may be many; figures of iterations are few and held together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spot_async.run_directory.reading import SampleSummary
from spot_async.stages.stages import STAGE_SERVERS
from spot_async.telemetry.bottleneck import RunTimes, StageUse, stage_load

RELATIVE_BINS = 20
GENERATING = ("rollout", "probe", "teacher_response")  # stages whose requests take slots; scores are batched by tokens

Rows = Sequence[Mapping[str, float]]


class SampleStatistics:
    """What is summed up over all samples, one at a time."""

    def __init__(self) -> None:
        self.iterations: set[int] = set()  # that have samples
        self.score_sums = [0.0] * RELATIVE_BINS
        self.score_counts = [0] * RELATIVE_BINS
        self.selected = [0] * RELATIVE_BINS
        self.probed_tokens: Counter[str] = Counter()
        self.retained_tokens: Counter[str] = Counter()
        self.lengths: list[tuple[int, int]] = []  # (iteration, tokens)

    def add(self, sample: SampleSummary) -> None:
        self.iterations.add(sample.iteration)
        length = len(sample.response_ids)
        self.lengths.append((sample.iteration, length))
        for position, score in enumerate((sample.acquisition_score or ())[:length]):
            if score is not None:
                bin_ = position * RELATIVE_BINS // length
                self.score_sums[bin_] += score
                self.score_counts[bin_] += 1
        for branch in sample.branches:
            if 0 <= branch.position < length:
                self.selected[branch.position * RELATIVE_BINS // length] += 1
            self.probed_tokens[branch.sampled] += 1
            self.retained_tokens[branch.sampled] += branch.retained


def run_times(rows: Rows, config: Mapping[str, Any], cores: int | None = None) -> RunTimes:
    """Sums over all iterations; stages by what they held while the trainer waited for them.

    `cores` that the run could use, where that is known.
    """
    waited_for = {
        stage: total(rows, f"wait/{stage}_s")
        for stage in (*stage_names(rows), "nothing")
        if total(rows, f"wait/{stage}_s")
    }
    stages: dict[str, StageUse] = {}
    for stage in stage_names(rows):
        over_s = waited_for.get(stage, 0.0)
        if over_s > 0:
            busy_s, queued_s = (
                sum(row.get(f"stage/{stage}/mean_{what}", 0.0) * training_s(row) for row in rows)
                for what in ("in_flight", "queued")
            )
            limit, own = effective_limit(rows, config, stage), stage_limit(config, stage)
            in_flight, queued = stage_load(busy_s, queued_s, over_s, limit)
            stages[stage] = StageUse(
                in_flight, queued, limit, stage_slots(config, stage), is_limit_of_servers=limit < own
            )
    return RunTimes(
        wait_s=total(rows, "time/wait_for_batch_s"),
        train_s=total(rows, "time/train_s"),
        update_s=total(rows, "time/update_weights_s"),
        waited_for_s=waited_for,
        stages=stages,
        batch_size=int(config.get("training", {}).get("batch_size", 1)),
        roles_with_room=roles_with_room(config, cores),
    )


def training_s(row: Mapping[str, float]) -> float:
    """An iteration's time without evaluation."""
    return row.get("time/iteration_s", 0.0) - row.get("time/evaluate_s", 0.0)


def stage_names(rows: Rows) -> list[str]:
    """Stages that had requests, in the order in which they are recorded."""
    names = dict.fromkeys(name.split("/")[1] for row in rows for name in row if name.startswith("stage/"))
    return [name for name in names if total(rows, f"stage/{name}/requests")]


def stage_slots(config: Mapping[str, Any], stage: str, down: int = 0) -> int | None:
    """What the stage's servers generate at once, all together but for those that are `down`.

    None of stages that do not generate, and where the configuration does not say: servers at a `url` were started with
    slots of their own.
    """
    if stage not in GENERATING:
        return None
    backend = (config.get(STAGE_SERVERS[stage]) or {}).get("backend") or {}
    slots: int | None = backend.get("slots")
    if slots is None or backend.get("url"):
        return None
    return slots * max(1, int(backend.get("replicas") or 1) - down)


def effective_limit(rows: Rows, config: Mapping[str, Any], stage: str) -> int:
    """The stage's own limit, or what its servers let in where that is less."""
    own, let_in = stage_limit(config, stage), servers_let_in(rows, stage)
    return own if let_in is None else min(own, max(1, round(let_in)))


def limit_use(row: Mapping[str, float], config: Mapping[str, Any], stage: str) -> float | None:
    """Mean share of its limit that a stage had in flight while an iteration's batch was waited for, 0 to 1.

    Requests run while a batch is waited for, so their mean over the iteration is made one over that part of it.
    """
    in_flight, wait_s = row.get(f"stage/{stage}/mean_in_flight"), row.get("time/wait_for_batch_s")
    if in_flight is None or not wait_s:
        return None
    return min(1.0, in_flight * training_s(row) / wait_s / effective_limit([row], config, stage))


def servers_let_in(rows: Rows, stage: str) -> float | None:
    """Requests that the stage's servers were sent at a time at most, all together: the mean over iterations."""
    name = re.compile(rf"replica/{STAGE_SERVERS[stage]}(-\d+)?/limit")
    limits = [sum(found) for row in rows if (found := [row[key] for key in row if name.fullmatch(key)])]
    return sum(limits) / len(limits) if limits else None


def roles_with_room(config: Mapping[str, Any], cores: int | None) -> frozenset[str]:
    """The roles for which one more server could have a machine, a device or a core to itself.

    Those at a `url` and on devices may: what else there is nobody knows here. Of our own on CPUs there is room for as
    many threads as there are more cores than their servers use.
    """
    backends = {role: (config.get(role) or {}).get("backend") or {} for role in ("student", "teacher", "reference")}
    ours = {
        role: int(backend.get("threads") or 1) * int(backend.get("replicas") or 1)
        for role, backend in backends.items()
        if backend.get("kind") == "local" and not backend.get("url") and backend.get("device") == "cpu"
    }
    used = sum(ours.values())
    return frozenset(
        role
        for role, backend in backends.items()
        if backend and (role not in ours or used + int(backend.get("threads") or 1) <= (cores or 0))
    )


def stage_limit(config: Mapping[str, Any], stage: str) -> int:
    return int(config.get("stages", {}).get(stage, {}).get("concurrency", 1))


def total(rows: Iterable[Mapping[str, float]], metric: str) -> float:
    return sum(row.get(metric, 0.0) for row in rows)
