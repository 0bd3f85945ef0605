"""Makes the page of a run's samples: a table that can be searched and sorted, with links to the samples' own pages."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

import msgspec
from markupsafe import Markup

from spot_async.base.text import visible
from spot_async.run_directory.samples import SampleRow
from spot_async.tools.pages.page import Links, filled

HEADINGS = ("sample", "iteration", "problem", "verdict", "tokens", "highest score", "positions", "retained")


def samples_page(
    name: str, samples: Sequence[SampleRow], linked: Sequence[int], what: str, folder: str = "", links: Links = ()
) -> str:
    """Return the page of all samples of the run `name`, with `links` to others.

    Those that are `linked` have pages, behind the address `folder`; `what` says which they are.
    The rows are data in the page, of which its script shows those that match. Its policy allows that script alone.
    """
    rows = (  # each is encoded by itself, since all of them as objects would be the largest part of a report's memory
        (
            number,
            each.iteration,
            visible(each.problem_id),
            each.verdict,
            each.tokens,
            each.highest_score,
            each.positions,
            each.retained,
        )
        for number, each in enumerate(samples)
    )
    encoded = msgspec.Raw(b"[%b]" % b",".join(map(msgspec.json.encode, rows)))
    data = msgspec.json.encode({"rows": encoded, "pages": list(linked), "folder": folder}).decode()
    script = files("spot_async.tools.pages").joinpath("html/samples.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return filled(
        "samples.html",
        name=visible(name),
        count=len(samples),
        headings=HEADINGS,
        linked=what,
        links=links,
        data=Markup(data.replace("<", "\\u003c")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )
