"""Reads docs/metrics.md, the names of the metrics that a run may write, and what a run serves of them."""

from __future__ import annotations

import re
import time
import urllib.request
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def rows() -> list[str]:
    """Return the names as the page writes them, with placeholders; those of Prometheus alone are left out."""
    return re.findall(r"^\| `([^`]+/[^`]+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.M)


def of_area(area: str) -> set[str]:
    """Return the names below an area, such as `loss` of `train`."""
    return {name.removeprefix(f"{area}/") for name in rows() if name.startswith(f"{area}/")}


def scrape(port: int, line: str = "", host: str = "127.0.0.1") -> str:
    """Return what a run serves to Prometheus, once `line` is in it: a sink takes iterations on a thread of its own."""
    end = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as reply:
            text = str(reply.read().decode())
        if line in text:
            return text
        assert time.monotonic() < end, text
