"""Versions as adapters: a request ends with the one that it named, and an old one is unloaded once nothing names it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from spot_async.backends.shared.lora import LOADED_AT_ONCE, Adapters
from spot_async.base import registry
from spot_async.config import LoraConfig
from spot_async.errors import DataError, DeadlineExceededError, TransientError, VersionMismatchError
from spot_async.models.adapter_files import WEIGHTS_FILE, write_zero_adapter
from spot_async.models.weight_files import ADAPTER, delete_weights
from spot_async.types import WeightSnapshot, WeightVersion

LORA = LoraConfig(rank=2, alpha=4.0, targets="attention")
FIRST = WeightVersion(0, 0)


class Server:
    """Notes what it is told. The load that `fails` says raises, as if its reply were lost."""

    def __init__(self) -> None:
        self.held: dict[str, Path] = {}
        self.unloaded: list[str] = []
        self.fails = False

    async def load(self, name: str, adapter: WeightSnapshot, *, deadline: float) -> None:
        directory = Path(adapter.directory)
        assert name not in self.held
        assert len(self.held) <= LOADED_AT_ONCE
        assert (directory / WEIGHTS_FILE).is_file()
        self.held[name] = directory
        if self.fails:
            raise TransientError("the connection was lost")

    async def unload(self, name: str, *, deadline: float) -> None:
        assert (self.held.pop(name) / WEIGHTS_FILE).is_file(), "its files are gone while it was loaded"
        self.unloaded.append(name)

    def versions(self) -> list[str]:
        return [name.rpartition("-")[2] for name in self.held]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    directory.mkdir()
    save_file({"model.layers.0.self_attn.q_proj.weight": np.ones((6, 4), np.float32)}, directory / "model.safetensors")
    return directory


def snapshot(tmp_path: Path, base: Path, step: int) -> WeightSnapshot:
    directory = tmp_path / f"step-{step:06d}"
    (directory / ADAPTER).mkdir(parents=True)
    write_zero_adapter(directory / ADAPTER, base, LORA)
    return WeightSnapshot(directory=str(directory), version=WeightVersion(0, step))


def soon() -> float:
    return asyncio.get_running_loop().time() + 60


async def started(server: Server, base: Path, tmp_path: Path) -> Adapters:
    adapters = Adapters(server, LORA, name="student", base=base, directory=tmp_path / "weights")
    await adapters.start(deadline=soon())
    return adapters


async def test_a_request_keeps_its_version_and_an_old_one_goes_once_nothing_names_it(base, tmp_path):
    server = Server()
    adapters = await started(server, base, tmp_path)
    await adapters.update(snapshot(tmp_path, base, 1), deadline=soon())
    first = WeightVersion(0, 1)
    with adapters.request() as old:
        await adapters.update(snapshot(tmp_path, base, 2), deadline=soon())
        with adapters.request() as new, adapters.request(first) as probe:
            assert (old.version(), new.version(), probe.name) == (first, (0, 2), old.name)
        assert server.versions() == ["0.0", "0.1", "0.2"]
    await adapters.update(snapshot(tmp_path, base, 3), deadline=soon())
    assert server.versions() == ["0.0", "0.3"]
    with (
        pytest.raises(VersionMismatchError, match=r"holds weights 0\.3, not the 0\.1 asked for"),
        adapters.request(first),
    ):
        pass


async def test_the_base_stays_beside_whatever_comes(base, tmp_path):
    server = Server()
    adapters = await started(server, base, tmp_path)
    with adapters.request(FIRST) as before:
        pass
    for step in range(1, 2 * LOADED_AT_ONCE):
        await adapters.update(snapshot(tmp_path, base, step), deadline=soon())
    with adapters.request(FIRST) as reference, adapters.request() as newest:
        assert (reference.name, newest.version()) == (before.name, (0, 2 * LOADED_AT_ONCE - 1))


async def test_an_update_waits_for_room_and_names_no_more_than_the_server_holds(base, tmp_path):
    server, ended = Server(), asyncio.Event()
    adapters = await started(server, base, tmp_path)

    async def long_request() -> None:
        with adapters.request():
            await ended.wait()

    async with asyncio.TaskGroup() as group:
        for step in range(1, LOADED_AT_ONCE):
            group.create_task(long_request())
            await asyncio.sleep(0)
            await adapters.update(snapshot(tmp_path, base, step), deadline=soon())
        update = group.create_task(adapters.update(snapshot(tmp_path, base, LOADED_AT_ONCE), deadline=soon()))
        await asyncio.sleep(0.05)
        assert not update.done()
        assert len(server.held) == LOADED_AT_ONCE
        ended.set()
    assert server.versions() == ["0.0", f"0.{LOADED_AT_ONCE}"]


async def test_a_request_that_never_ends_fails_the_update_at_its_deadline(base, tmp_path):
    server = Server()
    adapters = await started(server, base, tmp_path)
    with contextlib.ExitStack() as stack:
        for step in range(1, LOADED_AT_ONCE):
            stack.enter_context(adapters.request())
            await adapters.update(snapshot(tmp_path, base, step), deadline=soon())
        weights, at = snapshot(tmp_path, base, LOADED_AT_ONCE), asyncio.get_running_loop().time() + 0.05
        with pytest.raises(DeadlineExceededError, match=r"1 requests of weights 0\.1 do not end"):
            await adapters.update(weights, deadline=at)
        with adapters.request() as request:
            assert request.version() == (0, LOADED_AT_ONCE - 1)


async def test_after_a_load_that_failed_requests_name_the_version_before_and_the_other_is_unloaded(base, tmp_path):
    server = Server()
    adapters = await started(server, base, tmp_path)
    server.fails = True
    weights = snapshot(tmp_path, base, 1)
    with pytest.raises(TransientError):
        await adapters.update(weights, deadline=soon())
    with adapters.request() as request:
        assert request.version() == FIRST
    server.fails = False
    await adapters.update(weights, deadline=soon())
    assert server.versions() == ["0.0", "0.1"]


async def test_files_stay_while_the_server_may_read_them_again(base, tmp_path):
    server = Server()
    adapters = await started(server, base, tmp_path)
    weights = snapshot(tmp_path, base, 1)
    await adapters.update(weights, deadline=soon())
    delete_weights(Path(weights.directory))
    assert sorted(each.name for each in tmp_path.glob("step-*")) == ["step-000001"]
    await adapters.update(snapshot(tmp_path, base, 2), deadline=soon())
    delete_weights(Path(weights.directory))
    assert sorted(each.name for each in tmp_path.glob("step-*")) == ["step-000002"]


async def test_no_server_hears_of_files_that_are_not_whole(base, tmp_path):
    server = Server()
    adapters = await started(server, base, tmp_path)
    weights = snapshot(tmp_path, base, 1)
    (Path(weights.directory) / ADAPTER / WEIGHTS_FILE).write_bytes(b"cut")
    with pytest.raises(DataError, match="cannot be read"):
        await adapters.update(weights, deadline=soon())
    assert server.versions() == ["0.0"]


async def test_the_server_is_left_with_nothing(base, tmp_path):
    server = Server()
    adapters = await started(server, base, tmp_path)
    await adapters.update(snapshot(tmp_path, base, 1), deadline=soon())
    await adapters.close()
    assert server.held == {}


async def test_a_server_that_ends_with_the_run_is_asked_nothing_and_its_weights_may_be_deleted(base, tmp_path):
    server, weights = Server(), snapshot(tmp_path, base, 1)
    adapters = Adapters(server, LORA, name="student", base=base, directory=tmp_path / "weights", unloads=False)
    await adapters.start(deadline=soon())
    await adapters.update(weights, deadline=soon())
    await adapters.close()
    assert server.unloaded == []
    delete_weights(Path(weights.directory))
    assert not [*tmp_path.glob("step-*")]


@pytest.mark.parametrize("kind", ["vllm", "sglang", "local"])
def test_adapters_as_weights_need_adapters(kind):
    settings = registry.load("backends", kind).Settings.model_validate(
        {"url": "http://127.0.0.1:1", "weights": {"transport": "adapter"}}
    )
    with pytest.raises(ValueError, match=r"weights\.transport=adapter needs training\.lora"):
        settings.with_lora(None)
    assert settings.with_lora(LORA).adapters("student") == LORA
    assert settings.with_lora(LORA).adapters("reference") is None
