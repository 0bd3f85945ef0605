"""What the launcher gives its ranks that no other process has."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from spot_async.trainer import launcher


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, "max_split_size_mb:512"),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, None),  # the newer name is the user's word as well
    ],
)
def test_ranks_get_segments_that_grow_unless_the_user_has_decided(
    given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", {**given})
    settings = SimpleNamespace(training=SimpleNamespace(ranks=1, threads=1))
    monkeypatch.setattr(launcher.TrainerSettings, "load", lambda _: settings)

    def launch(*_: Any, **__: Any) -> Any:
        return lambda *_: seen.update(os.environ)

    monkeypatch.setattr(launcher, "elastic_launch", launch)
    assert launcher.main(["settings.json", "channel"]) == 0
    assert seen.get("PYTORCH_CUDA_ALLOC_CONF") == expected
    assert {name: seen[name] for name in given} == given
