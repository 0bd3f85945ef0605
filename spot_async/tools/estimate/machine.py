"""Estimates whether a run fits its GPUs, how many tokens it moves, and about how long it takes.

It is for runs that launch their servers; what the local engine or servers elsewhere take is not known here. Sizes come
from `models/model_size.py`, memory from `device_memory`, tokens and times from `work`. Here they are put together and
shown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spot_async.base.processes.gpus import GPUS
from spot_async.checks.device_shares import (
    CONTEXT_GIB,
    GRAPHS_GIB,
    ServerOnDevice,
    device_gib,
    named,
    servers_on_devices,
    starting_order,
    taking_turns,
)
from spot_async.checks.plan import TrainPlan
from spot_async.config import Config, TrainingConfig
from spot_async.models.hub import local_path
from spot_async.models.model_size import ModelSize, read_size
from spot_async.run_directory.reading import RunFiles
from spot_async.tools.estimate.device_memory import DeviceMemory, TrainerMemory, per_device, trainer_memory
from spot_async.tools.estimate.endpoints import ASSUMED_SHARE, mean_response_tokens
from spot_async.tools.estimate.work import (
    DECODING_SHARE,
    SCORING_SHARE,
    TRAINING_SHARE,
    Work,
    decoding_s,
    run_work,
    scoring_s,
    training_s,
)

CARDS_GIB = (24.0, 48.0, 80.0, 141.0)  # of GPUs that people have


@dataclass(frozen=True)
class Load:
    """What a run asks of its machine if all responses have a given length."""

    work: Work
    evaluation_tokens: float
    sampling_h: float
    scoring_h: float
    training_h: float
    evaluation_h: float

    @property
    def hours(self) -> float:
        return self.sampling_h + self.scoring_h + self.training_h + self.evaluation_h


@dataclass(frozen=True)
class MachineEstimate:
    """What a run asks of its machine: with responses of expected length, and with the longest ones."""

    trainer: TrainerMemory
    devices: list[DeviceMemory]
    servers: list[ServerOnDevice]
    expected: Load
    at_most: Load
    student_parameters: int
    assumption: str
    training: TrainingConfig
    gpu: str  # a key of `GPUS`
    order: list[str]  # of starting, a line for each device that is shared
    longest_tokens: int  # of a prompt with its response
    longest_response_tokens: dict[float, int]  # that fits, by the memory of a device in GiB; 0: none


def estimate_machine(
    config: Config, plan: TrainPlan, earlier: Path | None = None, *, nodes: int = 1
) -> MachineEstimate | None:
    """Return the estimate of a run; None if it launches nothing on named devices, or an architecture is unknown.

    `earlier` is the directory of a run whose lengths of responses are assumed.
    """
    student = read_size(plan.student.directory)
    total_gib = device_gib(config.cluster, plan.served)
    servers = servers_on_devices(plan.served, total_gib)
    sizes = {each.role: read_size(Path(local_path(plan.served[each.role].model))) for each in servers}
    if student is None or not servers:
        return None
    longest = config.sampling.max_response_tokens
    # What is on this one of the nodes, each of which has a whole student.
    training = config.training.model_copy(update={"ranks": config.training.ranks // nodes})
    ranks = 0 if training.device == "cpu" else training.ranks
    trainer = rank_memory(student, training, longest_tokens=config.sampling.max_prompt_tokens + longest)
    rows = () if earlier is None else RunFiles(earlier).metrics()
    measured = mean_response_tokens(rows, of_teacher=plan.policy.needs.teacher_responses)
    expected = min(float(longest), measured if measured is not None else ASSUMED_SHARE * longest)
    load = _Loads(config, plan, {"student": student} | {role: size for role, size in sizes.items() if size}, servers)
    return MachineEstimate(
        trainer=trainer,
        devices=per_device(servers, trainer, ranks, total_gib),
        servers=servers,
        expected=load.at(expected, ASSUMED_SHARE),
        at_most=load.at(float(longest), 1.0),
        student_parameters=student.parameters,
        assumption=f"responses of {expected:.0f} tokens, "
        + ("as in the run given" if measured is not None else f"half of sampling.max_response_tokens={longest}"),
        training=training,
        gpu=config.cluster.gpu,
        order=taking_turns(starting_order(plan.served, ranks)),
        longest_tokens=config.sampling.max_prompt_tokens + longest,
        longest_response_tokens={
            card: longest_response(
                student,
                training,
                [replace(each, device_gib=card) for each in servers],
                ranks=ranks,
                prompt_tokens=config.sampling.max_prompt_tokens,
                context_tokens=plan.student.max_context_tokens,
            )
            for card in sorted({*CARDS_GIB, total_gib})
        },
    )


def longest_response(
    student: ModelSize,
    training: TrainingConfig,
    servers: Sequence[ServerOnDevice],
    *,
    ranks: int,
    prompt_tokens: int,
    context_tokens: int,
) -> int:
    """Return the tokens of the longest response that each server's cache holds, and that fits when it is trained on.

    `ranks` of the trainer share devices with the servers. `prompt_tokens` come before the response, and both are at
    most `context_tokens`. 0 if not even one token fits.
    """
    card = servers[0].device_gib

    def fits(response: int) -> bool:
        longest = prompt_tokens + response
        rank = rank_memory(student, training, longest_tokens=longest)
        return all(each.cache_tokens >= longest for each in servers) and all(
            each.training <= each.usable for each in per_device(servers, rank, ranks, card)
        )

    most = max(0, context_tokens - prompt_tokens)
    return bisect_left(range(1, most + 1), True, key=lambda response: not fits(response))


def rank_memory(student: ModelSize, training: TrainingConfig, *, longest_tokens: int) -> TrainerMemory:
    """Return the memory that one rank needs to train with these settings; see `trainer_memory`."""
    is_packed = training.packing is not False  # the architectures that are known can be
    return trainer_memory(
        student,
        micro_batch_tokens=training.tokens_per_pass(is_packed=is_packed),
        longest_tokens=longest_tokens,
        is_bfloat16=training.dtype == "bfloat16",
        shards=training.ranks if training.sharding == "fsdp2" else None,
        recomputed_layers=training.recomputed_layers(student.layers),
        is_packed=is_packed,
        lora=training.lora,
        offload=training.offload,
    )


class _Loads:
    """Computes a run's load for any length of responses, from what is the same for all lengths."""

    def __init__(
        self, config: Config, plan: TrainPlan, sizes: dict[str, ModelSize], servers: list[ServerOnDevice]
    ) -> None:
        self._config, self._plan, self._sizes, self._servers = config, plan, sizes, servers
        self._gpu = GPUS[config.cluster.gpu]
        prompts = list(islice(plan.schedule, plan.schedule.iterations * config.training.batch_size))
        self._prompts = len(prompts)
        self._prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._problems = len({prompt.problem.id for prompt in prompts})

    def at(self, response_tokens: float, evaluation_share: float) -> Load:
        config, needs = self._config, self._plan.policy.needs
        iterations = self._plan.schedule.iterations
        work = run_work(
            prompt_tokens=self._prompt_tokens,
            prompts=self._prompts,
            response_tokens=response_tokens,
            samples=needs.samples_per_prompt,
            probes=needs.probes_per_prompt,
            scorers=(needs.teacher_top_k > 0) + needs.reference,
            student_writes=not needs.teacher_responses,
            teacher_problems=self._problems if needs.teacher_responses else 0,
        )
        # While it is written, a response has half of its final length on average.
        prompt_tokens = self._prompt_tokens / max(1, self._prompts)
        context = prompt_tokens + response_tokens / 2
        in_flight = config.training.batch_size * needs.samples_per_prompt
        bulk_s = self._decoding_s("student", work.rollout + work.probe, context, in_flight)
        steps = config.sampling.max_response_tokens * (1 + (needs.probes_per_prompt > 0))
        # An iteration takes at least as long as its longest response, and a probe after that, by themselves.
        tail_s = self._decoding_s("student", steps, context, 1) if work.rollout else 0.0
        sampling_s = max(bulk_s, iterations * tail_s)
        sampling_s += self._decoding_s(
            "teacher", work.teacher_written, context, config.stages.teacher_response.concurrency
        )
        scorer = "teacher" if "teacher" in self._sizes else "reference"
        size = self._sizes.get(scorer)
        count = sum(server.role == scorer for server in self._servers)
        evaluated = self._evaluated(evaluation_share)
        evaluation = config.evaluation
        return Load(
            work=work,
            evaluation_tokens=evaluated,
            sampling_h=sampling_s / 3600,
            scoring_h=scoring_s(work.scored, size, servers=count, gpu=self._gpu) / 3600 if size and count else 0.0,
            training_h=training_s(
                self._prompts * needs.samples_per_prompt,
                self._sizes["student"],
                prompt_tokens=prompt_tokens,
                response_tokens=response_tokens,
                ranks=config.training.ranks,
                lora=config.training.lora,
                recomputes_behavior=config.training.behavior_under(config.max_staleness) == "recomputed",
                recomputed_layers=config.training.recomputed_layers(self._sizes["student"].layers),
                gpu=self._gpu,
            )
            / 3600,
            evaluation_h=0.0
            if evaluation is None
            else self._decoding_s("student", evaluated, evaluation.max_response_tokens / 4, evaluation.concurrency)
            / 3600,
        )

    def _evaluated(self, share: float) -> float:
        """Return the tokens of all evaluations: before, after, and in between."""
        evaluation = self._config.evaluation
        if evaluation is None:
            return 0.0
        times = 2 + (self._plan.schedule.iterations // evaluation.eval_every if evaluation.eval_every else 0)
        return times * share * sum(len(b.sources) * b.samples * b.max_response_tokens for b in self._plan.evaluation)

    def _decoding_s(self, role: str, tokens: float, context_tokens: float, in_flight: int) -> float:
        here = [server for server in self._servers if server.role == role]
        if not tokens or not here:
            return 0.0
        size = self._sizes[role]
        room = max(1.0, min(each.cache_tokens for each in here) / context_tokens)
        count = min(len(here), in_flight)
        at_once = min(in_flight / count, room)
        return decoding_s(tokens, size, at_once=at_once, context_tokens=context_tokens, servers=count, gpu=self._gpu)


def show_machine(screen: Console, estimate: MachineEstimate | None) -> None:
    """Print the estimate; nothing if there is none."""
    if estimate is None:
        return
    screen.print(work_table(estimate))
    screen.print(memory_table(estimate))
    for line in assumptions(estimate):
        screen.print(Text(line), soft_wrap=True)
    for line in misfits(estimate):
        screen.print(Text(f"warning: {line}", style="yellow"), soft_wrap=True)


def misfits(estimate: MachineEstimate) -> list[str]:
    """Return a line for each kind of server or device that has too little; devices with the same need share a line."""
    alike: dict[str, list[int]] = {}
    for each in estimate.devices:
        if not each.fits:
            needed = f"{max(each.sampling, each.training):.0f} GiB, and {each.usable:.0f} are safe"
            alike.setdefault(f"{needed}: {', or '.join(_remedies(each, estimate.training))}", []).append(each.device)
    cramped: dict[str, list[int]] = {}
    for server in estimate.servers:
        if server.cache_gib <= 0:
            words = (
                f"{server.gib:.1f} GiB, and its weights and workspace take {server.gib - server.cache_gib:.1f}: raise "
                "its memory_fraction"
            )
            cramped.setdefault(f"{server.role}'s server has {words}", []).append(server.device)
        elif server.cache_tokens < estimate.longest_tokens:
            words = (
                f"a cache of {server.cache_tokens:.0f} tokens, and a prompt with its response may have "
                f"{estimate.longest_tokens}: raise its memory_fraction, or lower sampling.max_response_tokens"
            )
            cramped.setdefault(f"{server.role}'s server has {words}", []).append(server.device)
    return [f"on {named(devices)} the {line}" for line, devices in cramped.items()] + [
        f"{named(devices)} would {'each ' if len(devices) > 1 else ''}need {line}" for line, devices in alike.items()
    ]


def _remedies(device: DeviceMemory, training: TrainingConfig) -> Iterator[str]:
    if device.device < training.ranks:  # a trainer's rank is on it
        if training.sharding == "none" and training.ranks > 1:
            yield "set training.sharding=fsdp2"
        if training.offload == "none":
            yield "set training.offload=optimizer"
        if device.training > device.usable and training.recompute_layers is not True:
            yield "set training.recompute_layers=true"
        if device.training > device.usable:
            yield "lower training.micro_batch_tokens"
    yield "lower a memory_fraction"


def work_table(estimate: MachineEstimate) -> Table:
    both = (estimate.expected, estimate.at_most)
    table = Table("the run", "expected", "at most", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    rows = [
        ("million tokens: rollouts", [each.work.rollout for each in both]),
        ("million tokens: probes", [each.work.probe for each in both]),
        ("million tokens: the teacher's responses", [each.work.teacher_written for each in both]),
        ("million tokens: scored, prompts included", [each.work.scored for each in both]),
        ("million tokens: trained, prompts included", [each.work.trained for each in both]),
        ("million tokens: evaluations", [each.evaluation_tokens for each in both]),
    ]
    for name, tokens in rows:
        if any(tokens):
            table.add_row(name, *(f"{each / 1e6:,.1f}" for each in tokens))
    for name in ("sampling", "scoring", "training", "evaluation"):
        table.add_row(f"hours of {name}", *(f"{getattr(each, f'{name}_h'):,.1f}" for each in both))
    table.add_row("hours, one after the other", *(f"{each.hours:,.1f}" for each in both))
    return table


def memory_table(estimate: MachineEstimate) -> Table:
    table = Table("GiB of a device", "while sampling", "while training", "of", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for each in estimate.devices:
        table.add_row(f"device {each.device}", f"{each.sampling:.1f}", f"{each.training:.1f}", f"{each.size:.0f}")
    return table


def assumptions(estimate: MachineEstimate) -> list[str]:
    """Return what the tables take for granted, a line for each subject."""
    trainer, gpu = estimate.trainer, GPUS[estimate.gpu]
    alike: dict[tuple[str, float, float, bool], list[int]] = {}
    for each in estimate.servers:
        alike.setdefault((each.role, each.gib, each.cache_gib, each.sleeps), []).append(each.device)
    return [
        f"a rank, GiB: weights {trainer.weights:.1f}, gradients {trainer.gradients:.1f}, optimiser "
        f"{trainer.optimiser:.1f}, CUDA context {CONTEXT_GIB:.1f} ({trainer.resting:.1f} at rest); while it trains "
        f"also copies to compute with {trainer.copies:.1f}, activations {trainer.activations:.1f}, logits "
        f"{trainer.logits:.1f} ({trainer.training:.1f}); {estimate.student_parameters:,} parameters"
        + (f"; in the CPU's memory {trainer.on_cpu:.1f} (training.offload)" if trainer.on_cpu else ""),
        *(
            f"{role} on {named(devices)}, GiB: weights and workspace {gib - cache_gib:.1f}, keys and values "
            f"{cache_gib:.1f}"
            + (f"; asleep {CONTEXT_GIB + GRAPHS_GIB:.1f} (CUDA context and graphs)" if sleeps else "")
            for (role, gib, cache_gib, sleeps), devices in alike.items()
        ),
        *estimate.order,
        "the longest response that fits servers and trainer, by the memory of a device: "
        + ", ".join(
            f"{card:.0f} GiB {tokens:,} tokens" if tokens else f"{card:.0f} GiB none"
            for card, tokens in estimate.longest_response_tokens.items()
        ),
        f"assumes {estimate.assumption}, in evaluations likewise; a batch's longest response at its limit; nothing "
        "overlaps",
        f"assumes devices of {estimate.devices[0].size:.0f} GiB (cluster.device_gib), "
        f"{gpu.operations_per_s / 1e12:.0f} TFLOP/s and {gpu.bytes_per_s / 1e12:.3g} TB/s "
        f"(cluster.gpu={estimate.gpu}); training reaches {TRAINING_SHARE:.0%} of "
        f"that, scoring {SCORING_SHARE:.0%}, decoding {DECODING_SHARE:.0%}",
        "None of it is measured",
    ]
