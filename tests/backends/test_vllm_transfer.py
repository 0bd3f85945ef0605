"""The order of vLLM's weight-transfer protocol, and the state that failures leave, against a stand-in.

The stand-in keeps sessions as vLLM 0.32 does by its sources. The sender is ours, but without a process.
`tests/servers/test_vllm_transfer.py` tests the real server.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from deadlines import soon
from raw_server import listening

from spot_async.backends.sglang.backend import SglangBackend
from spot_async.backends.shared import settings as server_settings
from spot_async.backends.shared.launch import Doorway, Installed
from spot_async.backends.shared.launch_settings import LaunchSettings
from spot_async.backends.shared.remote import RemoteServer, ServerKind
from spot_async.backends.shared.weight_transport import WeightSender, WeightSettings
from spot_async.backends.vllm import process as vllm_process
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.backends.vllm.client import read_error
from spot_async.backends.vllm.transfer import TransferTransport, transfer_config
from spot_async.backends.vllm.weights import WeightUpdater
from spot_async.config.loading import validate_as
from spot_async.errors import ConfigError, DataError, ProcessDiedError, TransientError
from spot_async.types import WeightSnapshot, WeightVersion

UNIQUE_ID = bytes(range(128))
JOIN = ["/get_world_size", "/init_weight_transfer_engine"]
SESSION = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
CONFIRM = ["/reset_prefix_cache", "/weight_info"]
LEAVE = "/shutdown_weight_transfer_engine"


class StandIn:
    """Two workers; an update that fails ends its session without finishing it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bodies: dict[str, Any] = {}
        self.failing: dict[str, str] = {}  # the next answer
        self.broken: set[str] = set()
        self.active = self.paused = False
        self.weights = "default"

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        self.calls.append(path)
        self.bodies[path] = body
        problem = "broken" if path in self.broken else self.failing.pop(path, None)
        if path == "/start_weight_update" and self.active:
            problem = "start_weight_update called while a weight update is already active."
        if path == "/finish_weight_update" and not self.active:
            problem = "finish_weight_update called without a matching start_weight_update."
        self.active = {"/start_weight_update": True, "/finish_weight_update": False}.get(path, self.active)
        if problem is not None:
            self.active = self.active and path != "/update_weights"
            return 500, {"error": {"message": problem}}
        if path == "/finish_weight_update":
            self.weights = body.get("weight_version") or self.weights
        self.paused = {"/pause?mode=keep": True, "/resume": False}.get(path, self.paused)
        replies = {"/get_world_size": {"world_size": 2}, "/weight_info": {"weight_version": self.weights}}
        replies["/weight_checker"] = {"checksums": {}}
        return 200, replies.get(path, {"success": True})

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                lengths = [line.split(":")[1] for line in head.splitlines() if line.startswith("content-length")]
                body = await reader.readexactly(int(lengths[0])) if lengths else b""
                status, reply = self.answer(head.split()[1], json.loads(body) if body else None)
                content = json.dumps(reply).encode()
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


class Sender(WeightSender):
    """Remembers what it is told; no process."""

    def __init__(self, settings: WeightSettings, log_directory: Path) -> None:
        super().__init__(settings, name="student", log_directory=log_directory)
        self.told: list[Any] = []
        self.fails = False

    async def start(self, *, deadline: float) -> int:
        self.told.append("start")
        return 4321

    async def stop(self) -> None:
        self.told.append("stop")

    async def mint(self, *, deadline: float) -> bytes:
        return UNIQUE_ID

    async def join(self, group: str, *, world_size: int, deadline: float) -> None:
        self.told.append(("join", group, world_size))

    async def join_nccl(self, unique_id: bytes, *, world_size: int, deadline: float) -> None:
        self.told.append(("join_nccl", unique_id, world_size))

    async def broadcast(self, directory: str, tensors: Any, *, deadline: float) -> None:
        self.told.append((directory, [tensor.name for tensor in tensors]))
        if self.fails:
            self.fails = False
            raise TransientError("the sender ended")


Connect = Callable[..., Any]


@pytest.fixture
def connect(random_model: Any, tmp_path: Path) -> Connect:
    """`connect(device)`: updater, stand-in, sender and snapshot(version)."""
    model = random_model()

    @asynccontextmanager
    async def enter(device: str = "cuda:0") -> AsyncIterator[Any]:
        stand_in, weights = StandIn(), WeightSettings(transport="distributed", device=device)
        sender = Sender(weights, tmp_path)
        async with listening(stand_in.serve) as url:
            settings = VllmBackend.Settings(url=url)
            read = partial(read_error, "student")
            async with RemoteServer(
                settings, role="student", model=str(model), run_directory=tmp_path, kind=ServerKind(read_error=read)
            ) as server:
                updater = WeightUpdater(server, TransferTransport(server, weights, sender))
                yield (
                    updater,
                    stand_in,
                    sender,
                    lambda n: WeightSnapshot(directory=str(model), version=WeightVersion(0, n)),
                )

    return enter


async def test_the_group_is_made_once_by_nccls_id_and_an_update_is_one_session(connect: Connect) -> None:
    async with connect() as (updater, stand_in, sender, snapshot):
        await updater.update(snapshot(1), deadline=soon())
        assert stand_in.calls == [*JOIN, "/pause?mode=keep", *SESSION, *CONFIRM, "/weight_checker", "/resume"]
        info = stand_in.bodies["/init_weight_transfer_engine"]["init_info"]
        assert base64.b64decode(info.pop("nccl_unique_id_b64"), validate=True) == UNIQUE_ID
        assert info == {"rank_offset": 1, "world_size": 3, "packed": False}
        assert sender.told[:2] == ["start", ("join_nccl", UNIQUE_ID, 3)]
        update = stand_in.bodies["/update_weights"]["update_info"]
        assert sender.told[2] == (snapshot(1).directory, update["names"])  # both ends in the same order
        shapes = dict(zip(update["names"], update["shapes"], strict=True))
        assert shapes["model.embed_tokens.weight"][1] == 32
        assert set(update["dtype_names"]) == {"float32"}
        assert stand_in.bodies["/finish_weight_update"] == {"weight_version": "0.1"}
        stand_in.calls.clear()
        await updater.update(snapshot(2), deadline=soon())
        assert stand_in.calls == ["/pause?mode=keep", *SESSION, *CONFIRM, "/resume"]
        await updater.close()
        assert (sender.told[-1], stand_in.calls[-1]) == ("stop", LEAVE)


async def test_other_backends_meet_at_the_senders_store(connect: Connect) -> None:
    async with connect("cpu") as (updater, stand_in, sender, snapshot):
        await updater.update(snapshot(1), deadline=soon())
        info = stand_in.bodies["/init_weight_transfer_engine"]["init_info"]
        assert sender.told[1] == ("join", info.pop("group_name"), 3)
        assert info == {"master_address": "127.0.0.1", "master_port": 4321, "rank_offset": 1, "world_size": 3}


async def test_a_server_that_cannot_join_is_neither_paused_nor_changed(connect: Connect) -> None:
    async with connect() as (updater, stand_in, sender, snapshot):
        stand_in.failing["/init_weight_transfer_engine"] = "RuntimeError: Weight transfer not configured. Please set"
        with pytest.raises(
            ConfigError, match=r"""add --weight-transfer-config '\{"backend": "nccl"\}' to the server"""
        ):
            await updater.update(snapshot(1), deadline=soon())
        assert stand_in.calls == [*JOIN, LEAVE]
        assert sender.told[-1] == "stop"
        await updater.update(snapshot(1), deadline=soon())  # a new group
        assert stand_in.weights == "0.1"


async def test_a_snapshot_of_another_model_is_never_sent(connect: Connect, random_model: Any) -> None:
    async with connect() as (updater, stand_in, sender, _):
        other = WeightSnapshot(directory=str(random_model(hidden_size=16)), version=WeightVersion(0, 1))
        with pytest.raises(DataError):
            await updater.update(other, deadline=soon())
        assert (stand_in.calls, sender.told) == ([], [])


EMPTY_SESSION = ["/start_weight_update", "/finish_weight_update"]  # forgets what the broken one loaded


@pytest.mark.parametrize("path", [*SESSION, "the sender"])
async def test_after_a_broken_session_the_weights_before_are_sent_whole(connect: Connect, path: str) -> None:
    async with connect() as (updater, stand_in, sender, snapshot):
        await updater.update(snapshot(1), deadline=soon())
        stand_in.calls.clear()
        if path == "the sender":
            sender.fails = True
        else:
            stand_in.failing[path] = "no"
        with pytest.raises(TransientError, match=r"HTTP 500: no|the sender ended"):
            await updater.update(snapshot(2), deadline=soon())
        tail = [LEAVE, *JOIN, *EMPTY_SESSION, *SESSION, *CONFIRM, "/resume"]
        assert stand_in.calls[-len(tail) :] == tail
        assert (stand_in.weights, stand_in.paused, stand_in.active) == ("0.1", False, False)


async def test_a_server_whose_weights_may_be_mixed_stays_paused(connect: Connect) -> None:
    async with connect() as (updater, stand_in, _, snapshot):
        stand_in.broken.add("/update_weights")
        with pytest.raises(ProcessDiedError, match="stays paused and must be restarted"):
            await updater.update(snapshot(1), deadline=soon())
        assert stand_in.paused


def test_a_students_server_of_ours_is_started_for_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_process, "installed", lambda *_: Installed("0.32.0", True, None))
    config = transfer_config(WeightSettings(transport="distributed"))
    launch, doorway = LaunchSettings(python="python"), Doorway(1, Path("/tmp/x"), "secret")
    uses = partial(vllm_process.Uses, max_logprobs=1, weight_transfer=config)
    command = partial(vllm_process.vllm_command, launch, Path("m"), doorway)
    student = list(command(uses=uses(takes_weights=True)).argv)
    assert json.loads(student[student.index("--weight-transfer-config") + 1]) == {"backend": "nccl"}
    assert "--weight-transfer-config" not in command(uses=uses(takes_weights=False)).argv
    assert transfer_config(WeightSettings()) is None


@pytest.mark.skipif(dist.is_nccl_available(), reason="for a torch without NCCL")
async def test_a_torch_without_nccl_is_named(tmp_path: Path) -> None:
    sender = WeightSender(WeightSettings(transport="distributed"), name="student", log_directory=tmp_path)
    await sender.start(deadline=soon())
    try:
        with pytest.raises(TransientError, match="cannot make an NCCL id: this torch is built without NCCL"):
            await sender.mint(deadline=soon())
    finally:
        await sender.stop()


@pytest.mark.parametrize("kind", [VllmBackend, SglangBackend])
@pytest.mark.parametrize(
    ("launch", "choices", "said"),
    [
        ({"devices": "0"}, {}, "weights.device=cuda:0: the server on launch.devices=0 uses this GPU"),
        ({}, {}, "weights.device=cuda:0: the server on launch.devices=0 uses this GPU"),
        ({"tensor_parallel_size": 2}, {"device": "cuda:1"}, "weights.device=cuda:1: the server on launch.devices=0,1"),
        ({"devices": "3"}, {"sleeps": True}, "distributed with sleep_while_training: the servers share the trainer's"),
        ({"devices": "3"}, {"device": "cuda"}, None),
        ({"devices": "0"}, {"device": "cuda:7", "sleeps": True}, None),
        ({"devices": "0"}, {"device": "cpu"}, None),
        ({"prefix": ["ssh", "h"], "host": "10.0.0.2"}, {"address": "10.0.0.1"}, None),
    ],
)
def test_a_sender_on_a_server_s_gpu_is_refused(
    kind: Any, launch: dict[str, Any], choices: dict[str, Any], said: str | None
) -> None:
    weights = {"transport": "distributed", **{key: each for key, each in choices.items() if key != "sleeps"}}
    settings = {
        "launch": {"python": "p", **launch},
        "weights": weights,
        "sleep_while_training": choices.get("sleeps", False),
    }
    if said is None:
        validate_as(kind.Settings, settings)
        return
    with pytest.raises(ConfigError, match=re.escape(said)):
        validate_as(kind.Settings, settings)


def test_other_versions_of_nccl_are_refused_with_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment = tmp_path / "site"
    (environment / "nvidia_nccl_cu13-2.30.7.dist-info").mkdir(parents=True)
    (environment / "nvidia_nccl_cu13-2.30.7.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: 2.30.7\n"
    )
    launch = {"python": sys.executable, "devices": "1", "environment": {"PYTHONPATH": str(environment)}}
    given = {"launch": launch, "weights": {"transport": "distributed"}}
    monkeypatch.setattr(VllmBackend.Settings, "PACKAGE", "json")
    settings = validate_as(VllmBackend.Settings, given)
    monkeypatch.setattr(server_settings, "nccl_version", lambda: "2.29.7")
    said = r"student.backend.weights.device=cuda:0: the sender has NCCL 2.29.7, and the server of .*launch has 2.30.7"
    with pytest.raises(ConfigError, match=said):
        settings.check_installed("student.backend")
    for ours in ("2.30.7", None):
        monkeypatch.setattr(server_settings, "nccl_version", lambda ours=ours: ours)
        settings.check_installed("student.backend")
