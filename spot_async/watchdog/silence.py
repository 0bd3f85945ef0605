"""Computes how long a run may commit nothing before it counts as stalled. Pure arithmetic on its configuration.

Everything that a run does has a deadline. Silence is legal for as long as the deadlines of what it is doing allow:

* Supervision: the deadlines of a prompt's stages, one after the other. On top comes the time that a role without any
  server has to get one back, since it does not count for a request's deadline.
* Training, a weight update, an evaluation and the start: the time-out of each. It ends them with an error of its own,
  which must come before the watchdog's.

So whoever is silent for longer has missed its own deadline, and nothing else will end the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from spot_async.base.timeouts import VERIFY_ATTEMPTS, WEIGHT_UPDATE_TIMEOUT_S
from spot_async.config import Config, StagesConfig
from spot_async.errors import ConfigError
from spot_async.loop.events import Phase
from spot_async.types import PolicyNeeds

MARGIN_S = 60.0  # how much later than a deadline the watchdog comes


@dataclass(frozen=True)
class SilenceLimits:
    """The seconds without a commit after which a run counts as stalled, by what it is doing."""

    supervision_s: float
    training_s: float
    weight_update_s: float
    evaluation_s: float
    start_s: float

    def with_longer_start(self, more_s: float) -> SilenceLimits:
        return replace(self, start_s=self.start_s + more_s)

    def of(self, phase: Phase | None) -> float:
        """Return the limit in a phase of an iteration; None stands for before and after training."""
        match phase:
            case None:
                return self.start_s
            case "wait for batch" | "wait for weights" | "drain":
                return self.supervision_s
            case "train" | "write weights":
                return self.training_s
            case "update weights":
                return self.weight_update_s
            case "evaluate":
                return self.evaluation_s


def silence_limits(config: Config, needs: PolicyNeeds) -> SilenceLimits | None:
    """Return the limits of a run; None if `run.stall_timeout_s` is 0, which turns the watchdog off.

    Raises ConfigError if it is shorter than what the stages' own deadlines allow.
    """
    timeout_s = config.run.stall_timeout_s
    if timeout_s == 0:
        return None
    recovery = _longest_recovery(config)
    chain = prompt_chain(config.stages, needs) | recovery
    legal_s, recovery_s = sum(chain.values()), sum(recovery.values())
    if timeout_s is not None and timeout_s < legal_s:
        raise ConfigError(
            f"run.stall_timeout_s={timeout_s:g} is shorter than the {legal_s:g} s that one prompt may take by the "
            f"deadlines of what it waits for ({' + '.join(chain)}): raise it, or lower those"
        )
    supervision_s = timeout_s if timeout_s is not None else legal_s + MARGIN_S

    def at_least(deadlines_s: float) -> float:
        return max(supervision_s, deadlines_s + MARGIN_S)

    evaluation_s = (1 + VERIFY_ATTEMPTS) * config.evaluation.timeout_s if config.evaluation is not None else 0.0
    training_s = config.training.step_timeout_s
    start_s = max(start_timeouts(config.model_dump()), default=0.0)
    sleeps = getattr(config.student.backend, "sleep_while_training", False)
    return SilenceLimits(
        supervision_s=supervision_s,
        # Student servers that share devices with the trainer sleep before it trains, and wake in two steps around the
        # weight update. Each may take as long as that.
        training_s=at_least(training_s + WEIGHT_UPDATE_TIMEOUT_S),
        weight_update_s=at_least((3 if sleeps else 1) * WEIGHT_UPDATE_TIMEOUT_S + recovery_s),
        evaluation_s=at_least(evaluation_s + recovery_s),
        start_s=at_least(max(start_s, training_s, WEIGHT_UPDATE_TIMEOUT_S, evaluation_s)),
    )


def prompt_chain(stages: StagesConfig, needs: PolicyNeeds) -> dict[str, float]:
    """Return the deadlines that one prompt may use up one after the other, in seconds, by the key that sets each."""
    used = {
        "rollout": True,
        "teacher_response": needs.teacher_responses,
        "score": needs.teacher_top_k > 0,
        "reference": needs.reference,
        "candidates": needs.candidate_logprobs or needs.probes_per_prompt > 0,
        "probe": needs.probes_per_prompt > 0,
    }
    chain = {f"stages.{name}.timeout_s": getattr(stages, name).timeout_s for name, is_used in used.items() if is_used}
    return chain | {f"{VERIFY_ATTEMPTS} x stages.verify.timeout_s": VERIFY_ATTEMPTS * stages.verify.timeout_s}


def _longest_recovery(config: Config) -> dict[str, float]:
    """Return the longest time that any role may take to get a server back, under its key."""
    roles = {"student": config.student, "teacher": config.teacher, "reference": config.reference}
    times = {
        f"{role}.serving.recovery_timeout_s": model.serving.recovery_timeout_s
        for role, model in roles.items()
        if model is not None
    }
    longest = max(times, key=lambda key: times[key])
    return {longest: times[longest]}


def start_timeouts(tree: Any) -> Iterator[float]:
    """Return the start time-outs of everything that the run may start.

    Backends all call them `start_timeout_s`, at different depths of their settings, so the whole tree is searched.
    """
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            if name == "start_timeout_s" and isinstance(value, int | float):
                yield float(value)
            else:
                yield from start_timeouts(value)
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from start_timeouts(each)
