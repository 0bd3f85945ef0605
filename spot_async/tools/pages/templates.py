"""Fills the HTML templates. Pages are self-contained and without scripts; the template engine escapes every value."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jinja2

from spot_async.base.text import visible
from spot_async.run_directory.reading import SampleRecord
from spot_async.tools.inspect.view import (
    GUIDED,
    Colouring,
    PolicySettings,
    branch_legend,
    branch_state,
    candidate_name,
    framed_words,
    is_sampled,
    probability,
    remarks,
    sampled_shares,
    score_parts,
    verdict_text,
    verdict_tone,
)

if TYPE_CHECKING:
    from spot_async.tools.inspect.report import Report

LONG_TEXT = 600  # a probe with more characters is folded


@functools.cache
def templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("spot_async.tools.pages", "html"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "branch_legend": branch_legend,
        "branch_state": branch_state,
        "candidate_name": candidate_name,
        "framed_words": framed_words,
        "is_sampled": is_sampled,
        "remarks": remarks,
        "sampled_shares": sampled_shares,
        "score_parts": score_parts,
    }
    environment.filters |= {
        "visible": visible,
        "probability": probability,
        "verdict": verdict_text,
        "tone": verdict_tone,
    }
    return environment


def sample_page(
    number: int, sample: SampleRecord, colourings: Sequence[Colouring], policy: PolicySettings = GUIDED
) -> str:
    """Return the page of one rollout: problem, response in every colouring, branches."""
    template = templates().get_template("sample.html")
    return template.render(number=number, sample=sample, colourings=colourings, policy=policy, long_text=LONG_TEXT)


def report_page(report: Report) -> str:
    """Return the page of a whole run."""
    return templates().get_template("report.html").render(report=report)
