"""Says in words what holds a run up, and what to change about it. Pure: it reads times that were measured.

The bottleneck is whatever the trainer mostly did, or waited for. For a wait, three questions follow: which stage were
most prompts at, which server does that stage keep busy, and was the stage's limit full? How many requests in flight
would be enough is not answered here: `spot-async tune` measures that. Nor is how long an iteration would take with
staleness: `spot-async simulate` does that.

The report uses this for whole runs, the console for the last minute, in the same words.

In an asynchronous run, the trainer's "weight update" is its wait for publishing to come within `max_staleness`. What
publishing does meanwhile says why.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from spot_async.base.text import rough_time
from spot_async.config import teacher_name
from spot_async.errors import DeadlineExceededError
from spot_async.loop.events import WAITS_FOR, Phase
from spot_async.stages.services import stage_kind, stage_server

TRAINER_BOUND = 0.5  # training is the bottleneck from this share of the time on
UPDATE_BOUND = 0.25
CLEAR_SHARE = 0.6  # one server is named alone from this share of the wait on
FULL = 0.75  # a limit holds requests back if more than this share of it is used
IDLE = 0.15  # a few stragglers hold everybody up if less than this share of a batch is in flight
# What publishing can be busy with, and what helps most against it.
PUBLISHES: dict[Phase, str] = {
    "write weights": "a faster disk (run.directory)",
    "drain": "a student server that loads weights beside them, or a lower sampling.max_response_tokens",
    "update weights": "publish to a faster disk (run.directory), or train on larger batches (training.batch_size)",
    "evaluate": "a higher evaluation.eval_every, or a lower evaluation.samples",
}
FAILED = 0.05  # failed attempts are named from this share of what is sent on
LOST = 0.15  # and hold a stage up from this share of its requests' time on
WORTH = 0.15  # staleness is spoken of from this share of the time on in which the trainer does not train
THROTTLED = 0.05  # an endpoint's refusals hold the stage up from this share of what is sent on


@dataclass(frozen=True)
class StageUse:
    """How one stage was used over the time that the trainer waited for it."""

    in_flight: float  # mean number of requests
    queued: float  # mean number of requests that waited for their turn
    limit: int  # the stage's own, or what its servers let in if that is less
    slots: int | None = None  # how many requests its servers generate at once; None if unknown, or it does not generate
    throttled_share: float = 0.0  # share of what was sent that was refused for now (429, 503)
    is_limit_of_servers: bool = False
    failed_share: float = 0.0  # share of the attempts that failed otherwise
    lost_share: float | None = None  # of the requests' time: what these took, with the pauses after them; None: unknown
    failures: str = ""  # what happened, in words

    @property
    def is_failing(self) -> bool:
        """Whether retries hold the stage up. An attempt that fails at once, before a long one, costs little."""
        lost_share = self.failed_share if self.lost_share is None else self.lost_share
        return self.failed_share > 0 and lost_share >= LOST

    @property
    def failed_words(self) -> str:
        return f"{percent(self.failed_share)} of the attempts failed" + (f" ({self.failures})" if self.failures else "")


@dataclass(frozen=True)
class ServerUse:
    """The servers of one role, at the end of the time that is looked at."""

    replicas: int
    down: int  # how many of them serve nothing
    let_in: int  # most requests that all of them get at a time, by their concurrency limits
    held: int = 0  # how many of them asked for a pause
    held_s: float = 0.0  # the shortest of these pauses


@dataclass(frozen=True)
class RunTimes:
    """Where the time of a run, or of a part of it, went."""

    wait_s: float
    train_s: float
    update_s: float
    waited_for_s: Mapping[str, float] = field(default_factory=dict)  # `wait_s` by stage
    stages: Mapping[str, StageUse] = field(default_factory=dict)
    batch_size: int = 1
    servers: Mapping[str, ServerUse] = field(default_factory=dict)  # by role, as far as it is known
    roles_with_room: Collection[str] = ()  # those that could have one more server
    publish_s: Mapping[Phase, float] = field(default_factory=dict)  # of the publish pump; empty for a strict run
    iterations: int = 0  # that they are of, evaluations left out; 0: of less than a whole one
    may_be_asynchronous: bool = False  # whether it is a strict run whose student could sample while it trains
    has_environment: bool = False  # beside which `tune` is refused

    @property
    def of_requests(self) -> str:
        """The time that the means of requests are of, in words."""
        return "on average" if self.publish_s else "while the trainer waited for them"


@dataclass(frozen=True)
class Bottleneck:
    """What holds a run up: a sentence, and advice, the best first."""

    sentence: str
    advice: tuple[str, ...] = ()
    staleness: str = ""  # where a strict run finds what it would bring; the last of the advice too
    is_of_failures: bool = False  # servers that fail, are down or refuse: no figure says what a healthy run would do

    @property
    def brief(self) -> str:
        """The line for the console: why, and what to change first. Empty where nothing is known."""
        said = [each for each in self.advice if each != self.staleness][:2]
        return "; ".join([self.sentence.removesuffix("."), *said]) if said else ""


def judge(times: RunTimes) -> Bottleneck:
    """Return what held the run up."""
    found, staleness = _judge(times), _staleness_words(times)
    if found.is_of_failures:
        return found
    return replace(found, advice=(*found.advice, staleness), staleness=staleness) if staleness else found


def _staleness_words(times: RunTimes) -> str:
    """Return where to find what staleness would bring a strict run; empty where that is not worth a question."""
    total_s = times.wait_s + times.train_s + times.update_s
    if not times.may_be_asynchronous or total_s <= 0 or times.train_s > (1 - WORTH) * total_s:
        return ""
    taken = f"an iteration takes {total_s / times.iterations:.3g} s: " if times.iterations else ""
    return f"{taken}spot-async simulate CONFIG --from RUN says how long it would take with max_staleness=1"


def _judge(times: RunTimes) -> Bottleneck:
    total_s = times.wait_s + times.train_s + times.update_s
    if total_s <= 0:
        return Bottleneck("No times were recorded, so nothing can be said about what held the run up.")
    wait, train, update = (part / total_s for part in (times.wait_s, times.train_s, times.update_s))
    if train >= TRAINER_BOUND:
        return Bottleneck(
            f"Trainer bound: optimisation took {percent(train)} of the time; servers stood idle meanwhile.",
            (
                "more trainer processes or threads: training.ranks, training.threads",
                "fuller forward passes: raise training.micro_batch_tokens as far as memory allows",
            ),
        )
    if update >= max(UPDATE_BOUND, wait / 2):  # a wait of twice that is better spoken of
        if any(times.publish_s.get(phase) for phase in PUBLISHES):
            return _judge_publishing(times.publish_s, update)
        return Bottleneck(
            f"Weight-update bound: sending weights to the student's servers took {percent(update)} of the time.",
            (PUBLISHES["update weights"],),
        )
    return _judge_wait(times, wait)


def _judge_publishing(publish_s: Mapping[Phase, float], share: float) -> Bottleneck:
    """Return what an asynchronous trainer waits for whose weights are not served in time."""
    spent_s = {phase: publish_s.get(phase, 0.0) for phase in PUBLISHES}
    longest = max(spent_s, key=lambda phase: spent_s[phase])
    of_it = percent(spent_s[longest] / sum(spent_s.values()))
    return Bottleneck(
        f"Publishing bound: the trainer waited {percent(share)} of the time until its weights were served. "
        f"Publishing spent {of_it} of its work waiting for {WAITS_FOR[longest]}.",
        (
            PUBLISHES[longest],
            "a higher max_staleness: the trainer continues, and weights that are replaced meanwhile are never sent",
        ),
    )


def _judge_wait(times: RunTimes, share: float) -> Bottleneck:
    waited_s = sum(times.waited_for_s.values())
    if times.waited_for_s.get("nothing", 0.0) >= CLEAR_SHARE * waited_s > 0:
        return Bottleneck(
            f"Policy bound: the trainer waited {percent(share)} of the time, and no stage had anything to do.",
            ("prompts wait for something that is no request: the policy's own code, or a limit of admission (queue)",),
        )
    of = {stage: server for stage in times.waited_for_s if (server := stage_server(stage)) is not None}
    known = {stage: seconds for stage, seconds in times.waited_for_s.items() if stage in of and seconds > 0}
    if not known:
        return Bottleneck(f"The trainer waited {percent(share)} of the time. What it waited for was not recorded.")
    by_server: dict[str, float] = {}
    for stage, seconds in known.items():
        by_server[of[stage]] = by_server.get(of[stage], 0.0) + seconds / waited_s
    servers = sorted(by_server, key=lambda server: -by_server[server])
    failing = {
        stage: known[stage] * times.stages[stage].failed_share
        for stage in known
        if stage in times.stages and times.stages[stage].is_failing and known[stage] >= UPDATE_BOUND * waited_s
    }
    if failing:
        return _judge_failures(max(failing, key=lambda stage: failing[stage]), times, share)
    bound = servers[:1] if by_server[servers[0]] >= CLEAR_SHARE else servers[:2]
    stages = sorted((s for s in known if of[s] in bound), key=lambda stage: -known[stage])
    parts = {stage: known[stage] / waited_s for stage in stages if known[stage] / waited_s >= 0.05}
    named = [f"{percent(part)} of that for {stage}" for stage, part in parts.items()]
    sentence = (
        f"{' and '.join(bound).capitalize()} bound: the trainer waited {percent(share)} of the time, "
        f"{' and '.join(named[:2])}."
    )
    general = [_server_advice(server, known) for server in bound]
    if "student" in bound:
        most_generated = max(GENERATION_ADVICE, key=lambda stage: known.get(stage, 0.0))
        general.append(GENERATION_ADVICE[most_generated])
    # The first stage's server, which need not be the one that all stages together waited for most.
    of_first = _server_advice(of[stages[0]], known)
    trouble, finding = _trouble(stages[0], times), _finding(stages[0], times, of_first)
    advice = dict.fromkeys([*trouble, *_harmless_failures(stages[0], times), *finding, *general])
    return Bottleneck(sentence, tuple(advice), is_of_failures=bool(trouble))


def _judge_failures(stage: str, times: RunTimes, share: float) -> Bottleneck:
    """Return what an attempt that fails costs a stage that has many of them: nothing else is worth changing before."""
    use, server = times.stages[stage], stage_server(stage)
    words = use.failed_words.replace("of the attempts", f"of the {stage} attempts")
    mend = f"see why in the report's Failures and logs/run.jsonl, and mend the {server}'s server or what is before it"
    lost = "stages.attempt_timeout_s: how soon a reply that does not come is asked for again"
    return Bottleneck(
        f"{words}: retries hold the run up. The trainer waited {percent(share)} of the time.",
        (*_trouble(stage, times), mend, *([lost] if DeadlineExceededError.in_short in use.failures else [])),
        is_of_failures=True,
    )


def _trouble(stage: str, times: RunTimes) -> tuple[str, ...]:
    """Return what no limit of ours would help against: servers that are down or asked for a pause, and refusals."""
    server = stage_server(stage) or ""
    if server == "environment":  # processes of ours, which refuse nothing
        return ()
    servers, use = times.servers.get(server), times.stages.get(stage)
    found = []
    if servers is not None and servers.down:
        found.append(f"{servers.down} of {servers.replicas} replicas of the {server} are down: see logs/ for why")
    if servers is not None and servers.held:
        found.append(
            f"{servers.held} of {servers.replicas} replicas of the {server} asked to be left alone, for another "
            f"{rough_time(servers.held_s)}: a higher rate limit there, or another endpoint in {server}.backend.url"
        )
    if use is not None and use.throttled_share >= THROTTLED:
        let_in = f", which lets in {servers.let_in} at a time" if servers is not None else ""
        section = server if server == "verifier" else f"{server}.backend"
        found.append(
            f"throttled by the endpoint{let_in} ({percent(use.throttled_share)} of what is sent is refused for now): "
            f"a higher rate limit there, or another endpoint in {section}.url"
        )
    return tuple(found)


def _harmless_failures(stage: str, times: RunTimes) -> tuple[str, ...]:
    use = times.stages.get(stage)
    if use is None or use.failed_share < FAILED or use.is_failing:
        return ()
    return (
        f"{use.failed_words}, which took {percent(use.lost_share or 0.0)} of the requests' time: see why in the "
        "report's Failures and logs/run.jsonl",
    )


def _finding(stage: str, times: RunTimes, of_server: str) -> tuple[str, ...]:
    """Return what a stage's own use says, and what helps against that, best first; nothing where that is not known.

    `of_server` is the advice that makes its server faster.
    """
    use, server = times.stages.get(stage), stage_server(stage)
    if use is None:
        return ()
    faster: tuple[str, ...] = (of_server,)
    if server in times.roles_with_room:
        faster = (f"more {server} replicas, for which there is room ({server}.backend)", of_server)
    load = (
        f"{use.in_flight:.{int(use.in_flight < 10)}f} of {use.limit} {stage} requests in flight, {use.queued:.0f} "
        f"queued, {times.of_requests}"
    )
    if use.slots is not None and use.in_flight >= FULL * use.slots and use.limit >= use.slots:
        slots = "workers" if server == "environment" else "slots"
        full = f"the {server}'s {use.slots} {slots} were {_fullness(use.in_flight, use.slots)} ({load})"
        return (f"{full}: a higher limit would only make them wait there", *faster)
    if use.in_flight >= FULL * use.limit and use.queued > 0:
        full = f"{_fullness(use.in_flight, use.limit)} ({load})"
        if use.is_limit_of_servers:
            shown = f"the {use.limit} requests that the {server}'s servers have shown that they can take were {full}"
            return (shown, *faster)
        as_far = "" if times.has_environment else " as far as spot-async tune says"
        raised = f"raise stages.{stage_kind(stage)}.concurrency{as_far}"
        return (f"the limit of {use.limit} requests was {full}", raised, *faster)
    if use.in_flight < IDLE * min(use.limit, times.batch_size):
        return (
            f"a few long ones hold each batch up ({load})",
            "a larger training.batch_size hides them, a lower sampling.max_response_tokens cuts them",
        )
    return (f"the limit was not the reason ({load}): the server itself works at full speed", *faster)


def _fullness(in_flight: float, limit: int) -> str:
    return "full" if round(in_flight) >= limit else "mostly in use"


def _server_advice(server: str, waited_s: Mapping[str, float]) -> str:
    """Return what makes a server faster, by what of it was waited for."""
    name = teacher_name(server)
    if name is None:
        return SERVER_ADVICE[server]
    of_it = f".{name}" if name else ""
    writes = waited_s.get(f"teacher_response{of_it}", 0.0) > waited_s.get(f"score{of_it}", 0.0)
    advice = TEACHER_WRITES_ADVICE if writes else SERVER_ADVICE["teacher"]
    return advice.replace("teacher.backend", f"{server}.backend")


SERVER_ADVICE = {
    "student": "a faster student server (the local engine: student.backend.slots, student.backend.threads), "
    "or a device of its own",
    "teacher": "a faster teacher server (the local engine: teacher.backend.threads), or a smaller teacher",
    "verifier": "more worker processes for the verifier (math_verify: verifier.workers), or a faster one",
    "environment": "more processes for the environment (environment.workers), or one that answers faster",
    "reference": "a faster server for the reference",
}
TEACHER_WRITES_ADVICE = (
    "a faster teacher server (the local engine: teacher.backend.slots, teacher.backend.threads), or a smaller teacher"
)
GENERATION_ADVICE = {
    "rollout": "less to generate: a lower sampling.max_response_tokens",
    "probe": "less to generate: fewer probes (policy.positions, policy.probe_top_k, policy.probes)",
}


def percent(share: float | None, decimals: int = 0) -> str:
    return "–" if share is None else f"{100 * share:.{decimals}f} %"
