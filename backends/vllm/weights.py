"""New weights for a running vLLM server: pause, load, name, check, go on. How they get there is a `VllmTransport`'s.

A server that failed to load answers health checks and dies at the next token, so it goes on only with weights that
it has confirmed: the new ones or, loaded once more, those before; before the first ones those were the model's own.
Requests in flight wait and go on with the new ones.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec
import structlog

from spot_async.errors import ConfigError, DataError, PoisonedReplyError, ProcessDiedError, RequestError, TransientError
from spot_async.types import WeightSnapshot, WeightVersion

from ..shared.remote import RemoteServer
from ..shared.snapshots import Layout, check_snapshot
from ..shared.weight_transport import WeightTransport
from .client import NoSuchRouteError

RECOVERY_TIMEOUT_S = 120.0  # for going back and resuming, also after the update's own deadline
DEVELOPER_MODE = "VLLM_SERVER_DEV_MODE=1"


class VllmTransport(WeightTransport, Protocol):
    """A `WeightTransport` that is prepared while the server still works."""

    async def prepare(self, *, deadline: float) -> None:
        """Do what can fail before any weights are touched."""
        ...


class DiskTransport:
    """A `VllmTransport`: the server reads the published directory itself."""

    def __init__(self, server: RemoteServer) -> None:
        self._server = server

    async def prepare(self, *, deadline: float) -> None:
        """Nothing is needed."""

    async def send(self, snapshot: WeightSnapshot, layout: Layout, *, deadline: float) -> None:
        path = {"weights_path": snapshot.directory}
        await post(self._server, "/collective_rpc", {"method": "reload_weights", "kwargs": path}, deadline)
        await post(self._server, "/update_weight_version", {"new_version": str(snapshot.version)}, deadline)

    async def close(self) -> None:
        """Nothing is kept."""


class WeightUpdater:
    """One update at a time; knows which weights the server was last sure to hold. Close it in the end."""

    def __init__(self, server: RemoteServer, transport: VllmTransport) -> None:
        self._server = server
        self._transport = transport
        self._confirmed = WeightSnapshot(directory=str(server.files.directory.absolute()), version=WeightVersion(0, 0))
        self._may_be_mixed = False  # a load has begun and none has been confirmed since
        self._updating = asyncio.Lock()

    async def close(self) -> None:
        await self._transport.close()

    async def name(self, version: str, *, deadline: float) -> None:
        """Give the weights that are being served a name."""
        await self._post("/update_weight_version", {"new_version": version}, deadline)

    async def update(self, snapshot: WeightSnapshot, *, deadline: float) -> None:
        """Raises `DataError` for a snapshot that is not this model's, before the server hears of it; a `RequestError`
        when the server goes on with the weights that it had; `ProcessDiedError` when it must be restarted."""
        async with self._updating:
            layout = await check_snapshot(snapshot.directory, self._server.files.directory)
            await self._transport.prepare(deadline=deadline)
            try:
                await self._pause(deadline)
                await self._replace(snapshot, layout, deadline)
                await self._resume()
            except (RequestError, asyncio.CancelledError):
                # Without an answer the server may have paused all the same.
                if not self._may_be_mixed:
                    await self._resume_after_failure()
                raise

    async def _pause(self, deadline: float) -> None:
        try:
            await self._post("/pause?mode=keep", None, deadline)
        except NoSuchRouteError:
            raise ConfigError(
                f"{self._server.section}: the server takes no weights: start it with {DEVELOPER_MODE} in its "
                "environment"
            ) from None

    async def _replace(self, snapshot: WeightSnapshot, layout: Layout, deadline: float) -> None:
        try:
            await self._load(snapshot, layout, deadline)
        except (RequestError, asyncio.CancelledError) as error:
            await self._restore(error)
            raise

    async def _load(self, snapshot: WeightSnapshot, layout: Layout, deadline: float) -> None:
        """Load, name and check; the server is paused."""
        self._may_be_mixed = True
        await self._transport.send(snapshot, layout, deadline=deadline)
        flushed = await self._post("/reset_prefix_cache", None, deadline)
        if flushed.get("success") is False:
            raise TransientError(f"{self._server.name}/reset_prefix_cache: the server could not drop its prefix cache")
        held = (await self._server.get("/weight_info", dict[str, Any], deadline=deadline)).get("weight_version")
        if held != str(snapshot.version):
            raise PoisonedReplyError(f"{self._server.name}: holds weights {held} after an update to {snapshot.version}")
        self._confirmed = snapshot
        self._may_be_mixed = False

    async def _restore(self, error: RequestError | asyncio.CancelledError) -> None:
        """Back to the weights before. Raises `ProcessDiedError` where that cannot be done; a cancellation stays one."""
        name, cause = self._server.name, str(error) or "the update was cancelled"
        before, deadline = self._confirmed, self._recovery_deadline()
        try:
            layout = await check_snapshot(before.directory, self._server.files.directory)
            await self._transport.prepare(deadline=deadline)
            await self._load(before, layout, deadline)
        except (RequestError, ConfigError, DataError) as second:
            if isinstance(error, asyncio.CancelledError):
                structlog.get_logger().error("the server stays paused: restart it", role=name, cause=str(second))
                return
            raise ProcessDiedError(
                f"{name}: the server took no new weights and must be restarted, it stays paused: {cause}; then {second}"
            ) from error
        structlog.get_logger().warning("went back to the weights before", role=name, cause=cause)

    async def _resume_after_failure(self) -> None:
        """Resume as well as possible: the caller is told what failed first."""
        try:
            await self._resume()
        except RequestError as second:
            structlog.get_logger().warning("the server may stay paused", role=self._server.name, cause=str(second))

    async def _resume(self) -> None:
        await self._post("/resume", None, self._recovery_deadline())

    async def _post(self, path: str, body: object, deadline: float) -> dict[str, Any]:
        return await post(self._server, path, body, deadline)

    def _recovery_deadline(self) -> float:
        return asyncio.get_running_loop().time() + RECOVERY_TIMEOUT_S


async def post(
    server: RemoteServer, path: str, body: object, deadline: float, *, resend: bool = True
) -> dict[str, Any]:
    """The reply's fields; older servers answer some control requests with nothing at all."""
    return await server.ask(path, body, _fields, deadline=deadline, resend=resend)


def _fields(reply: bytes) -> dict[str, Any]:
    return msgspec.json.decode(reply, type=dict[str, Any]) if reply.strip() else {}
