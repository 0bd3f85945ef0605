"""Names in one line what a silent run waits for. Pure: a `RunLook` is passed in.

In a phase of the trainer's it is whoever has to act then. While a batch is waited for, it is the oldest request that a
stage sent. A prompt that is at no stage, although its coroutine runs, waits inside the policy's own code. Where two
pumps are watched, it is the most overdue one that is looked at, and the other is said to go on or to wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from spot_async.base.text import rough_time
from spot_async.errors import LONG_PAUSE_S
from spot_async.loop.events import Phase, Pump
from spot_async.stages.services import STAGE_SERVERS
from spot_async.stages.stage import OpenRequest
from spot_async.watchdog.pumps import PumpLook
from spot_async.watchdog.stacks import TaskView

SERVERS = STAGE_SERVERS | {"evaluation": "student", "evaluation verify": "verifier"}
OF_TRAINER: dict[Phase | None, str] = {
    "train": "the trainer has not answered",
    "write weights": "the trainer has not written the weights",
    "update weights": "the student's servers have not confirmed the weights",
}
PUMP_NAMES: dict[Pump, str] = {"train": "the trainer", "publish": "publishing"}


@dataclass(frozen=True)
class RunLook:
    """What the watchdog knows of a run at one moment."""

    now_s: float
    step: str  # the step of the run, as the console shows it
    pumps: Sequence[PumpLook]  # those that are watched, the most overdue first
    open: Mapping[str, Sequence[OpenRequest]] = field(default_factory=dict)  # by stage
    limits: Mapping[str, int] = field(default_factory=dict)  # how many requests in flight each stage allows
    problems: Mapping[int, str] = field(default_factory=dict)  # problem ids of running prompts, by ordinal
    tasks: Sequence[TaskView] = ()
    blocked_at: str | None = None  # the line that blocks the event loop
    standing_still: Sequence[str] = ()  # processes of the run that were stopped or wait for a disk, in words
    busy_threads: Sequence[str] = ()  # lines that threads beside the event loop are at

    @property
    def silence_s(self) -> float:
        return self.pumps[0].silence_s

    @property
    def phase(self) -> Phase | None:
        return self.pumps[0].phase


def name_culprit(look: RunLook) -> str:
    """Return who or what the run waits for, and which of its processes and threads stand still meanwhile."""
    threads = [f"a thread is at {place}" for place in look.busy_threads]
    return "; ".join([_step_of_culprit(look), *look.standing_still, *threads])


def _step_of_culprit(look: RunLook) -> str:
    if look.blocked_at is not None:
        return f"the event loop is blocked at {look.blocked_at}"
    if len(look.pumps) > 1:
        return f"{_culprit_of_pump(look)}; {_what_other_does(*look.pumps)}"
    return _culprit(look)


def _culprit_of_pump(look: RunLook) -> str:
    """Return whom the most overdue of two pumps waits for. Only requests that can hold it up count."""
    pump = look.pumps[0]
    trains = {stage: requests for stage, requests in look.open.items() if stage in STAGE_SERVERS}
    match pump.phase:
        case "train" | "write weights" | "update weights" as phase:
            weights = f" of iteration {pump.iteration}" if phase != "train" else ""
            return f"{OF_TRAINER[phase]}{weights} for {pump.silence_s:,.0f} s"
        case "drain":
            waits = f"the weights of iteration {pump.iteration} wait for requests under way at the student"
            sent = [each for each in _sent(look) if STAGE_SERVERS.get(each[1]) == "student"]
            return f"{waits}: {describe_request(look, *min(sent, key=_started)[1:])}" if sent else waits
        case "evaluate" if pump.pump == "publish":
            of_evaluation = {stage: requests for stage, requests in look.open.items() if stage not in trains}
            if any(of_evaluation.values()):
                return _culprit(replace(look, open=of_evaluation, problems={}))
            return f"the evaluation of iteration {pump.iteration} has judged no response for {pump.silence_s:,.0f} s"
        case _:
            return _culprit(replace(look, open=trains))


def _what_other_does(pump: PumpLook, other: PumpLook) -> str:
    name = PUMP_NAMES[other.pump]
    if other.waits_for_other:
        return f"{name} waits for it"
    if other.silence_s < pump.silence_s / 2:
        return f"{name} goes on"
    return f"{name} has committed nothing for {other.silence_s:,.0f} s either"


def _culprit(look: RunLook) -> str:
    if look.phase in OF_TRAINER:
        return OF_TRAINER[look.phase]
    oldest = min(_sent(look), key=_started, default=None)
    if oldest is not None and look.now_s - oldest[0] >= look.silence_s / 2:
        return describe_request(look, oldest[1], oldest[2])
    idle = _outside_stages(look)
    if idle is not None:
        return f"{_prompt(look, idle)} waits in the policy's own code, at {_place(look, f'prompt {idle}')}"
    if oldest is not None:  # requests come and go, since none is as old as the silence, but none leads to a commit
        return f"requests are answered but no prompt finishes; of the open ones, {describe_request(look, *oldest[1:])}"
    waiting = [(each.asked_s, stage, each) for stage, requests in look.open.items() for each in requests]
    if waiting:
        _, stage, request = min(waiting, key=lambda each: each[0])
        return describe_request(look, stage, request)
    if look.phase == "wait for batch":
        return "no prompt is being supervised, and none is admitted"
    return f"the run has been {look.step} for {look.silence_s:,.0f} s"


def _sent(look: RunLook) -> list[tuple[float, str, OpenRequest]]:
    """Return the requests that a server has, each with the time of its turn and its stage."""
    return [
        (request.started_s, stage, request)
        for stage, requests in look.open.items()
        for request in requests
        if request.started_s is not None
    ]


def _started(sent: tuple[float, str, OpenRequest]) -> float:
    return sent[0]


def describe_request(look: RunLook, stage: str, request: OpenRequest) -> str:
    """Return an open request in words: where, for whom, for how long, how often it was sent."""
    server = SERVERS.get(stage, "server")
    at = f" ({request.replica})" if request.replica not in (None, "", server) else ""
    whose = _prompt(look, request.priority[0]) if stage in STAGE_SERVERS else f"problem {request.priority[0]}"
    if request.started_s is None:
        limit = f" of {look.limits[stage]}" if stage in look.limits else ""
        busy = sum(each.started_s is not None for each in look.open[stage])
        return (
            f"stage {stage} of the {server} has given {whose} no turn for {look.now_s - request.asked_s:,.0f} s "
            f"({busy}{limit} requests in flight)"
        )
    asked_s = request.longest_retry_after_s
    pause = f", paused for up to {rough_time(asked_s)} at a time as it asked" if asked_s >= LONG_PAUSE_S else ""
    return (
        f"stage {stage} of the {server}{at} has not answered for {look.now_s - request.started_s:,.0f} s: "
        f"{whose}, sent {request.attempts} x{pause}"
    )


def _outside_stages(look: RunLook) -> int | None:
    """Return the first running prompt, in admission order, that is at no stage."""
    at_stages = {request.priority[0] for requests in look.open.values() for request in requests}
    return min((ordinal for ordinal in look.problems if ordinal not in at_stages), default=None)


def _prompt(look: RunLook, ordinal: int) -> str:
    problem = look.problems.get(ordinal)
    return f"prompt {ordinal} (problem {problem})" if problem is not None else f"prompt {ordinal}"


def _place(look: RunLook, task: str) -> str:
    return next((view.place for view in look.tasks if view.name == task), "an unknown place")
