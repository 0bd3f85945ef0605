"""Makes the page of a run's samples: a table that can be searched and sorted, with links to the samples' own pages."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

import msgspec
from markupsafe import Markup

from spot_async.base.text import visible
from spot_async.run_directory.reading import SampleSummary
from spot_async.tools.pages.page import Links, filled

HEADINGS = ("sample", "iteration", "problem", "verdict", "tokens", "highest score", "positions", "retained")


def samples_page(
    name: str, samples: Iterable[SampleSummary], linked: Sequence[int], what: str, folder: str = "", links: Links = ()
) -> str:
    """Return the page of all samples of the run `name`, with `links` to others.

    Those that are `linked` have pages, behind the address `folder`; `what` says which they are.
    The rows are data in the page, of which its script shows those that match. Its policy allows that script alone.
    """
    rows = [_row(number, sample) for number, sample in enumerate(samples)]
    data = msgspec.json.encode({"rows": rows, "pages": list(linked), "folder": folder}).decode().replace("<", "\\u003c")
    script = files("spot_async.tools.pages").joinpath("html/samples.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return filled(
        "samples.html",
        name=visible(name),
        count=len(rows),
        headings=HEADINGS,
        linked=what,
        links=links,
        data=Markup(data),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def _row(number: int, sample: SampleSummary) -> list[Any]:
    scores = [score for score in sample.acquisition_score or () if score is not None]
    return [
        number,
        sample.iteration,
        visible(sample.problem_id),
        sample.verdict,
        len(sample.response_ids),
        max(scores, default=None),
        len(sample.branches),
        sum(branch.retained for branch in sample.branches),
    ]
