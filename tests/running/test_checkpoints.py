"""Checkpoints of a run directory: what is refused before one is begun, and what a full disk says."""

from __future__ import annotations

import shutil
from contextlib import closing

import pytest

from spot_async.config import TrainingConfig
from spot_async.errors import StorageError
from spot_async.run_directory.layout import RunDirectory, evaluation_files
from spot_async.run_directory.ledger import Ledger
from spot_async.run_directory.manifest import Manifest, committed
from spot_async.running.checkpoints import RunCheckpoints, put_aside


async def test_a_checkpoint_that_would_not_fit_is_not_begun(tmp_path, monkeypatch):
    left = shutil.disk_usage(tmp_path)

    def leave(free):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: left._replace(free=free))

    with closing(Ledger.open(tmp_path)) as ledger:
        checkpoints = RunCheckpoints(
            RunDirectory(tmp_path),
            TrainingConfig(iterations=20),
            iterations=20,
            beginning=Manifest(step=0, lineages=(0,), keys="", data=""),
            ledger=ledger,
            expected_bytes=2_000_000,
        )
        leave(1_900_000)
        with pytest.raises(StorageError, match=r"iteration 10: a checkpoint takes 2.0 MB, and .* has 1.9 MB left"):
            checkpoints.directory(10)
        leave(2_100_000)
        first = tmp_path / "checkpoints" / "step-000010"
        assert checkpoints.directory(10) == str(first)
        first.mkdir(parents=True)
        (first / "rank-00001-of-00001.safetensors").write_bytes(bytes(3_000_000))
        student = tmp_path / "weights" / "step-000010"
        student.mkdir(parents=True)
        (student / "model.safetensors").touch()
        await checkpoints.commit(10)
        assert (tmp_path / "student").resolve() == student  # it may have been published as an adapter alone
        # The next one takes what this one did.
        with pytest.raises(StorageError, match=r"takes 3.0 MB.*training.keep_checkpoints.*the checkpoints before"):
            checkpoints.directory(20)
    assert committed(tmp_path) == [first]


def test_a_disk_that_takes_nothing_more_is_named_when_a_run_goes_back(tmp_path):
    (tmp_path / "evaluation-after.json").write_text("{}")
    (tmp_path / "rolled-back").touch()  # so that no directory can be made there
    with pytest.raises(StorageError, match=r"cannot move .*evaluation-after\.json to .*rolled-back/evaluation-after"):
        put_aside(tmp_path, evaluation_files(tmp_path, "after"))
    assert (tmp_path / "evaluation-after.json").exists()
