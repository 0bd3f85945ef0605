"""The examples run as they stand."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from contract_run import run_contract
from typer.testing import CliRunner

from spot_async.cli import app

ROOT = Path(__file__).parents[1]
CUSTOM = ROOT / "examples" / "custom_method"
BACKEND = ROOT / "examples" / "custom_backend"


def python(*arguments: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train_installed(
    example: Path, configuration: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    """Install an example's package beside this one, train two iterations with it, and return the metrics' rows."""
    package = shutil.copytree(example, tmp_path / "package")  # building leaves files beside the sources
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    python("-m", "pip", "install", *offline, "--target", tmp_path / "site", package)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.chdir(ROOT)
    small = ["training.iterations=2", "training.batch_size=8", "training.mini_batch_size=4"]
    done = CliRunner().invoke(app, ["train", str(package / configuration), f"run.directory={tmp_path / 'run'}", *small])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_one_iteration_goes_from_prompts_to_a_gradient_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], servers_on_threads: None
) -> None:
    script = str(ROOT / "examples" / "one_iteration.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, "run"])
    runpy.run_path(script, run_name="__main__")
    *probed, step = capsys.readouterr().out.splitlines()
    assert any(" at " in line and "->" in line for line in probed)
    assert step.startswith("16 trajectories: policy ")
    assert "nan" not in step


def test_one_iteration_fits_a_page_to_begin_from() -> None:
    lines = (ROOT / "examples" / "one_iteration.py").read_text().splitlines()
    assert len(lines) < 150
    imports = [line for line in lines if line.startswith("from spot_async")]
    public = {
        "spot_async",
        "spot_async.backends.local",
        "spot_async.policies.spot",
        "spot_async.trainer.divergence",
        "spot_async.trainer.loss",
        "spot_async.verification",
    }
    assert {line.split()[1] for line in imports} == public


@pytest.mark.long
def test_the_custom_method_is_installed_found_by_its_name_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers_on_threads: None, trainer_on_thread: None
) -> None:
    rows = train_installed(CUSTOM, "confident_opd.yaml", tmp_path, monkeypatch)
    assert [row["iteration"] for row in rows] == [1, 2]
    assert all(0 < row["confident_opd/sure"] < 1 for row in rows)


def test_the_custom_methods_own_tests_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(CUSTOM))
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "-o", "addopts="]
    code = pytest.main([*words, str(CUSTOM / "test_confident_opd.py")])
    assert code == 0, capsys.readouterr().out
    for name in ("confident_opd", "test_confident_opd"):  # another test has it installed
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.long
def test_the_custom_backend_is_installed_found_by_its_name_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers_on_threads: None, trainer_on_thread: None
) -> None:
    rows = train_installed(BACKEND, "inline_teacher.yaml", tmp_path, monkeypatch)
    assert [row["iteration"] for row in rows] == [1, 2]
    assert not (tmp_path / "run" / "logs" / "teacher.log").exists()  # no server was started in its place


@pytest.mark.long
def test_the_custom_backends_own_tests_pass_and_it_is_short_enough_to_copy() -> None:
    said = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_inline_teacher.py", cwd=BACKEND)
    assert re.search(r"^\d+ passed", said, re.MULTILINE), said
    assert len((BACKEND / "inline_teacher.py").read_text().splitlines()) <= 130


def test_the_custom_backend_keeps_its_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BACKEND))
    model = str(ROOT / "examples" / "running_sum" / "teacher")
    kind = ["--backend", "inline_teacher:InlineTeacher", "--role", "teacher", "--model", model]
    code, found = run_contract(*kind, "--directory", str(tmp_path))
    assert code == 0, found
    assert {name for name, each in found.items() if each.state == "passed"} >= {"capabilities", "score_parity"}


def test_the_custom_method_is_short_and_names_only_what_is_public() -> None:
    assert len((CUSTOM / "confident_opd.py").read_text().splitlines()) < 60
    text = "".join(path.read_text() for path in CUSTOM.glob("*.py"))
    public = {"spot_async", "spot_async.protocols", "spot_async.testing"}
    assert set(re.findall(r"^(?:from|import) (spot_async\S*)", text, flags=re.M)) == public
