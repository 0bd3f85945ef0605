"""Chooses alpha, gamma and beta by the pilot of `baseline`, with the rule of README.md."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rows import PAPERS, PILOT, PILOT_SEEDS, WITH_BASELINE, BranchLoss, Setting
from tables import METRICS, read_records

MOST_LOST = 3.0  # points of Pass@8


class Figures(NamedTuple):
    """What a row reached in a setting, in percent, as means over seeds."""

    avg: float
    passed: float


Pilot = Mapping[str, Mapping[BranchLoss, Figures]]  # by setting


class Place(NamedTuple):
    """A candidate's place by the rule; those that lose too much of Pass@8 have no rank."""

    mean_rank: float | None
    lost: float  # the most points of Pass@8 that it is below the paper's loss, of all settings
    loss: BranchLoss


def read_pilot(directory: Path, settings: Sequence[Setting], seeds: Sequence[int] = PILOT_SEEDS) -> tuple[Pilot, int]:
    """Return the figures of all rows that have these seeds, and how many runs are missing."""
    found: dict[str, dict[BranchLoss, Figures]] = {}
    missing = 0
    for setting in settings:
        records, of_setting = read_records(directory, setting), found.setdefault(setting.name, {})
        for loss in (*PAPERS, *WITH_BASELINE):
            runs = [records[loss.row][seed] for seed in seeds if seed in records.get(loss.row, {})]
            missing += len(seeds) - len(runs)
            if len(runs) == len(seeds):
                of_setting[loss] = Figures(
                    *(100 * float(np.mean([of(run) for run in runs])) for of in METRICS.values())
                )
    return found, missing


def places(pilot: Pilot, candidates: Sequence[BranchLoss]) -> list[Place]:
    """Return the candidates' places, best first."""

    def lost(each: BranchLoss) -> float:
        paper = BranchLoss(0.0, each.gamma, 1)
        return max(figures[paper].passed - figures[each].passed for figures in pilot.values())

    least = min(map(lost, candidates))
    kept = [each for each in candidates if lost(each) <= max(MOST_LOST, least)]

    def mean_rank(each: BranchLoss) -> float:
        ranks = []
        for figures in pilot.values():
            others = [figures[other].avg for other in kept]
            better, equal = (
                sum(test(other, figures[each].avg) for other in others) for test in (float.__gt__, float.__eq__)
            )
            ranks.append(better + (1 + equal) / 2)
        return float(np.mean(ranks))

    ranked = sorted(Place(mean_rank(each), lost(each), each) for each in kept)
    return ranked + [Place(None, lost(each), each) for each in candidates if each not in kept]


def write_pilot(directory: Path, settings: Sequence[Setting]) -> None:
    """Write `pilot.md`: the figures of what has been run and, once all of it has been, the choice."""
    pilot, missing = read_pilot(directory, settings)
    lines = [
        "Avg@8 / Pass@8 in percent, means over seeds.",
        "",
        f"| row | {' | '.join(pilot)} |",
        "|---" * (1 + len(pilot)) + "|",
    ]
    for loss in (*PAPERS, *WITH_BASELINE):
        cells = [f"{each[loss].avg:.1f} / {each[loss].passed:.1f}" if loss in each else "" for each in pilot.values()]
        lines.append(f"| {loss.row} | {' | '.join(cells)} |")
    if missing or len(settings) < len(PILOT):
        lines += ["", f"{missing} runs are missing: nothing is chosen yet."]
    else:
        for name, candidates in (("with a baseline", WITH_BASELINE), ("the paper's", PAPERS)):
            lines += ["", f"| {name} | mean rank by Avg@8 | most Pass@8 lost |", "|---|---|---|"]
            for each in (ranked := places(pilot, candidates)):
                rank = "out" if each.mean_rank is None else f"{each.mean_rank:.2f}"
                lines.append(f"| {each.loss.row} | {rank} | {each.lost:.1f} |")
            lines += ["", f"Chosen: **{ranked[0].loss.row}**"]
    text = "\n".join(lines) + "\n"
    (directory / "pilot.md").write_text(text)
    sys.stdout.write(text)
