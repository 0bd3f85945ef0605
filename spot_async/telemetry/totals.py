"""Sums a run up from its rows of metrics: for the report, and for what is said while it trains."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from spot_async.config import model_sections
from spot_async.stages.services import STAGE_SERVERS, stage_kind, stage_server
from spot_async.telemetry.bottleneck import PUBLISHES, RunTimes, ServerUse, StageUse

GENERATING = ("rollout", "probe", "teacher_response")  # stages whose requests take slots; scores take none
PERFORMANCE = ("tokens_per_s_per_rank", "mfu")  # of the metrics `perf/...`: rates
PEAK = "max_memory_allocated_gib"

Rows = Sequence[Mapping[str, float]]


def run_times(
    rows: Rows,
    config: Mapping[str, Any],
    cores: int | None = None,
    failures: Mapping[str, str] = MappingProxyType({}),
    servers: Mapping[str, ServerUse] = MappingProxyType({}),
) -> RunTimes:
    """Return where the time of all rows went, and how each stage was used while the trainer waited for it.

    `cores` is how many the run could use, if that is known. `failures` says by stage what failed attempts met.
    `servers` are those of each role as they are now, where the run still has them.
    """
    waited_for = {stage: seconds for stage in _waits(rows) if (seconds := total(rows, f"wait/{stage}_s"))}
    return RunTimes(
        wait_s=total(rows, "time/wait_for_batch_s"),
        train_s=total(rows, "time/train_s"),
        update_s=total(rows, "time/update_weights_s"),
        waited_for_s=waited_for,
        stages={
            stage: _stage_use(rows, config, stage, failures.get(stage, ""), servers.get(server))
            for stage in waited_for
            if (server := stage_server(stage)) is not None
        },
        batch_size=int(config.get("training", {}).get("batch_size") or 1),
        servers=servers,
        roles_with_room=roles_with_room(config, cores),
        publish_s={phase: total(rows, f"publish/{phase.replace(' ', '_')}_s") for phase in PUBLISHES}
        if not is_strict(config)
        else {},
        iterations=sum("iteration" in row for row in rows),
        may_be_asynchronous=may_be_asynchronous(config, cores),
        has_environment=bool(environments_of(config)),
    )


def _waits(rows: Rows) -> list[str]:
    """Return what was waited for, stages or `nothing`, in the order of a prompt's stages."""
    names = dict.fromkeys(name[len("wait/") : -len("_s")] for row in rows for name in row if name.startswith("wait/"))
    return [name for kind in (*STAGE_SERVERS, "nothing") for name in names if stage_kind(name) == kind]


def _stage_use(rows: Rows, config: Mapping[str, Any], stage: str, failures: str, servers: ServerUse | None) -> StageUse:
    """Return how a stage was used. In a strict run its requests mostly run while the trainer waits for them; in an
    asynchronous one they run all the time.
    """
    over_s = total(rows, f"wait/{stage}_s") if is_strict(config) else sum(map(training_s, rows))
    busy_s, queued_s = (
        sum(row.get(f"stage/{stage}/mean_{what}", 0.0) * training_s(row) for row in rows)
        for what in ("in_flight", "queued")
    )
    own = stage_limit(config, stage)
    limit = effective_limit(rows, config, stage) if servers is None else min(own, max(1, servers.let_in))
    failed, attempts = failed_attempts(rows, stage)
    return StageUse(
        min(busy_s / over_s, limit),
        queued_s / over_s,
        limit,
        stage_slots(config, stage, 0 if servers is None else servers.down),
        is_limit_of_servers=limit < own,
        throttled_share=total(rows, f"stage/{stage}/throttled") / attempts if attempts else 0.0,
        failed_share=failed / attempts if attempts else 0.0,
        lost_share=min(1.0, total(rows, f"stage/{stage}/lost_s") / busy_s) if busy_s else None,
        failures=failures,
    )


def failed_attempts(rows: Rows, stage: str) -> tuple[float, float]:
    """Return how many of a stage's attempts failed, throttled ones left out, and how many there were."""
    failed = sum(total(rows, f"stage/{stage}/{each}") for each in ("permanent", "transient", "poisoned"))
    return failed, failed + total(rows, f"stage/{stage}/throttled") + total(rows, f"stage/{stage}/requests")


def is_strict(config: Mapping[str, Any]) -> bool:
    return not config.get("max_staleness")


def may_be_asynchronous(config: Mapping[str, Any], cores: int | None) -> bool:
    """Whether a strict run's student could sample while the trainer trains, on devices or cores of its own."""
    sleeps = any(backend.get("sleep_while_training") for backend in _backends(config).values())
    return is_strict(config) and not sleeps and not shares_cores(config, cores)


def shares_cores(config: Mapping[str, Any], cores: int | None) -> bool:
    """Whether our own servers on the CPU share its cores with the trainer: too few for the threads of all."""
    used, training = sum(threads_on_cpu(config).values()), config.get("training") or {}
    return used > 0 and used + int(training.get("ranks") or 1) * int(training.get("threads") or 1) > (cores or 0)


def lag_shares(rows: Rows) -> dict[int, float]:
    """Return the share of a run's tokens with each lag, from 0 to the largest; empty for a strict run."""
    lags = {int(name.removeprefix("lag/")) for row in rows for name in row if name.startswith("lag/")}
    tokens = {lag: total(rows, f"lag/{lag}") for lag in range(max(lags, default=-1) + 1)}
    every = sum(tokens.values())
    return {lag: count / every for lag, count in tokens.items()} if every else {}


def training_s(row: Mapping[str, float]) -> float:
    """Return an iteration's time without evaluation."""
    return row.get("time/iteration_s", 0.0) - row.get("time/evaluate_s", 0.0)


def stage_names(rows: Rows) -> list[str]:
    """Return the stages that had requests, in the order in which they are recorded."""
    names = dict.fromkeys(name.split("/")[1] for row in rows for name in row if name.startswith("stage/"))
    return [name for name in names if total(rows, f"stage/{name}/requests")]


def environments_of(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the environments of a configuration's training sets, by the key of the set."""
    train = (config.get("data") or {}).get("train")
    sets = enumerate(train) if isinstance(train, list) else [("", train)]
    own = {
        f"data.train.{n}".rstrip("."): each.get("environment") if isinstance(each, dict) else None for n, each in sets
    }
    return {key: found for key, each in own.items() if (found := each or config.get("environment"))}


def stage_slots(config: Mapping[str, Any], stage: str, down: int = 0) -> int | None:
    """Return how many requests the stage's servers generate at once, all together, while `down` of them are down.

    An environment answers as many as it has workers. None for other stages that do not generate, and where the
    configuration does not say: servers at a `url` were started with a number of slots that it does not know.
    """
    if stage_kind(stage) == "environment":
        played = environments_of(config)
        workers: int | None = played.get(stage.partition(".")[2], next(iter(played.values()), {})).get("workers")
        return workers
    if stage_kind(stage) not in GENERATING:
        return None
    backend = _backends(config).get(stage_server(stage) or "", {})
    slots: int | None = backend.get("slots")
    if slots is None or backend.get("url"):
        return None
    return slots * max(1, int(backend.get("replicas") or 1) - down)


def effective_limit(rows: Rows, config: Mapping[str, Any], stage: str) -> int:
    """Return the stage's own limit, or, if that is less, what its servers let in: all together, a mean over rows."""
    name = re.compile(rf"replica/{re.escape(stage_server(stage) or '')}(-\d+)?/limit")
    let_in = [sum(found) for row in rows if (found := [row[key] for key in row if name.fullmatch(key)])]
    own = stage_limit(config, stage)
    return min(own, max(1, round(sum(let_in) / len(let_in)))) if let_in else own


def limit_use(row: Mapping[str, float], config: Mapping[str, Any], stage: str) -> float | None:
    """Return the mean share of its limit that a stage had in flight while a batch was waited for, 0 to 1.

    The metric is a mean over the whole iteration. In a strict run, requests run only while a batch is waited for, so it
    is scaled to that part.
    """
    in_flight, wait_s = row.get(f"stage/{stage}/mean_in_flight"), row.get("time/wait_for_batch_s")
    if in_flight is None or (is_strict(config) and not wait_s):
        return None
    in_flight *= training_s(row) / wait_s if is_strict(config) and wait_s else 1.0
    return min(1.0, in_flight / effective_limit([row], config, stage))


def roles_with_room(config: Mapping[str, Any], cores: int | None) -> frozenset[str]:
    """Return the roles that could have one more server, with a machine, a device or cores to itself.

    Roles at a `url` or on a device count, since nobody here knows how many more machines or devices there are. A role
    of our own servers on the CPU counts if enough cores are left for the threads of one more.
    """
    backends, ours = _backends(config), threads_on_cpu(config)
    used = sum(ours.values())
    return frozenset(
        role
        for role, backend in backends.items()
        if backend and (role not in ours or used + int(backend.get("threads") or 1) <= (cores or 0))
    )


def threads_on_cpu(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the threads that our own servers use on this machine's CPU, by their role."""
    return {
        role: int(backend.get("threads") or 1) * int(backend.get("replicas") or 1)
        for role, backend in _backends(config).items()
        if backend.get("kind") == "local" and not backend.get("url") and backend.get("device") == "cpu"
    }


def _backends(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {role: section.get("backend") or {} for role, section in model_sections(config).items()}


def stage_limit(config: Mapping[str, Any], stage: str) -> int:
    own = (config.get("stages") or {}).get(stage_kind(stage)) or {}
    return max(1, int(own.get("concurrency") or 1))


def of_each(rows: Rows, area: str, figure: str) -> dict[str, str]:
    """Return the metrics of a figure in an area by what they are of: teachers, domains, or the area itself."""
    of, end = f"{area}/", f"/{figure}"
    names = [name for name in set[str]().union(*rows) if name.startswith(of) and name.endswith(end)]
    return {name.removesuffix(end).removeprefix(of): name for name in sorted(names, key=lambda name: (len(name), name))}


def masked_share(rows: Rows) -> float | None:
    """Return the mean share of positions that teachers masked; None if they are such as mask none."""
    shares = [row[name] for name in of_each(rows, "teacher", "masked").values() for row in rows if name in row]
    return sum(shares) / len(shares) if shares else None


def total(rows: Iterable[Mapping[str, float]], metric: str) -> float:
    return sum(row.get(metric, 0.0) for row in rows)


def run_performance(rows: Rows) -> dict[str, float]:
    """Return the performance of a whole run: rates over the time that the trainer was busy, and the highest peak."""
    found = {}
    for name in PERFORMANCE:
        parts = [(row[f"perf/{name}"], row["train/train_s"])
                 for row in rows if f"perf/{name}" in row and row.get("train/train_s")]  # fmt: skip
        if parts:
            found[name] = sum(rate * train_s for rate, train_s in parts) / sum(train_s for _, train_s in parts)
    peaks = [row[f"perf/{PEAK}"] for row in rows if f"perf/{PEAK}" in row]
    return found | ({PEAK: max(peaks)} if peaks else {})


def performance_words(performance: Mapping[str, float]) -> str:
    """Return a performance in words; empty where nothing was measured. GPUs are told by their memory."""
    if "tokens_per_s_per_rank" not in performance:
        return ""
    memory_gib, mfu = performance.get(PEAK), performance.get("mfu")
    rank = "rank" if memory_gib is None else "GPU"
    parts = [
        f"{performance['tokens_per_s_per_rank']:,.0f} tokens/s a {rank}",
        "" if mfu is None else f"MFU {100 * mfu:.1f} %",
        "" if memory_gib is None else f"peak {memory_gib:.1f} GiB",
    ]
    return ", ".join(filter(None, parts))
