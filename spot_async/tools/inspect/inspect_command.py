"""`spot-async inspect` and `report`: decide which files to read, what to show, and where pages go."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from spot_async.base.text import counted, visible
from spot_async.errors import ConfigError, DataError
from spot_async.run_directory.dead_letters import described
from spot_async.run_directory.reading import RunFiles, name_tokens, token_texts
from spot_async.run_directory.samples import SampleRecord, SampleSummary
from spot_async.tools.inspect.report import Report, read_report, report_page
from spot_async.tools.inspect.terminal import sample_view, samples_table
from spot_async.tools.inspect.view import PolicySettings, colourings, sample_page, samples_page
from spot_async.tools.pages.page import Links, Section, address, folder_of, is_plain, page_path, write_page
from spot_async.types import Verdict

QUIET = Console(quiet=True)
MOST_PAGES, MOST_TOKENS = 256, 300_000  # of samples that have pages beside a report; a token takes about 500 bytes


def list_samples(
    screen: Console, run: Path, iteration: int | None, verdict: str | None, html: Path | None = None
) -> None:
    """Print the samples of one iteration, by default the last, and write pages of them where `html` says.

    Raises DataError if there are none.
    """
    if verdict is not None and verdict not in list(Verdict):
        raise ConfigError(f"--verdict {verdict}: no such verdict; it is one of {', '.join(Verdict)}")
    files = training_run(run)
    finished = {int(row["iteration"]) for row in files.metrics()}
    rows = files.samples.read()
    sampled = {row.iteration for row in rows}
    if not sampled:
        early = f"; {visible(early[0].lower() + early[1:])}" if (early := files.early_end()) else ""
        raise DataError(f"{run}: no samples: {files.samples_rhythm()}{early}")
    last = max(sampled | finished)
    if iteration is not None and not 1 <= iteration <= last:
        raise ConfigError(f"--iteration {iteration}: the run has 1 to {last}")
    if iteration is not None and iteration not in sampled:
        raise ConfigError(f"--iteration {iteration}: it has no samples: {files.samples_rhythm()}")
    shown = max(sampled) if iteration is None else iteration
    numbers = [n for n, row in enumerate(rows) if row.iteration == shown and verdict in (None, row.verdict)]
    title = f"{counted(len(numbers), 'sample')} of iteration {shown}; the run has {counted(last, 'iteration')}"
    screen.print(samples_table([(n, files.samples.record(n, SampleSummary)) for n in numbers], title))
    if html is not None:
        folder = folder_of(html, "samples")
        write_samples(files, html, folder, numbers, f"iteration {shown}", is_named=True)
        screen.print(Text(f"page: {html}\n{counted(len(numbers), 'page')} of samples: {folder}"), soft_wrap=True)
    if len(sampled) < last:
        words = f"{counted(len(sampled), 'iteration')} with samples: {files.samples_rhythm()}"
        screen.print(words, style="dim", highlight=False, soft_wrap=True)
    screen.print("one of them: spot-async inspect RUN SAMPLE", style="dim", highlight=False)
    dead = files.dead_letters()
    for line in (*files.interruptions(), *files.mismatches(), files.early_end(), described(dead) if dead else None):
        if line:
            screen.print(Text(visible(line), style="yellow"), soft_wrap=True)


def write_samples(
    files: RunFiles, path: Path, folder: Path, numbers: Sequence[int], what: str, links: Links = (), *, is_named: bool
) -> None:
    """Write a page of all samples, and into `folder` those of the samples with these `numbers`, linked with each other.

    All of them have the `links` too, which are relative to `folder`.
    """
    policy, rows, groups = PolicySettings.of(files.config()), files.samples.read(), defaultdict(list)
    for number in numbers:
        groups[rows[number].problem_id].append(number)
    name = files.path.resolve().name
    page = samples_page(name, rows, numbers, what, f"{address(folder, path.parent)}/", links)
    write_page(QUIET, path, page, is_named=is_named)
    for at, number in enumerate(numbers):
        sample = files.samples.record(number, SampleRecord)
        beside = {"previous": numbers[:at][-1:], "next": numbers[at + 1 :][:1]}
        around = [*links, ("all samples", address(path, folder))]
        around += [(words, f"inspect-{other}.html") for words, found in beside.items() for other in found]
        around += [
            (f"sample {other} of this problem", f"inspect-{other}.html")
            for other in groups[sample.problem_id]
            if other != number
        ]
        name_tokens(files, sample)
        found = colourings(sample, token_texts(files, sample.response_ids), policy)
        page = sample_page(number, sample, found, policy, around)
        write_page(QUIET, folder / f"inspect-{number}.html", page, is_named=False)


def show_sample(screen: Console, run: Path, wanted: str, html: Path | None) -> None:
    """Print a sample and write its page, by default into the run directory. Raises DataError."""
    files = training_run(run)
    number, sample = files.sample(wanted)
    path = page_path(run, f"inspect-{number}.html", html)
    name_tokens(files, sample)
    policy = PolicySettings.of(files.config())
    found = colourings(sample, token_texts(files, sample.response_ids), policy)
    screen.print(sample_view(number, sample, found[0], policy))
    if wanted != str(number) and len(numbers := files.samples.of_problem(sample.problem_id)) > 1:
        listed = ", ".join(map(str, numbers))
        screen.print(Text(f"the last sample of {visible(sample.problem_id)}, which has {listed}", style="dim"))
    write_page(screen, path, sample_page(number, sample, found, policy), is_named=html is not None)


def write_report(
    screen: Console, run: Path, html: Path | None, more: Sequence[Section] = (), watch_s: float | None = None
) -> None:
    """Write a run's report, by default into the run directory; the sections `more` follow its own. Raises DataError.

    With `watch_s` it is written again as often, if the run has grown, until the run ends. Pages of samples are written
    once it has ended.
    """
    files = training_run(run)
    path = page_path(run, "report.html", html)
    told = screen
    while watch_s is not None and files.is_going_on():
        size = files.size_bytes()
        page = report_page(read_report(files, more), written=f"{datetime.now():%H:%M:%S}", reload_s=watch_s)
        write_page(told, path, page, is_named=html is not None)
        told = QUIET  # the path is said once
        while files.is_going_on() and files.size_bytes() == size:
            time.sleep(watch_s)
    report = read_report(files, more)
    screen.print(Text(report.bottleneck.sentence), *(Text(f"* {line}") for line in report.bottleneck.advice), sep="\n")
    for name, fact in report.facts:
        if name in ("outcome slope", "trainer", "staleness"):
            screen.print(Text(f"{name}: {fact}"))
    if report.missing_signal is not None:
        screen.print(Text(report.missing_signal, style="yellow"))
    if report.results is not None:
        screen.print(report.results.for_terminal(), Text(report.results.note), sep="\n", soft_wrap=True)
    write_linked(screen, files, path, report, is_named=html is not None)


def write_linked(
    screen: Console, files: RunFiles, path: Path, report: Report, links: Links = (), *, is_named: bool = False
) -> None:
    """Write a report that leads by `links` elsewhere, and, once the run ended, to pages of its samples beside it."""
    samples, tokens = len(report.lengths), sum(tokens for _, tokens in report.lengths)
    if not samples or not is_plain(path) or files.is_going_on():
        write_page(screen, path, report_page(report, links=links), is_named=is_named)
        return
    folder = folder_of(path, "samples")
    step = max(1, math.ceil(samples / MOST_PAGES), math.ceil(tokens / MOST_TOKENS))
    listed, numbers, back = folder / "samples.html", range(0, samples, step), [("report", address(path, folder))]
    page = report_page(report, links=[*links, ("samples", address(listed, path.parent))])
    write_page(screen, path, page, is_named=is_named)  # first, so that its folder is there
    write_samples(files, listed, folder, numbers, f"one in {step}" if step > 1 else "all", back, is_named=False)
    screen.print(Text(f"{counted(len(numbers), 'page')} of {samples:,} samples: {folder}"), soft_wrap=True)


def training_run(run: Path) -> RunFiles:
    """Return a run's files. Raises DataError for `spot-async eval`'s, where nothing was sampled for training."""
    files = RunFiles(run)
    if files.is_evaluation:
        raise DataError(
            f"{files.path} is an evaluation's: once it is complete, its figures are in summary.json and each judged "
            "response in evaluation.jsonl; this command is for a training run"
        )
    return files
