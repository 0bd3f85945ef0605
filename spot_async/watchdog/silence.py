"""Says for how long a run has committed nothing, and for how long it may. Pure: it is passed the time.

Signs of life, such as pings, retries and admitted prompts, are no commits: they can come for ever in a run that trains
nothing. The questions of the start come to an end, so their answers end a silence.

Everything that a run does has a deadline, which ends it with an error of its own. The watchdog comes after that:
whoever is silent for longer has missed its own deadline, and nothing else will end the run.

In a strict run one pump always waits for the other, so there is one silence. In an asynchronous run each pump has its
own, or a hung publish would hide behind a trainer that continues.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, get_args

from spot_async.base.retry import VERIFY_ATTEMPTS, WEIGHT_UPDATE_TIMEOUT_S
from spot_async.config import Config
from spot_async.errors import ConfigError
from spot_async.loop.events import Phase, Pump
from spot_async.types import PolicyNeeds

# The seconds without a commit after which a run counts as stalled, by its phase; None: before and after training.
SilenceLimits: TypeAlias = Mapping[Phase | None, float]
PUMPS: tuple[Pump, ...] = get_args(Pump)
MARGIN_S = 60.0  # how much later than a deadline the watchdog comes


class Commit(StrEnum):
    """The kinds of work that count as progress: none of it will be done again."""

    STEP = "steps of the run done"
    PROMPT_QUEUED = "prompts queued"
    BATCH_TRAINED = "batches trained"
    WEIGHTS_CONFIRMED = "weights confirmed"
    RESPONSE_JUDGED = "held-out responses judged"


@dataclass(frozen=True)
class LastCommit:
    """The newest commit of a kind."""

    detail: str
    at_s: float
    count: int  # commits of this kind so far


class Progress:
    """The last commits, and since when each pump is silent. All times are of one clock, which the caller reads."""

    def __init__(self, now_s: float) -> None:
        self.last: dict[Commit, LastCommit] = {}
        self._since_s: dict[Pump, float] = dict.fromkeys(PUMPS, now_s)  # since its last commit, or the start

    def commit(self, kind: Commit, detail: str, now_s: float, pumps: Collection[Pump] = PUMPS) -> None:
        """Note a commit, which ends the silence of these pumps."""
        earlier = self.last.get(kind)
        self.last[kind] = LastCommit(detail, now_s, 1 if earlier is None else earlier.count + 1)
        self.begin(pumps, now_s)

    def begin(self, pumps: Collection[Pump], now_s: float) -> None:
        """Begin the silence of these pumps anew: what they waited for has come."""
        self._since_s.update(dict.fromkeys(pumps, now_s))

    def forgive(self, gap_s: float, now_s: float) -> None:
        """Do not count `gap_s` of silence, in which this process did not run (Ctrl-Z, a debugger)."""
        self._since_s = {pump: min(since_s + gap_s, now_s) for pump, since_s in self._since_s.items()}

    def silence_s(self, now_s: float, pump: Pump = "train") -> float:
        return now_s - self._since_s[pump]


@dataclass(frozen=True)
class PumpLook:
    """What one pump does at one moment."""

    pump: Pump
    phase: Phase | None  # None before and after training
    iteration: int
    silence_s: float
    limit_s: float
    waits_for_other: bool

    @property
    def is_stalled(self) -> bool:
        return self.silence_s >= self.limit_s


def look_at_pumps(
    phases: Mapping[Pump, tuple[Phase | None, int]],
    progress: Progress,
    limits: SilenceLimits | None,
    now_s: float,
    asked_s: float = 0.0,
) -> Sequence[PumpLook]:
    """Return a look at each pump that is watched, the one that is most overdue first.

    `phases` has their phases and iterations. Limits are put off by `asked_s`, the pause that an endpoint asked for. A
    pump that waits for the other is silent only if both are, and may be for as long as the other.
    """

    def look(pump: Pump) -> PumpLook:
        waits = _waits_for_other(pump, phases)
        counted = [*phases] if waits else [pump]
        allowed_s = [float("inf") if limits is None else limits[phases[each][0]] for each in counted]
        silence_s = min(progress.silence_s(now_s, each) for each in counted)
        return PumpLook(pump, *phases[pump], silence_s, max(allowed_s) + asked_s, waits)

    looks = [look(pump) for pump in phases]
    return sorted(looks, key=lambda each: (each.waits_for_other, each.limit_s - each.silence_s, -each.silence_s))


def _waits_for_other(pump: Pump, phases: Mapping[Pump, tuple[Phase | None, int]]) -> bool:
    if len(phases) < len(PUMPS):
        return False
    training, publishing = phases["train"][0], phases["publish"][0]
    if pump == "publish":
        return publishing == "wait for weights"
    # No request of the student is answered while its servers are drained or load weights, and perhaps no prompt is
    # admitted before new ones are written.
    held_up = training == "wait for batch" and publishing in ("write weights", "drain", "update weights")
    return held_up or training in ("update weights", "evaluate")


def silence_limits(config: Config, needs: PolicyNeeds, *, revises: bool = False) -> SilenceLimits | None:
    """Return the limits of a run; None if `run.stall_timeout_s` is 0, which turns the watchdog off.

    Raises ConfigError if it is shorter than what the stages' own deadlines allow.
    """
    timeout_s = config.run.stall_timeout_s
    if timeout_s == 0:
        return None
    recoveries = {
        f"{role}.serving.recovery_timeout_s": model.serving.recovery_timeout_s for role, model in config.models.items()
    }
    longest, recovery_s = max(recoveries.items(), key=lambda each: each[1])
    turns = max((2 * each.max_turns for each in config.environments.values()), default=1)
    requests = _requests_in_a_row(needs, turns)
    legal_s = requests * config.stages.timeout_s + recovery_s
    if timeout_s is not None and timeout_s < legal_s:
        raise ConfigError(
            f"run.stall_timeout_s={timeout_s:g} is shorter than the {legal_s:g} s that one prompt may take by the "
            f"deadlines of what it waits for ({requests} x stages.timeout_s + {longest}): raise it, or lower those"
        )
    supervision_s = timeout_s if timeout_s is not None else legal_s + MARGIN_S

    def at_least(deadlines_s: float) -> float:
        return max(supervision_s, deadlines_s + MARGIN_S)

    evaluation_s = (1 + VERIFY_ATTEMPTS) * config.evaluation.timeout_s if config.evaluation is not None else 0.0
    training_s = (3 if revises else 1) * config.training.step_timeout_s  # a look, `revise`, and the step
    start_s = max(each.serving.start_timeout_s for each in config.models.values())
    sleeps = any(getattr(each.backend, "sleep_while_training", False) for each in config.models.values())
    # Servers that share devices with the trainer sleep before it trains, and wake in two steps around the weight
    # update. Each may take as long as that.
    trained_s = at_least(training_s + WEIGHT_UPDATE_TIMEOUT_S)
    return {
        None: at_least(max(start_s, training_s, WEIGHT_UPDATE_TIMEOUT_S, evaluation_s)),
        "wait for batch": supervision_s,
        "wait for weights": supervision_s,
        "drain": supervision_s,
        "train": trained_s,
        "write weights": trained_s,
        "update weights": at_least((3 if sleeps else 1) * WEIGHT_UPDATE_TIMEOUT_S + recovery_s),
        "evaluate": at_least(evaluation_s + recovery_s),
    }


def _requests_in_a_row(needs: PolicyNeeds, turns: int) -> int:
    """Return how many requests of one prompt may use up their deadlines one after the other.

    `turns`: those of one response, with what is answered to them.
    """
    stages = (
        *[needs.rollouts_per_prompt != 0] * turns,
        *[needs.teacher_responses > 0] * turns,
        needs.teacher_scores,
        needs.reference,
        needs.candidate_logprobs or needs.probes_per_prompt > 0,
        *[needs.probes_per_prompt > 0] * turns,
    )
    return (sum(stages) + VERIFY_ATTEMPTS) * needs.rounds
