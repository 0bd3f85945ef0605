"""What the commands `inspect` and `report` do: which files to read, what to show, where pages go."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from spot_async.errors import DataError
from spot_async.inspection.reading import RunFiles, SampleSummary


def list_samples(screen: Console, run: Path, iteration: int | None, verdict: str | None) -> None:
    """Print the samples of one iteration, the last one when none is named. Raises DataError without any."""
    from spot_async.inspection.terminal import samples_table

    files = RunFiles(run)
    rows: list[tuple[int, SampleSummary]] = []
    last = 0
    for number, summary in enumerate(files.samples()):
        if iteration is None and summary.iteration > last:
            rows.clear()
        last = max(last, summary.iteration)
        if iteration in (None, summary.iteration) and verdict in (None, summary.verdict):
            rows.append((number, summary))
    if not last:
        raise DataError(f"{run}: no samples yet: they are written as each iteration ends")
    shown = last if iteration is None else iteration
    screen.print(samples_table(rows, f"{len(rows)} samples of iteration {shown}; the run has {last} iterations"))
    screen.print("one of them: spot-async inspect RUN SAMPLE", style="dim", highlight=False)


def show_sample(screen: Console, run: Path, wanted: str, html: Path | None) -> None:
    """Print a sample and write its page, by default into the run directory. Raises DataError."""
    from spot_async.inspection.pages import sample_page
    from spot_async.inspection.reading import token_texts
    from spot_async.inspection.terminal import sample_view
    from spot_async.inspection.view import colourings

    files = RunFiles(run)
    number, sample = files.sample(wanted)
    found = colourings(sample, token_texts(files, sample.response_ids))
    screen.print(sample_view(number, sample, found[0]))
    write_page(screen, html or run / f"inspect-{number}.html", sample_page(number, sample, found))


def write_report(screen: Console, run: Path, html: Path | None) -> None:
    """Write a run's report, by default into the run directory. Raises DataError."""
    from spot_async.inspection.pages import report_page
    from spot_async.inspection.report import read_report

    write_page(screen, html or run / "report.html", report_page(read_report(RunFiles(run))))


def write_page(screen: Console, path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}): name another file with --html") from None
    screen.print(Text(f"page: {path}"))
