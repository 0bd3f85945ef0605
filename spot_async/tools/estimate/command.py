"""`spot-async plan`: shows what a run will take of memory, disk and wires, as tables or JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spot_async.base.processes.resources import is_in_memory
from spot_async.checks.plan import TrainPlan
from spot_async.config import Config
from spot_async.tools.estimate.machine import MachineEstimate, assumptions, memory_table, work_table
from spot_async.tools.estimate.requirements import RankMemory, Requirements, Sizes, requirements

UNKNOWN = "unknown"
WORDS = {
    "tokens_per_s": "tokens a second, one server",
    "tokens_per_s_each": "tokens a second, one request",
    "fixed_s": "seconds of an iteration besides",
}
WORDS_OF_TRAINER = {"tokens_per_s": "response tokens a second, all ranks"}


def run(
    screen: Console,
    source: Path,
    config: Config,
    plan: TrainPlan,
    directory: Path,
    earlier: Path | None,
    *,
    is_json: bool,
) -> None:
    """Print what the run would take. Raises DataError where a file to take speeds from cannot be read."""
    found, estimate = requirements(source, config, plan, directory, earlier)
    if is_json:
        text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode()
        screen.print(text, markup=False, highlight=False, soft_wrap=True)
    else:
        show(screen, config, found, estimate)


def show(screen: Console, config: Config, found: Requirements, estimate: MachineEstimate | None) -> None:
    if found.rank is not None:
        screen.print(rank_table(found.rank, config.training.ranks))
    if estimate is not None:
        screen.print(memory_table(estimate))
    screen.print(sizes_table(config, found))
    if estimate is not None:
        screen.print(work_table(estimate))
    screen.print(speeds_table(found) if found.speeds else Text("no speed is measured: run `tune`, or give --from RUN"))
    for line in notes(config, found, estimate):
        screen.print(Text(line), soft_wrap=True)
    for line in found.warnings:
        screen.print(Text(f"warning: {line}", style="yellow"), soft_wrap=True)


def rank_table(rank: RankMemory, ranks: int) -> Table:
    title = f"GiB of each of {ranks} ranks" if ranks > 1 else "GiB of the rank"
    table = _table(title, "")
    for name, value in (
        ("weights", rank.weights_gib),
        ("gradients", rank.gradients_gib),
        ("optimiser", rank.optimiser_gib),
        ("CUDA context", rank.context_gib),
        ("at rest", rank.at_rest_gib),
        ("copies to compute with", rank.copies_gib),
        ("activations", rank.activations_gib),
        ("logits", rank.logits_gib),
        ("while it trains", rank.training_gib),
    ):
        table.add_row(name, f"{value:.2f}")
    return table


def sizes_table(config: Config, found: Requirements) -> Table:
    both = (found.expected, found.at_most)
    training = config.training
    every = (
        f", iteration {training.keep_checkpoints.every} and its multiples" if training.keep_checkpoints.every else ""
    )
    table = _table("what is sent and kept", "expected", "at most")
    rows: list[tuple[str, Callable[[Sizes], int | None]]] = [
        ("a batch's supervision, to the trainer", lambda sizes: sizes.batch_bytes),
        ("a publish, to the student's servers", lambda sizes: sizes.publish_bytes),
        ("a checkpoint", lambda sizes: sizes.checkpoint_bytes),
        (
            f"disk: checkpoints, the last {training.keep_checkpoints.last}{every}",
            lambda sizes: sizes.checkpoints_kept_bytes,
        ),
        ("disk: published students", lambda sizes: sizes.published_kept_bytes),
        ("disk: samples.jsonl", lambda sizes: sizes.samples_bytes),
        ("disk: all of these", lambda sizes: sizes.disk_bytes),
    ]
    if (directory := training.weights_directory) is not None:
        where = "memory" if is_in_memory(Path(directory)) else "disk"
        rows.insert(4, (f"{where}: published in {directory}", lambda sizes: sizes.published_elsewhere_bytes))
    if found.parameters is not None and found.parameters.adapter:
        rows.insert(2, ("of that the adapter", lambda sizes: sizes.adapter_bytes))
    for name, size in rows:
        table.add_row(name, *(_bytes(size(each)) for each in both))
    table.add_row("disk: free", "", _bytes(found.free_disk_bytes))
    return table


def speeds_table(found: Requirements) -> Table:
    table = _table("measured", "")
    for role, speeds in found.speeds.items():
        for key, value in speeds.items():
            words = WORDS_OF_TRAINER.get(key, WORDS[key]) if role == "trainer" else WORDS[key]
            table.add_row(f"{role}: {words}", f"{value:,.4g}" if value < 1000 else f"{value:,.0f}")
    return table


def notes(config: Config, found: Requirements, estimate: MachineEstimate | None) -> list[str]:
    """Return what the tables take for granted, and what they leave out."""
    lines = [] if estimate is None else assumptions(estimate)[1:-1]
    lines.append(f"sizes assume responses of {found.expected_response_tokens:.0f} tokens")
    if found.parameters is None:
        lines.append("the student's size is unknown: its weights are not here, or not in safetensors")
    else:
        adapters = f", {found.parameters.adapter:,} of them in adapters" if found.parameters.adapter else ""
        lines.append(f"the student has {found.parameters.model + found.parameters.adapter:,} parameters{adapters}")
    training, checkpoint = config.training, found.at_most.checkpoint_bytes
    if checkpoint and training.checkpoint_every and training.device != "cpu" and training.offload == "none":
        lines.append(
            f"from GPUs a checkpoint goes through the first node's host memory: {_bytes(checkpoint)} there until it is "
            "written"
        )
    if found.rank is None:
        lines.append("the memory of a rank is unknown: the estimate does not know the student's architecture")
    elif not found.devices:
        lines.append(
            "a rank is estimated as on a GPU; what servers take is not known, as none starts on a numbered GPU"
        )
    lines.append(
        f"measured by {', '.join(found.measured_by)}; nothing else is" if found.speeds else "None of it is measured"
    )
    return lines


def _table(*columns: str) -> Table:
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _bytes(number: int | None) -> str:
    if number is None:
        return UNKNOWN
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number / 1e3:,.1f} kB"
