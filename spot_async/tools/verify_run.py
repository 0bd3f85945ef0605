"""Says from a run's files alone what became of every prompt: trained once, twice or never.

It starts, imports and writes nothing: the run may be somebody else's.

A prompt is trained if its batch comes before the step of the newest whole checkpoint. What came after that checkpoint
is pending: a resumed run makes it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from spot_async.errors import DataError
from spot_async.run_directory import manifest
from spot_async.run_directory.layout import RunDirectory
from spot_async.run_directory.ledger import FILE, Ledger, batch_faults, state_of
from spot_async.run_directory.reading import RunFiles
from spot_async.telemetry.screen import number_table

STATES = ("trained", "left out", "in vain", "dead", "unpaid", "pending")


class Verification(NamedTuple):
    """What was found."""

    step: int  # of the newest whole checkpoint; 0: there is none
    counts: Sequence[Mapping[str, int]]  # prompts by state, for each epoch
    faults: Sequence[str]  # lines about what must not be


def verify(path: Path) -> Verification:
    """Verify a run that nobody writes to. Raises DataError if its files cannot be read."""
    directory = RunDirectory.open(path)
    if not (path / FILE).exists():
        raise DataError(f"{path}: holds no {FILE}, so it is not of a run that can be verified")
    if directory.is_in_use():
        raise DataError(f"{path} is in use: verify it when its run is over")
    files = RunFiles(path)
    batch_size = (files.config().get("training") or {}).get("batch_size")
    if type(batch_size) is not int:
        raise DataError(f"{path / 'config.yaml'}: training.batch_size={batch_size!r} is no number of prompts")
    with Ledger.read_only(path) as ledger:
        rows = list(ledger.prompts())
    step, faults = _read_checkpoints(path)
    if step > len(rows):  # each iteration has a prompt
        raise DataError(f"{path}: its newest checkpoint is of iteration {step}, but {FILE} has {len(rows)} prompts")
    faults += batch_faults(rows, step, batch_size)
    trained = Counter(row["iteration"] for row in files.metrics())
    twice_or_never = [iteration for iteration in range(1, step + 1) if trained[iteration] != 1]
    faults += [f"metrics.jsonl has {trained[iteration]} rows of iteration {iteration}" for iteration in twice_or_never]
    epochs: list[Counter[str]] = []
    seen: Counter[str] = Counter()
    for row in rows:  # an epoch has each problem once
        epoch = seen[row.problem_id]
        seen[row.problem_id] += 1
        if epoch == len(epochs):
            epochs.append(Counter())
        epochs[epoch][state_of(row, step)] += 1
    return Verification(step, epochs, faults)


def show(console: Console, path: Path, found: Verification) -> None:
    console.print(f"{path}: trained up to iteration {found.step}, by its newest whole checkpoint", soft_wrap=True)
    table = number_table("epoch", *STATES, title="Prompts")
    for number, counts in enumerate(found.counts, start=1):
        table.add_row(str(number), *(str(counts.get(state, 0)) for state in STATES))
    console.print(table)
    for fault in found.faults:
        console.print(f"fault: {fault}", style="red", soft_wrap=True, markup=False)
    if not found.faults:
        console.print("no prompt is trained twice, and none is lost")


def _read_checkpoints(path: Path) -> tuple[int, list[str]]:
    """Return the step of the newest whole checkpoint, and a line about each damaged one. Every file is read once."""
    step, faults = 0, []
    for each in manifest.committed(path):
        try:
            step = max(step, manifest.check(each).manifest.step)
        except DataError as fault:
            faults.append(str(fault))
    return step, faults
