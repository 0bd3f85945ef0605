"""Names in a run directory that are not ours are left alone: copies, editors' and file systems' files, and links."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from spot_async.base.files import all_numbered, number_of, numbered
from spot_async.models.weight_files import SINGLE_FILE
from spot_async.run_directory import manifest
from spot_async.run_directory.layout import RunDirectory, evaluated, evaluation_files
from spot_async.run_directory.manifest import Manifest
from spot_async.running.checkpoints import _move_aside, put_aside

# Beside the directories of steps 3 and 6. Those of people hold a copy of the newest.
COPIES = (
    "step-000006-good",
    "step-000006 (1)",
    "step-6",
    "step-0000006",
    "step-000006.bak",
    "step-last",
    ".step-good",
)
FILES = (".DS_Store", ".nfs0000000000c0ffee", "step-000007", "step-000006.swp", ".step-000006.swp", "step-000004~")


def strewn(directory: Path) -> Iterator[Path]:
    """Yield what is put beside a directory's own entries."""
    for name in COPIES:
        yield directory / shutil.copytree(directory / "step-000006", directory / name)
    for name in FILES:
        (directory / name).write_text("someone's")
        yield directory / name
    for name in ("step-000005", "step-link"):
        (directory / name).symlink_to("nowhere")
        yield directory / name


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with checkpoints and weights of steps 3 and 6."""
    for step in (3, 6):
        checkpoint, weights = manifest.checkpoint_directory(tmp_path, step), RunDirectory(tmp_path).weights.after(step)
        for directory, file in ((checkpoint, "rank-00001-of-00001.safetensors"), (weights, SINGLE_FILE)):
            directory.mkdir(parents=True)
            (directory / file).write_text(f"numbers of step {step}")
        (checkpoint / ".DS_Store").write_text("of a file manager")
        manifest.commit(checkpoint, Manifest(step=step, lineages=(0,), keys="k", data="d"))
        (checkpoint / ".DS_Store").unlink()
    return tmp_path


def test_a_directory_of_a_step_has_exactly_its_name(tmp_path: Path) -> None:
    for number in (0, 12, 999_999, 1_000_000):
        numbered(tmp_path, "step", number).mkdir()
        assert number_of(numbered(tmp_path, "step", number), "step") == number
    for name in (*COPIES, *FILES, "step-", "step-+00006", "best-000006", "step-\u0660\u0660\u0660\u0660\u0660\u0666"):
        if name != "step-000007":  # a name of ours, on a file
            assert number_of(tmp_path / name, "step") is None
    assert [number_of(each, "step") for each in all_numbered(tmp_path, "step")] == [0, 12, 999_999, 1_000_000]


def test_a_run_goes_on_from_its_own_checkpoint_and_deletes_nobody_else_s(run: Path) -> None:
    others = [*strewn(run / "checkpoints")]
    assert manifest.newest(run).directory == run / "checkpoints" / "step-000006"
    manifest.remove_unfinished(run)
    manifest.prune(run, keep=1, keep_every=None)
    assert [each.name for each in manifest.committed(run)] == ["step-000006"]
    assert not [each for each in others if not each.exists() and not each.is_symlink()]


def test_going_back_moves_the_run_s_own_weights_checkpoints_and_evaluations(run: Path) -> None:
    others = [*strewn(run / "checkpoints"), *strewn(run / "weights")]
    own = ["evaluation-000006.json", "evaluation-000006.jsonl", "evaluation-after.json", "evaluation-after.jsonl"]
    copies = ["evaluation-0.txt", "evaluation-000006 (1).json", "evaluation-0000006.json", "evaluation-after-good.json"]
    for name in (*own, *copies):
        (run / name).write_text("{}")
    (run / "evaluation-000008.json").mkdir()
    assert evaluated(run) == ["000006", "after"]
    assert [each.name for each in evaluation_files(run, "000006")] == own[:2]
    _move_aside(run, 3)
    put_aside(run, evaluation_files(run, "after"))
    aside = run / "rolled-back"
    assert sorted(each.name for each in aside.iterdir()) == ["checkpoints", *own, "weights"]
    assert [each.name for each in aside.glob("*/*")] == ["step-000006"] * 2
    assert not [each for each in others if not each.exists() and not each.is_symlink()]
    assert all((run / name).exists() for name in copies)
