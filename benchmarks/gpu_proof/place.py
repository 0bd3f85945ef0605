"""Where an experiment's part runs, and what became of it: the device, the sizes of models, directories, and rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

# One row of a part's results: what was measured, and its figures by name.
Row = dict[str, Any]
Rows = Iterator[Row]


State = Literal["done", "failed", "cut short", "stopped", "skipped"]
SHAPES = ("tiny", "0.6b", "1.7b", "4b")


class Place(NamedTuple):
    device: str  # cuda or cpu
    shape: str  # full or tiny
    models: str  # models that were made are kept here
    scratch: str  # of this part alone
    vllm: str = ""  # interpreters
    sglang: str = ""
    node: str = ""  # what runs a command on the second node, such as `ssh node2`
    address: str = ""  # of this node, for the second

    @property
    def is_tiny(self) -> bool:
        return self.shape == "tiny"

    @property
    def keys(self) -> dict[str, Any]:
        """Keys of `training` that this place needs."""
        return {"device": self.device}

    def size(self, wanted: str) -> str:
        return "tiny" if self.is_tiny else wanted

    def with_models(self) -> Path:
        """Return this part's directory, with links to the models that earlier parts made, and places for new ones."""
        directory = Path(self.scratch)
        directory.mkdir(parents=True, exist_ok=True)
        for size in SHAPES:
            kept = Path(self.models) / size
            kept.mkdir(parents=True, exist_ok=True)
            if not (directory / size).exists():
                (directory / size).symlink_to(kept)
        return directory


@dataclasses.dataclass
class Result:
    """What became of a part."""

    state: State
    reason: str = ""  # why it has no rows, or not all
    rows: list[Row] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    date: str = ""
    device: str = ""
    shape: str = ""
    machine: dict[str, Any] = dataclasses.field(default_factory=dict)
