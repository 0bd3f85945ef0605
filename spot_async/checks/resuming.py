"""Checks that a run that is resumed computes what it would have computed. Pure."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from spot_async.checks.plan import TrainPlan
from spot_async.config import Config, leaves
from spot_async.errors import ConfigError, DataError
from spot_async.types import Prompt, PromptSource

DIGEST_BYTES = 16
# Keys that may differ when a run is resumed: where it writes, what it shows, how fast it is, how long it lasts.
MAY_CHANGE = (
    "version",
    "run.directory",
    "run.samples_every",
    "run.trace",
    "run.rehearsal",
    "run.verdict_every_s",
    "run.stall_timeout_s",
    "run.max_dead_share",
    "telemetry",
    "cluster",
    "evaluation",
    "queue",
    "training.epochs",
    "training.iterations",
    "training.schedule_iterations",
    "training.ranks",  # these move last bits, as another machine does
    "training.sharding",
    "training.device",
    "training.threads",
    "training.recompute_layers",
    "training.compile",
    "training.offload",
    "training.packing",
    "training.micro_batch_tokens",
    "training.keep_weights",
    "training.weights_directory",
    "training.checkpoint_every",
    "training.keep_checkpoints",
    "training.refill_at_most",
    "training.restarts",
    "training.step_timeout_s",
    *(
        f"{role}.{key}"
        for role in ("student", "teacher", "reference")
        for key in ("backend", "serving", "cache", "replay")
    ),
    *("verifier.url", "verifier.headers"),  # where a server that judges is reached; what else may is `WITHOUT_EFFECT`
)
_OF_SET = re.compile(r"^data\.train\.(?:\d+\.)?(?=verifier\.)")
MAY_CHANGE_OF_A_STAGE = ("concurrency", "timeout_s", "attempt_timeout_s", "attempts")


def digest_of_keys(config: Config) -> str:
    """Return a digest of the keys that decide numbers."""
    return _digest(sorted(_deciding(config).items()))


def digest_of_prompts(plan: TrainPlan) -> str:
    """Return a digest of the problems, their rendered prompts and written responses, in the first epoch's order.

    Where sets have shares an epoch may leave problems out: then it is in the order of the sets.
    """
    schedule = plan.schedule
    known = schedule.sources if schedule.shares else itertools.islice(schedule, schedule.per_epoch)
    return _digest([_parts(each) for each in known])


def _parts(prompt: Prompt | PromptSource) -> list[Any]:
    problem, teacher_ids = prompt.problem, None if prompt.teacher_ids is None else prompt.teacher_ids.tolist()
    own_ids = {name: ids.tolist() for name, ids in prompt.own_ids.items()}
    return [problem.id, problem.answer, prompt.token_ids.tolist(), teacher_ids, own_ids, problem.response]


def check_same_numbers(before: Config, now: Config) -> None:
    """Raise ConfigError for the first key that decides numbers and differs from those that the run began with."""
    old, new = _deciding(before), _deciding(now)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            raise ConfigError(
                f"{key}={new.get(key)}: the run began with {old.get(key)}, and its numbers depend on it: leave it as "
                "it was, or begin a new run"
            )


def check_same_prompts(digest: str, plan: TrainPlan) -> None:
    """Raise DataError if the prompts are not those of this digest, which the run began with."""
    if digest == digest_of_prompts(plan):
        return
    if plan.reads_clock:
        raise DataError(
            "the prompts are not those that the run began with: the chat template writes today's date into them: begin "
            "a new run, with a date of its own in prompt.template_arguments"
        )
    raise DataError(
        "data.train has other problems, answers or prompts than when the run began: restore it, or begin a new run"
    )


def _deciding(config: Config) -> Mapping[str, Any]:
    tree = config.model_dump(mode="json")
    if isinstance(sets := tree["data"]["train"], list):
        tree["data"]["train"] = dict(enumerate(sets))
    verifiers = [config.verifier, *config.verifiers.values()]
    of_verifiers = {f"verifier.{name}" for each in verifiers for name in each.WITHOUT_EFFECT}
    return {key: value for key, value in leaves(tree) if not _may_change(key, of_verifiers)}


def _may_change(key: str, of_verifiers: Collection[str]) -> bool:
    key = _OF_SET.sub("", key)  # as of the run's own verifier
    parts = key.split(".")
    if parts[0] == "stages":
        return parts[-1] in MAY_CHANGE_OF_A_STAGE
    if parts[0] == "teachers":
        key = ".".join(["teacher", *parts[2:]])
    return any(key == each or key.startswith(f"{each}.") for each in (*MAY_CHANGE, *of_verifiers))


def _digest(value: Any) -> str:
    return hashlib.blake2b(msgspec.json.encode(value), digest_size=DIGEST_BYTES).hexdigest()
