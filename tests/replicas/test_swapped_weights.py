"""Weights that another process changes between their publishing and a server's reading of them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from replica_incidents import Server, incident
from structlog.testing import capture_logs

from spot_async.errors import DataError
from spot_async.models.weight_files import check_unchanged, marked, weight_file_marks
from spot_async.types import WeightSnapshot, WeightVersion

pytestmark = pytest.mark.usefixtures("quiet")


def published(tmp_path: Path) -> WeightSnapshot:
    directory = tmp_path / "step-000001"
    (directory / "adapter").mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"published weights")
    (directory / "adapter" / "adapter_model.safetensors").write_bytes(b"published adapter")
    return marked(WeightSnapshot(directory=str(directory), version=WeightVersion(0, 1)))


def replaced(path: Path) -> None:
    path.with_name("new").write_bytes(b"planted   weights")
    path.with_name("new").replace(path)


def written_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"planted  ")


def written_by_a_link(path: Path) -> None:
    (link := path.with_name("link")).hardlink_to(path)
    written_in_place(link)
    link.unlink()


def swapped_with_its_directory(path: Path) -> None:
    old = path.parent.rename(path.parent.with_name("old"))
    path.parent.mkdir()
    path.write_bytes((old / path.name).read_bytes())


def removed(path: Path) -> None:
    path.unlink()


ATTACKS = [replaced, written_in_place, written_by_a_link, swapped_with_its_directory, removed]


@pytest.mark.parametrize("name", ["model.safetensors", "adapter/adapter_model.safetensors"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_file_that_is_not_the_published_one_is_named(tmp_path, attack, name):
    snapshot = published(tmp_path)
    check_unchanged(snapshot)
    attack(Path(snapshot.directory) / name)
    first = r"[\w/]+\.safetensors" if attack is swapped_with_its_directory else name
    with pytest.raises(DataError, match=rf"^{snapshot.directory}/{first}: (was|cannot be read)[^\n]*publish[^\n]*$"):
        check_unchanged(snapshot)


def test_links_and_new_files_are_nothing_and_a_time_that_was_set_back_is_logged(tmp_path):
    snapshot = published(tmp_path)
    path = Path(snapshot.directory) / "model.safetensors"
    (path.parent / "model-2.safetensors").write_bytes(b"whole weights that a checkpoint adds")
    with capture_logs() as logged:
        check_unchanged(snapshot)
    assert not logged
    (backup := tmp_path / "backup").hardlink_to(path)
    with capture_logs() as logged:
        check_unchanged(snapshot)
    assert not logged
    backup.unlink()
    before = path.stat()
    written_in_place(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with capture_logs() as logged:
        check_unchanged(snapshot)
    assert [each["file"] for each in logged] == [str(path)]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("when", ["before", "during"])
def test_an_update_ends_the_run_when_the_files_were_changed_before_or_while_a_server_read_them(tmp_path, attack, when):
    snapshot = published(tmp_path)
    path = Path(snapshot.directory) / "model.safetensors"
    loaded = []

    class Reading(Server):
        async def update_weights(self, snapshot, *, deadline):
            if when == "during":
                attack(path)
            loaded.append(snapshot.version)

    async def scenario(pool, made):
        if when == "before":
            attack(path)
        with pytest.raises(DataError, match=r"publish"):
            await pool.update_weights(snapshot, deadline=asyncio.get_running_loop().time() + 60.0)
        assert len(loaded) == (when == "during"), "what was changed before is not given to a server at all"

    incident(scenario, make=Reading, number=1)


def test_weights_without_marks_are_those_that_are_there_when_they_are_first_sent(tmp_path):
    first = msgspec.structs.replace(published(tmp_path), files=())
    written_in_place(Path(first.directory) / "model.safetensors")
    sent = marked(first)
    assert sent.files == weight_file_marks(Path(first.directory))
    check_unchanged(sent)
    assert marked(sent) is sent
