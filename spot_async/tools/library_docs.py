"""Writes what a method awaits and returns: `python -m spot_async.tools.library_docs docs/library.md`.

It is the code itself, with the comments that name shapes, between two marks of the page. A test compares them.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from spot_async.protocols import PromptStages
from spot_async.types import Generation, Sample, ScoredPositions, SoftTargets, Supervision, TokenScores, VersionSpan

BEGIN, END = "<!-- Generated from the code: `make docs`. -->\n", "<!-- End of what is generated. -->\n"
SHOWN: dict[str, tuple[type, ...]] = {
    "What a policy awaits": (PromptStages,),
    "What stages return": (Generation, VersionSpan, TokenScores, ScoredPositions),
    "What a policy returns": (Sample, Supervision, SoftTargets),
}


def renewed(page: str) -> str:
    """Return the page with the code as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page has no {BEGIN.strip()} before {END.strip()}")
    return "".join([before, BEGIN, *(_part(title, shown) for title, shown in SHOWN.items()), "\n", END, after])


def _part(title: str, shown: tuple[type, ...]) -> str:
    code = "\n\n".join(inspect.getsource(each) for each in shown)
    return f"\n### {title}\n\n```python\n{code}```\n"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
