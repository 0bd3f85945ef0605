"""Weights that another user could change are refused, and what people really have is not."""

from __future__ import annotations

import grp
import os
from pathlib import Path

import pytest

from spot_async.base.writers import EVERYBODY, TRUSTED_VARIABLE, refuse_foreign_writers
from spot_async.config import LoraConfig
from spot_async.errors import ConfigError, DataError
from spot_async.models.adapter_files import check_adapter
from spot_async.models.files import read_model
from spot_async.models.weight_files import weight_files
from spot_async.run_directory import manifest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
NOBODY = 65534


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "models" / "student"
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def refused(directory: Path) -> str:
    with pytest.raises(DataError) as caught:
        weight_files(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_only_this_user_and_root_can_write_is_read(model):
    assert weight_files(model) == [model / "model.safetensors"]


@pytest.mark.parametrize("bit", [0o002, 0o020], ids=["everybody", "group"])
@pytest.mark.parametrize("which", ["model.safetensors", ".", ".."])
def test_a_file_or_directory_that_others_can_write_is_named_with_the_cure(monkeypatch, model, which, bit):
    monkeypatch.setattr("spot_async.base.writers._is_private", lambda group, trusted: False)
    path = Path(os.path.normpath(model / which))
    mode = path.stat().st_mode & 0o777 | bit
    path.chmod(mode)
    said = refused(model)
    cure = f"chmod {'o' if bit == 0o002 else 'g'}-w {path}"
    for words in (f"{path} can be written by", f"(mode {mode:04o}, owner ", cure, f"${TRUSTED_VARIABLE}"):
        assert words in said
    path.chmod(mode & ~bit)
    assert weight_files(model)


def test_the_shards_and_the_index_count_too(model):
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    for path in (index, model / "model-00001-of-00001.safetensors"):
        path.chmod(0o646)
        assert str(path) in refused(model)
        path.chmod(0o644)
    assert weight_files(model)


def test_a_directory_of_others_with_the_sticky_bit_is_safe_on_the_way_but_not_as_the_place(model):
    model.parent.chmod(0o1777)
    assert weight_files(model)  # as below /tmp
    model.chmod(0o1777)  # others could add an index or an adapter
    assert "can be written by everybody" in refused(model)


def test_a_link_is_as_safe_as_the_way_to_what_it_means(model, tmp_path):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (link := tmp_path / "link").symlink_to(elsewhere / "model")
    (elsewhere / "model").symlink_to("../models/student")
    assert weight_files(link)
    elsewhere.chmod(0o777)
    assert refused(link).startswith(f"{link}: {elsewhere} can be written by everybody")
    elsewhere.chmod(0o755)
    (model / "model.safetensors").rename(tmp_path / "blob")  # as the hub's cache has it
    (model / "model.safetensors").symlink_to("../../blob")
    assert weight_files(model)
    (tmp_path / "blob").chmod(0o666)
    assert str(tmp_path / "blob") in refused(model)


def test_a_group_of_ones_own_may_write_as_under_umask_002(monkeypatch, model):
    for path in (model, model / "model.safetensors"):
        path.chmod(path.stat().st_mode | 0o020)
    assert weight_files(model)


@needs_root
def test_a_group_with_others_or_that_nobody_knows_may_not_write(model):
    group = next((each.gr_gid for each in grp.getgrall() if each.gr_mem and each.gr_mem != ["root"]), NOBODY)
    for other in (group, 54321):
        os.chown(model, 0, other)
        model.chmod(0o775)
        assert "can be written by its group" in refused(model)


@needs_root
@pytest.mark.parametrize("which", ["model.safetensors", ".", ".."])
def test_what_belongs_to_another_user_is_refused_unless_that_user_is_trusted(monkeypatch, model, which):
    path = Path(os.path.normpath(model / which))
    os.chown(path, NOBODY, 0)
    assert f"{path} belongs to another user (mode " in refused(model)
    for trusted in (str(NOBODY), f"0, {NOBODY}", EVERYBODY):
        monkeypatch.setenv(TRUSTED_VARIABLE, trusted)
        assert weight_files(model)
    monkeypatch.setenv(TRUSTED_VARIABLE, "no-such-user")
    with pytest.raises(ConfigError, match="no user or group here is called no-such-user"):
        weight_files(model)


def test_every_role_s_model_is_looked_at_before_its_tokenizer_is_read(model):
    (model / "tokenizer_config.json").write_text("{}")
    (model / "tokenizer_config.json").chmod(0o666)
    with pytest.raises(DataError, match=r"^teacher\.model: .*/tokenizer_config\.json can be written by everybody"):
        read_model("teacher", str(model))


def test_a_checkpoint_that_others_can_write_is_not_resumed_from(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "rank-00001-of-00001.safetensors").write_bytes(b"state")
    manifest.commit(checkpoint, manifest.Manifest(step=1, lineages=(0,), keys="", data=""))
    assert manifest.newest(tmp_path).manifest.step == 1
    (checkpoint / "rank-00001-of-00001.safetensors").chmod(0o666)
    with pytest.raises(DataError, match="can be written by everybody"):
        manifest.newest(tmp_path)


def test_files_that_are_missing_are_left_to_the_reader(tmp_path):
    refuse_foreign_writers([tmp_path / "missing" / "model.safetensors"])


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "."])
def test_an_adapter_that_others_can_write_is_not_given_to_a_server(tmp_path, name):
    directory = tmp_path / "adapter"
    directory.mkdir()
    for each in ("adapter_config.json", "adapter_model.safetensors"):
        (directory / each).write_bytes(b"")
    (directory / name).chmod(0o777)
    with pytest.raises(DataError, match="can be written by everybody"):
        check_adapter(directory, {}, LoraConfig())
