"""Says in words what holds a run up, and what to change about it. Pure arithmetic on times that were measured.

The trainer's own clock decides: whatever it mostly did, or waited for, is the bottleneck. Of a wait it asks
which stage most prompts were at, whose server that stage keeps busy, and whether its limit was full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spot_async.stages import STAGE_SERVERS

TRAINER_BOUND = 0.5  # share of the time from which on training itself is the bottleneck
UPDATE_BOUND = 0.25
CLEAR_SHARE = 0.6  # of the wait, from which on one server is named alone
FULL = 0.75  # of a stage's limit: above, the limit holds requests back
IDLE = 0.15  # of a batch: below, a few stragglers hold everybody up


@dataclass(frozen=True)
class StageUse:
    """One stage over the time that was spent waiting for it."""

    in_flight: float  # mean requests
    queued: float  # mean requests that waited for their turn
    limit: int
    slots: int | None = None  # what the server takes at once, where it says so


@dataclass(frozen=True)
class RunTimes:
    """Seconds of a whole run, or of any part of it."""

    wait_s: float
    train_s: float
    update_s: float
    waited_for_s: Mapping[str, float] = field(default_factory=dict)  # wait_s by stage
    stages: Mapping[str, StageUse] = field(default_factory=dict)
    batch_size: int = 1


@dataclass(frozen=True)
class Verdict:
    """A sentence, and what would help, best first."""

    sentence: str
    advice: tuple[str, ...] = ()


def judge(times: RunTimes) -> Verdict:
    """What the run's time went into."""
    total_s = times.wait_s + times.train_s + times.update_s
    if total_s <= 0:
        return Verdict("No times were recorded, so nothing can be said about what held the run up.")
    wait, train, update = (part / total_s for part in (times.wait_s, times.train_s, times.update_s))
    if train >= TRAINER_BOUND:
        return Verdict(
            f"Trainer bound: optimisation took {percent(train)} of the time; servers stood idle meanwhile.",
            (
                "more trainer processes or threads: training.ranks, training.threads",
                "fuller forward passes: raise training.micro_batch_tokens as far as memory allows",
            ),
        )
    if update >= UPDATE_BOUND and update >= wait / 2:
        return Verdict(
            f"Weight-update bound: sending weights to the student's servers took {percent(update)} of the time.",
            ("publish to a faster disk (run.directory), or train on larger batches (training.batch_size)",),
        )
    return _judge_wait(times, wait)


def _judge_wait(times: RunTimes, share: float) -> Verdict:
    known = {stage: seconds for stage, seconds in times.waited_for_s.items() if stage in STAGE_SERVERS and seconds > 0}
    if not known:
        return Verdict(f"The trainer waited {percent(share)} of the time; for what was not recorded.")
    waited_s = sum(times.waited_for_s.values())
    by_server: dict[str, float] = {}
    for stage, seconds in known.items():
        by_server[STAGE_SERVERS[stage]] = by_server.get(STAGE_SERVERS[stage], 0.0) + seconds / waited_s
    servers = sorted(by_server, key=lambda server: -by_server[server])
    bound = servers[:1] if by_server[servers[0]] >= CLEAR_SHARE else servers[:2]
    stages = sorted((s for s in known if STAGE_SERVERS[s] in bound), key=lambda stage: -known[stage])
    named = [f"{stage} ({percent(known[stage] / waited_s)})" for stage in stages if known[stage] / waited_s >= 0.05]
    sentence = (
        f"{' and '.join(bound).capitalize()} bound: the trainer waited {percent(share)} of the time, "
        f"mostly for {' and '.join(named[:2])}."
    )
    advice = [*_stage_advice(stages[0], times), *(SERVER_ADVICE[server] for server in bound)]
    if "student" in bound:
        most_generated = max(GENERATION_ADVICE, key=lambda stage: known.get(stage, 0.0))
        advice.append(GENERATION_ADVICE[most_generated])
    return Verdict(sentence, tuple(advice))


def _stage_advice(stage: str, times: RunTimes) -> tuple[str, ...]:
    use = times.stages.get(stage)
    if use is None:
        return ()
    if use.slots is not None and use.in_flight >= FULL * use.slots and use.limit >= use.slots:
        return (
            f"the server's {use.slots} slots were full ({use.in_flight:.0f} {stage} requests in flight on average): "
            "a higher limit would only make them wait there",
        )
    if use.in_flight >= FULL * use.limit and use.queued > 0:
        return (
            f"the limit of {use.limit} requests was full ({use.in_flight:.0f} in flight, {use.queued:.0f} waiting on "
            f"average): if the server can take more, raise stages.{stage}.concurrency",
        )
    if use.in_flight < IDLE * min(use.limit, times.batch_size):
        return (
            f"only {use.in_flight:.1f} {stage} requests were in flight on average: a few long ones hold each batch up; "
            "a larger training.batch_size hides them, a lower sampling.max_response_tokens cuts them",
        )
    return (
        f"the limit of {use.limit} requests was not the reason ({use.in_flight:.0f} in flight on average): "
        "the server itself is at its speed",
    )


SERVER_ADVICE = {
    "student": "a faster student server: student.backend.slots and student.backend.threads, or a device of its own",
    "teacher": "a faster teacher server: teacher.backend.score_tokens, teacher.backend.threads, or a smaller teacher",
    "verifier": "more worker processes for the verifier: verifier.workers",
    "reference": "a faster server for the reference",
}
GENERATION_ADVICE = {
    "rollout": "less to generate: a lower sampling.max_response_tokens",
    "probe": "less to generate: fewer probes (policy.positions, policy.probe_top_k, policy.probes)",
}


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
