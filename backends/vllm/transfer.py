"""Sends new weights to a vLLM server from process to process, by vLLM's own weight-transfer protocol.

The server's workers and our sending process (`weight_transport.WeightSender`, rank 0) form a group, which is kept
between updates. An update is a session: start, receive every tensor, finish under the version's name. `weights.py`
pauses the server, checks it, and goes back to the old weights.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from spot_async.base.tasks import both
from spot_async.errors import ConfigError, RequestError
from spot_async.types import WeightSnapshot

from ..shared.remote import RemoteServer
from ..shared.snapshots import Layout
from ..shared.weight_transport import CLEAN_UP_TIMEOUT_S, WeightSender, WeightSettings, WeightTransport, buckets
from .weights import DiskTransport, WeightUpdater, post

NOT_CONFIGURED = "Weight transfer not configured"


class Workers(msgspec.Struct):
    """The reply that says how many workers all of the server's data-parallel replicas have."""

    world_size: int


def transfer_config(settings: WeightSettings) -> str | None:
    """Return the value of vLLM's --weight-transfer-config; None if it needs none."""
    return json.dumps({"backend": settings.backend}) if settings.transport == "distributed" else None


def make_updater(server: RemoteServer, settings: WeightSettings, *, run_directory: Path) -> WeightUpdater:
    transport: WeightTransport
    if settings.transport != "distributed":
        transport = DiskTransport(server)
    else:
        sender = WeightSender(settings, name=server.name, log_directory=run_directory / "logs")
        transport = TransferTransport(server, settings, sender)
    return WeightUpdater(server, transport)


class TransferTransport(WeightTransport):
    """Sends weights over a process group. Any failure ends our process, and the next update makes a new group."""

    def __init__(self, server: RemoteServer, settings: WeightSettings, sender: WeightSender) -> None:
        self._server = server
        self._settings = settings
        self._sender = sender
        self._joined = False
        self._half_loaded = False

    async def prepare(self, *, deadline: float) -> None:
        """Form the group, if there is none yet."""
        if self._joined:
            return
        self._joined = True
        try:
            workers = await self._server.get("/get_world_size", Workers, deadline=deadline)
            world_size = 1 + workers.world_size
            port = await self._sender.start(deadline=deadline)
            nccl = self._settings.backend == "nccl"
            meeting = self._meet_by_id(world_size, deadline) if nccl else self._meet_at(port, world_size, deadline)
            init_info, joining = await meeting
            body = {"init_info": {**init_info, "rank_offset": 1, "world_size": world_size}}
            await both(joining, post(self._server, "/init_weight_transfer_engine", body, deadline, resend=False))
        except BaseException as error:
            await self._leave()
            if NOT_CONFIGURED in str(error):
                raise ConfigError(
                    f"{self._server.role}.backend.weights.transport=distributed: add --weight-transfer-config "
                    f"'{transfer_config(self._settings)}' to the server's command and restart it, or set it to disk"
                ) from None
            raise

    async def send(self, snapshot: WeightSnapshot, layout: Layout, *, deadline: float) -> None:
        """Send all tensors in one session, in the order of their names."""
        tensors = [tensor for bucket in buckets(layout) for tensor in bucket]
        update_info = {
            "names": [tensor.name for tensor in tensors],
            "dtype_names": [tensor.dtype for tensor in tensors],
            "shapes": [tensor.shape for tensor in tensors],
        }
        try:
            if self._half_loaded:
                await self._forget_half(deadline)
            self._half_loaded = True
            await self._post("/start_weight_update", None, deadline)
            await both(
                self._sender.broadcast(snapshot.directory, tensors, deadline=deadline),
                self._post("/update_weights", {"update_info": update_info}, deadline),
            )
            await self._post("/finish_weight_update", {"weight_version": str(snapshot.version)}, deadline)
            self._half_loaded = False
        except BaseException:
            await self._leave()
            raise

    async def close(self) -> None:
        """Leave the group, at both ends."""
        if self._joined:
            await self._leave()

    async def _meet_by_id(self, world_size: int, deadline: float) -> tuple[dict[str, Any], Coroutine[Any, Any, None]]:
        """Meet in NCCL's own way, by an id that says where."""
        unique_id = await self._sender.mint(deadline=deadline)
        init_info = {"nccl_unique_id_b64": base64.b64encode(unique_id).decode(), "packed": False}
        return init_info, self._sender.join_nccl(unique_id, world_size=world_size, deadline=deadline)

    async def _meet_at(
        self, port: int, world_size: int, deadline: float
    ) -> tuple[dict[str, Any], Coroutine[Any, Any, None]]:
        """Meet at the sender's store, under a name. vLLM has no such backend itself, but one can be added to it."""
        group = f"spot-async-{uuid.uuid4().hex}"
        init_info = {"master_address": self._settings.address, "master_port": port, "group_name": group}
        return init_info, self._sender.join(group, world_size=world_size, deadline=deadline)

    async def _forget_half(self, deadline: float) -> None:
        """Run an empty session, so that vLLM forgets what a broken one has loaded.

        vLLM adds that to the next session, unless a session has finished in between. The request is sent again if the
        connection breaks, because vLLM closes connections on which it has answered 500.
        """
        with contextlib.suppress(RequestError):  # the broken session may still be under way
            await post(self._server, "/start_weight_update", None, deadline)
        await post(self._server, "/finish_weight_update", {}, deadline)

    async def _leave(self) -> None:
        """End our process, which frees a server that waits for it. Then make the server leave the group."""
        self._joined = False
        await self._sender.stop()
        with contextlib.suppress(RequestError):
            deadline = asyncio.get_running_loop().time() + CLEAN_UP_TIMEOUT_S
            await post(self._server, "/shutdown_weight_transfer_engine", None, deadline)

    async def _post(self, path: str, body: object, deadline: float) -> None:
        await post(self._server, path, body, deadline, resend=False)
