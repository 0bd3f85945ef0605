"""Reads docs/metrics.md: the names of the metrics that a run may write."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def rows() -> list[str]:
    """Return the names as the page writes them, with placeholders; those of Prometheus alone are left out."""
    return re.findall(r"^\| `([^`]+/[^`]+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.M)


def of_area(area: str) -> set[str]:
    """Return the names below an area, such as `loss` of `train`."""
    return {name.removeprefix(f"{area}/") for name in rows() if name.startswith(f"{area}/")}
