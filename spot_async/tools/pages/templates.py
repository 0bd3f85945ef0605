"""Fills the HTML templates. Pages are self-contained and without scripts; the template engine escapes every value."""

from __future__ import annotations

import functools

import jinja2

from spot_async.base.text import visible
from spot_async.tools.pages import svg


@functools.cache
def templates() -> jinja2.Environment:
    """Return the templates of all pages. Whoever fills one gives it the functions that it calls."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("spot_async.tools.pages", "html"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"colours": svg.COLOURS, "dark_colours": svg.DARK_COLOURS}
    environment.filters["visible"] = visible
    return environment
