"""Plug-ins are found by their names, whenever they were installed."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from spot_async.base import registry
from spot_async.policies.grpo import GrpoPolicy
from spot_async.policies.opd import OpdPolicy


def install(site: Path, package: str, declared: str) -> None:
    information = site / f"{package}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[spot_async.policies]\n{declared}\n")
    importlib.invalidate_caches()


def test_one_that_is_installed_while_a_program_runs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="no policy called 'late'"):
        registry.load("policies", "late")
    install(tmp_path, "late", "late = spot_async.policies.opd:OpdPolicy")
    assert registry.load("policies", "late") is OpdPolicy


def test_of_two_with_one_name_the_first_on_the_path_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, kind in (("second", "grpo:GrpoPolicy"), ("first", "opd:OpdPolicy")):
        install(tmp_path / folder, folder, f"same = spot_async.policies.{kind}")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        assert registry.load("policies", "same") is (OpdPolicy if folder == "first" else GrpoPolicy)
