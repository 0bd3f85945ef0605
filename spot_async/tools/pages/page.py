"""What pages are made of: cards with plots of an iteration's metrics, the templates, and where a page is written.

Pages are self-contained. Only the list of samples has a script. The template engine escapes every value.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup
from rich.console import Console
from rich.text import Text

from spot_async.base.text import visible
from spot_async.base.writers import refuse_foreign_writers
from spot_async.errors import DataError
from spot_async.telemetry.totals import Rows, total
from spot_async.tools.pages import svg
from spot_async.tools.pages.series import Series, seconds, short_number

Links = Sequence[tuple[str, str]]  # words, and the address that they lead to


@dataclass(frozen=True)
class Plot:
    """One card of the page."""

    title: str
    note: str  # how to read it
    figure: Markup

    @property
    def labelled(self) -> Markup:
        """The figure, called by the plot's title if nothing in it has a name."""
        return self.figure.replace('aria-label=""', Markup('aria-label="{}"').format(self.title), 1)


@dataclass(frozen=True)
class Section:
    title: str
    plots: Sequence[Plot]


def present(*plots: tuple[str, str, Markup | None]) -> tuple[Plot, ...]:
    return tuple(Plot(title, note, figure) for title, note, figure in plots if figure is not None)


def lines(
    rows: Rows,
    names: Mapping[str, str],
    format_y: Callable[[float], str] = short_number,
    *,
    from_zero: bool = False,
    most: float = math.inf,
    marked: Mapping[float, str] = svg.NOTHING,
    smooth: bool = True,
) -> Markup | None:
    """Return a plot with a line per metric that is there. Lines of zeros are drawn only if there are no others."""
    series = [Series(name, points(rows, metric), i) for i, (name, metric) in enumerate(names.items())]
    series = [each for each in series if each.points]
    moving = [each for each in series if any(value for _, value in each.points)]
    if not series:
        return None
    drawn = moving or series[:1]
    return svg.line_plot(drawn, format_y=format_y, from_zero=from_zero, most=most, marked=marked, smooth=smooth)


def stacked(rows: Rows, names: Mapping[str, str]) -> Markup | None:
    """Return a plot of times, stacked on top of each other."""
    with_times = [row for row in rows if any(metric in row for metric in names.values())]
    if not with_times:
        return None
    series = [
        Series(name, [(row["iteration"], row.get(metric, 0.0)) for row in with_times], i)
        for i, (name, metric) in enumerate(names.items())
        if total(rows, metric) > 0
    ]
    return svg.stacked_plot(series, format_y=seconds)


def points(rows: Rows, metric: str) -> list[tuple[float, float]]:
    return [(row["iteration"], row[metric]) for row in rows if metric in row]


def filled(template: str, **values: Any) -> str:
    """Return a page. Whoever fills its template gives it the functions that it calls."""
    return _templates().get_template(template).render(values)


@functools.cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("spot_async.tools.pages", "html"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"colours": svg.COLOURS, "dark_colours": svg.DARK_COLOURS, "links": ()}
    environment.filters["visible"] = visible
    return environment


def address(of: Path, folder: Path) -> str:
    """Return what leads from a page in `folder` to another, as long as both are moved together."""
    return quote(os.fsencode(os.path.relpath(of, folder)))


def is_plain(page: Path) -> bool:
    """Return whether a page is, or becomes, a file where its path says, and no link or device such as /dev/stdout."""
    return not page.is_symlink() and (page.is_file() or not page.exists())


def folder_of(page: Path, what: str) -> Path:
    """Return the folder of the pages that a page leads to, which `write_page` makes. Raises DataError for a link."""
    folder = page.with_name(f"{page.stem}-{what}")
    if not is_plain(page):
        raise DataError(f"{page}: is no plain file, beside which more pages can stand: name another with --html")
    if folder.is_symlink():
        raise DataError(f"{folder}: is a link, and may lead anywhere: take it away, or name another page with --html")
    return folder


def page_path(run: Path, name: str, html: Path | None) -> Path:
    """Return where a page goes: where the user says, or into the run. Raises DataError for a run of somebody else."""
    if html is None:
        try:
            refuse_foreign_writers([run])
        except DataError as error:
            raise DataError(f"{error}; to read it only, say where the page goes: --html PATH") from None
    return html or run / name


def write_files(contents: Mapping[Path, bytes], option: str) -> None:
    """Write files that the command line's `option` named. Raises DataError if one cannot be written."""
    for path, content in contents.items():
        try:
            path.write_bytes(content)
        except OSError as error:
            raise DataError(f"{path}: cannot be written ({error.strerror}): name another file with {option}") from None


def write_page(screen: Console, path: Path, page: str, *, is_named: bool) -> None:
    """Write a page. Under a name that the user did not give, whatever is there is replaced: it may be a link."""
    data = page.encode("utf-8", errors="replace")  # names of files may be no UTF-8
    try:
        if is_named:
            path.write_bytes(data)
        else:
            path.parent.mkdir(exist_ok=True)
            new = path.with_name(f".{path.name}.new")
            new.unlink(missing_ok=True)
            with new.open("xb") as file:
                file.write(data)
            new.replace(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}): name another file with --html") from None
    screen.print(Text(f"page: {path}"))
