"""One page of results, in Markdown, beside what was expected of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_proof.experiments import EXPERIMENTS, Experiment, Part
from gpu_proof.machine import Machine
from gpu_proof.place import Result, Row


def page(results: Mapping[str, Result], machine: Machine) -> str:
    lines = ["# What GPUs said", "", "`make gpu-proof` wrote this page. The figures are in `gpu-proof.json`.", ""]
    lines += [f"Last run on: {machine.words}; commit {machine.commit or 'unknown'}.", ""]
    summary = [
        [f"[{key}](#{_anchor(key, each)})", each.title, _state(each, results)] for key, each in EXPERIMENTS.items()
    ]
    lines += [*table(["", "experiment", "state"], summary), ""]
    for key, experiment in EXPERIMENTS.items():
        lines += [f"## {key} {experiment.title}", "", experiment.question, ""]
        lines += _measured(experiment, results)
        lines += _expected(experiment, results)
    return "\n".join(lines).rstrip() + "\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[each.replace("|", "\\|").replace("\n", " ") for each in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *cells)]


def _state(experiment: Experiment, results: Mapping[str, Result]) -> str:
    """Return the states of the parts, and the reasons of those that were skipped, each once."""
    found = [results[part.name] for part in experiment.parts if part.name in results]
    counts: dict[str, int] = {}
    for result in found:
        counts[result.state] = counts.get(result.state, 0) + 1
    missing = len(experiment.parts) - len(found)
    words = [f"{count} {state}" for state, count in counts.items()] + [f"{missing} not yet"] * bool(missing)
    reasons = dict.fromkeys(
        reason for result in found if result.state == "skipped" for reason in result.reason.split("; ")
    )
    return ", ".join(words) + (f" ({'; '.join(reasons)})" if reasons else "")


def _measured(experiment: Experiment, results: Mapping[str, Result]) -> list[str]:
    lines = []
    for part in experiment.parts:
        result = results.get(part.name)
        if result is None:
            continue
        lines += [f"**{part.name.partition(' ')[2]}** ({part.what}): {_what_became(part, result)}", ""]
        if result.rows:
            columns = list(dict.fromkeys(name for row in result.rows for name in row))
            rows = [[_figure(row.get(column)) for column in columns] for row in result.rows]
            lines += [*table([column.replace("_", " ") for column in columns], rows), ""]
    return lines


def _what_became(part: Part, result: Result) -> str:
    if result.state == "skipped":
        return f"skipped: {result.reason}"
    found = Machine(**{**result.machine, "cards": tuple(result.machine.get("cards", ()))})
    where = f"{result.device}, {result.shape} sizes, {result.date} UTC, commit {found.commit}, {found.words}"
    return f"{result.state} after {result.seconds:.0f} s{': ' * bool(result.reason)}{result.reason} ({where})"


def _expected(experiment: Experiment, results: Mapping[str, Result]) -> list[str]:
    rows: list[Row] = []
    for part in experiment.parts:
        result = results.get(part.name)
        if result is not None and (result.device, result.shape) == ("cuda", "full"):
            rows += result.rows
    found = []
    for each in experiment.expectations:
        held = each.holds(rows) if each.holds is not None else None
        judged = {True: "yes", False: "**no**", None: "for a reader" if each.holds is None and rows else "not measured"}
        found.append([each.words, each.source, judged[held]])
    return [*table(["expected", "because of", "holds"], found), ""]


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return "" if value is None else f"{value:,}" if type(value) is int else str(value)


def _anchor(key: str, experiment: Experiment) -> str:
    title = f"{key} {experiment.title}".lower()
    return "".join(each for each in title if each.isalnum() or each in "- _").replace(" ", "-")
