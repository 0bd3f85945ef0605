"""A checkpoint counts once its manifest has its name, and only while its files are what the manifest says."""

from __future__ import annotations

import pytest
import structlog

from spot_async.errors import DataError
from spot_async.run_directory import manifest
from spot_async.run_directory.manifest import FILE, Manifest


def written(run, step, *, commit=True):
    directory = manifest.checkpoint_directory(run, step)
    directory.mkdir(parents=True)
    (directory / "shard-00001.safetensors").write_bytes(b"tensors of %d" % step)
    if commit:
        manifest.commit(directory, Manifest(step=step, lineages=(0,), keys="k", data="d"))
    return directory


def steps(run):
    return [each.name for each in manifest.committed(run)]


def test_the_newest_one_with_a_manifest_is_gone_on_from(tmp_path):
    for step in (10, 20):
        written(tmp_path, step)
    written(tmp_path, 30, commit=False)
    found = manifest.newest(tmp_path)
    assert found.manifest.step == 20
    manifest.remove_unfinished(tmp_path)
    assert sorted(each.name for each in (tmp_path / "checkpoints").iterdir()) == ["step-000010", "step-000020"]


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"tensors of 99"), lambda path: path.unlink()])
def test_a_damaged_one_is_passed_over_for_the_one_before_and_named(tmp_path, damage):
    written(tmp_path, 10)
    damage(written(tmp_path, 20) / "shard-00001.safetensors")
    assert manifest.newest(tmp_path).manifest.step == 10
    with pytest.raises(DataError, match=r"step-000020/shard-00001.safetensors"):
        manifest.check(tmp_path / "checkpoints" / "step-000020")


def test_a_torn_manifest_a_newer_one_and_none_at_all_are_one_line_each(tmp_path):
    with pytest.raises(DataError, match="it has no checkpoint to resume from"):
        manifest.newest(tmp_path)
    path = written(tmp_path, 10) / FILE
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"no checkpoint is whole: .*manifest.json: cannot be read"):
        manifest.newest(tmp_path)
    path.write_bytes(whole.replace(b'"format": 1', b'"format": 9'))
    with pytest.raises(DataError, match="has format 9, newer than this spot-async can read"):
        manifest.newest(tmp_path)


def test_pruning_keeps_the_last_and_every_nth_and_all_where_the_newest_is_damaged(tmp_path):
    for step in (10, 20, 30, 40):
        written(tmp_path, step)
    manifest.prune(tmp_path, keep=2, keep_every=20)
    assert steps(tmp_path) == ["step-000040", "step-000030", "step-000020"]
    newest = written(tmp_path, 50)
    (newest / "shard-00001.safetensors").write_bytes(b"")
    with structlog.testing.capture_logs() as said:
        manifest.prune(tmp_path, keep=1, keep_every=None)
    assert "step-000050/shard-00001.safetensors: is not what the manifest says" in said[0]["reason"]
    assert steps(tmp_path) == ["step-000050", "step-000040", "step-000030", "step-000020"]
