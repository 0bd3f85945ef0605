"""Computes what a run takes of memory, disk and wires, before it starts. It measures nothing; `tune` and runs have.

Memory comes from `device_memory`. Here are the sizes of what is trained on, published and kept, and the speeds that
another run or `tune` measured.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from spot_async.checks.device_shares import CONTEXT_GIB, on_named_devices
from spot_async.checks.plan import TrainPlan, merged_every
from spot_async.checks.room import ADAPTER_BYTES, published_bytes, student_bytes, weights_shortage
from spot_async.checks.staleness import training_under_staleness
from spot_async.config import Config
from spot_async.config.training import TARGETS
from spot_async.loop.sample_bytes import payload_bytes
from spot_async.models.model_size import ModelSize, read_size
from spot_async.run_directory.reading import RunFiles
from spot_async.run_directory.room import BYTES_OF_PARAMETER, Parameters
from spot_async.tools.estimate.device_memory import TrainerMemory
from spot_async.tools.estimate.endpoints import ASSUMED_SHARE, mean_response_tokens
from spot_async.tools.estimate.machine import MachineEstimate, estimate_machine, misfits, rank_memory
from spot_async.tools.simulate.reading import read_run, read_tune, tune_beside

SAMPLE_BYTES_PER_TOKEN = 80  # of samples.jsonl, as `run.samples_every` says
COPIES = 2  # in the run directory, of students published elsewhere: of the last checkpoint, and of the next
SPEEDS = ("tokens_per_s", "tokens_per_s_each", "fixed_s")


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What one trainer rank needs on a GPU."""

    weights_gib: float
    gradients_gib: float
    optimiser_gib: float
    context_gib: float = CONTEXT_GIB
    at_rest_gib: float
    copies_gib: float
    activations_gib: float
    logits_gib: float
    training_gib: float  # while it trains: all of it


class Device(msgspec.Struct, frozen=True):
    """What one GPU holds."""

    device: int
    sampling_gib: float
    training_gib: float
    size_gib: float


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """What a run sends and keeps, with responses of one length. None where the student's size is unknown."""

    batch_bytes: int  # one batch's supervision, which the trainer is sent
    publish_bytes: int | None  # one directory of weights, which servers are sent; most have an adapter alone
    adapter_bytes: int | None  # the part of it that is the adapter
    checkpoint_bytes: int | None
    published_elsewhere_bytes: int | None  # in training.weights_directory; 0 without
    published_kept_bytes: int | None  # in the run directory
    checkpoints_kept_bytes: int | None
    samples_bytes: int  # samples.jsonl
    disk_bytes: int  # all that is kept


class Requirements(msgspec.Struct, frozen=True, kw_only=True):
    """What a run will take."""

    parameters: Parameters | None
    rank: RankMemory | None  # None for an architecture that the estimate does not know
    devices: list[Device]  # empty if the run starts no server on a numbered GPU
    expected: Sizes
    at_most: Sizes
    expected_response_tokens: float
    free_disk_bytes: int
    speeds: dict[str, dict[str, float]]  # by role, as measured
    measured_by: list[str]  # the files that say so
    warnings: list[str]


def requirements(
    source: Path, config: Config, plan: TrainPlan, directory: Path, earlier: Path | None = None
) -> tuple[Requirements, MachineEstimate | None]:
    """Return what a run takes, and the estimate of its GPUs. It would write to `directory`.

    `source` is the configuration's file: what `tune` measured lies beside it. `earlier` is a run whose speeds and
    lengths of responses are taken. Raises DataError where it cannot be read.
    """
    longest = config.sampling.max_response_tokens
    size = read_size(plan.student.directory)
    parameters = count_parameters(plan.student.directory, size, config)
    speeds, told = measured_speeds(source, config, earlier)
    rows = () if earlier is None else RunFiles(earlier).metrics()
    measured = mean_response_tokens(rows, of_teacher=plan.policy.needs.teacher_responses)
    expected = min(float(longest), ASSUMED_SHARE * longest if measured is None else measured)
    nodes = config.cluster.nodes or 1
    estimate = estimate_machine(config, plan, earlier, nodes=nodes)
    on_one_node = config.training.model_copy(update={"ranks": config.training.ranks // nodes})
    longest_tokens = config.sampling.max_prompt_tokens + longest
    there = next(each for each in (directory, *directory.absolute().parents) if each.exists())
    free = shutil.disk_usage(there).free
    at_most = sizes(config, plan, parameters, float(longest))
    warnings = [] if estimate is None else misfits(estimate)
    warnings += on_named_devices(plan.served)
    if (words := weights_shortage(config, plan)) is not None:
        warnings.append(words)
    if at_most.disk_bytes > free:
        warnings.append(
            f"the disk of {directory} has {free / 1e9:.1f} GB left, and the run keeps up to "
            f"{at_most.disk_bytes / 1e9:.1f} GB"
        )
    return Requirements(
        parameters=parameters,
        rank=None if size is None else _rank(rank_memory(size, on_one_node, longest_tokens=longest_tokens)),
        devices=[Device(each.device, each.sampling, each.training, each.size) for each in estimate.devices]
        if estimate is not None
        else [],
        expected=sizes(config, plan, parameters, expected),
        at_most=at_most,
        expected_response_tokens=expected,
        free_disk_bytes=free,
        speeds=speeds,
        measured_by=told,
        warnings=warnings,
    ), estimate


def count_parameters(student: Path, size: ModelSize | None, config: Config) -> Parameters | None:
    """Return a student's parameters from the headers of its weights, else from its configuration; None for neither."""
    lora = config.training.lora
    if (found := Parameters.of(student, lora)) is not None or size is None:
        return found
    adapters = 0 if lora is None else size.layers * size.adapter_parameters(lora.rank, TARGETS[lora.targets])
    return Parameters(size.parameters, adapters)


def sizes(config: Config, plan: TrainPlan, parameters: Parameters | None, response_tokens: float) -> Sizes:
    """Return the sizes for responses of one length. What is kept counts the one that is being written too."""
    training = training_under_staleness(config.training, config.max_staleness)
    needs, iterations = plan.policy.needs, plan.schedule.iterations
    prompts = list(islice(plan.schedule, plan.schedule.per_epoch))
    prompt_tokens = sum(len(each.token_ids) for each in prompts) / len(prompts)
    trained_tokens = iterations * training.batch_size * needs.samples_per_prompt * response_tokens
    every = config.run.samples_every
    publish = adapter = checkpoint = published = published_kept = checkpoints_kept = None
    if parameters is not None:
        adapter = ADAPTER_BYTES * parameters.adapter
        whole = student_bytes(training, parameters)
        publish = whole if merged_every(config) == 1 else adapter
        published = published_bytes(config, parameters, iterations)
        keeps_best = config.evaluation is not None and config.evaluation.eval_every > 0
        is_elsewhere = training.weights_directory is not None
        published_kept = whole * keeps_best + (whole * min(iterations, COPIES) if is_elsewhere else published)
        checkpoint = BYTES_OF_PARAMETER * parameters.trained
        checkpoints_kept = checkpoint * _checkpoints(iterations, config)
    samples = round(SAMPLE_BYTES_PER_TOKEN * trained_tokens / every) if every else 0
    return Sizes(
        batch_bytes=round(training.batch_size * payload_bytes(prompt_tokens, response_tokens, needs)),
        publish_bytes=publish,
        adapter_bytes=adapter,
        checkpoint_bytes=checkpoint,
        published_elsewhere_bytes=published if training.weights_directory is not None else 0,
        published_kept_bytes=published_kept,
        checkpoints_kept_bytes=checkpoints_kept,
        samples_bytes=samples,
        disk_bytes=samples + (published_kept or 0) + (checkpoints_kept or 0),
    )


def _checkpoints(iterations: int, config: Config) -> int:
    """Return how many checkpoints are on the disk at most, with the one that is being written."""
    training = config.training
    if not training.checkpoint_every:
        return 0
    steps = {*range(training.checkpoint_every, iterations + 1, training.checkpoint_every), iterations}
    every = training.keep_checkpoints.every
    for_good = 0 if every is None else sum(step % every == 0 for step in steps)
    return min(len(steps), training.keep_checkpoints.last + 1 + for_good)


def measured_speeds(
    source: Path, config: Config, earlier: Path | None
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Return the measured speeds by role, and the files that they are from. A run's win over those of `tune`."""
    found: dict[str, dict[str, float]] = {}
    told = []
    if (tuning := tune_beside(source)) is not None:
        found |= _speeds(read_tune(tuning))
        told.append(str(tuning))
    if earlier is not None:
        found |= _speeds(read_run(earlier, config).rates)
        told.append(str(earlier))
    return found, told


def _speeds(rates: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    named = {role: each for role, each in rates.items() if isinstance(each, Mapping)}
    return {role: {key: float(each[key]) for key in SPEEDS if each.get(key)} for role, each in named.items()}


def _rank(memory: TrainerMemory) -> RankMemory:
    return RankMemory(
        weights_gib=memory.weights,
        gradients_gib=memory.gradients,
        optimiser_gib=memory.optimiser,
        at_rest_gib=memory.resting,
        copies_gib=memory.copies,
        activations_gib=memory.activations,
        logits_gib=memory.logits,
        training_gib=memory.training,
    )
