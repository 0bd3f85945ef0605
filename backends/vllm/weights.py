"""Sends new weights to a vLLM server: pause, load, name, check, resume. A `WeightTransport` moves the tensors.

A server that failed to load answers health checks, but dies at the next token. So it is resumed only with weights that
it has confirmed: the new ones, or else the previous ones, loaded again. Before the first update the previous ones are
the model's own. Requests in flight wait, and continue with the new weights.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import structlog

from spot_async.errors import ConfigError, DataError, PoisonedReplyError, ProcessDiedError, RequestError, TransientError
from spot_async.models.weight_files import weight_files
from spot_async.types import WeightSnapshot, WeightVersion

from ..shared.remote import RemoteServer
from ..shared.snapshots import Layout, check_snapshot
from ..shared.weight_transport import WeightTransport
from ..shared.witnesses import Witnesses
from .client import NoSuchRouteError

RECOVERY_TIMEOUT_S = 120.0  # to go back and resume, even after the update's own deadline
DEVELOPER_MODE = "VLLM_SERVER_DEV_MODE=1"
CHECKSUM = {"action": "checksum"}  # from 0.32 on
LARGE_BYTES = 2 << 30  # it takes a second to digest so many, and vLLM digests all that it has


class _Checksums(msgspec.Struct):
    checksums: dict[str, str]  # SHA-256 of each parameter, by its place in the group of devices and its name


class DiskTransport(WeightTransport):
    """The server reads the published directory itself."""

    def __init__(self, server: RemoteServer) -> None:
        self._server = server

    async def send(self, snapshot: WeightSnapshot, layout: Layout, *, deadline: float) -> None:
        path = {"weights_path": snapshot.directory}
        await post(self._server, "/collective_rpc", {"method": "reload_weights", "kwargs": path}, deadline)
        await post(self._server, "/update_weight_version", {"new_version": str(snapshot.version)}, deadline)


class WeightUpdater:
    """Updates one server, one update at a time, and knows which weights it last confirmed. Close it at the end."""

    def __init__(self, server: RemoteServer, transport: WeightTransport) -> None:
        self._server = server
        self._transport = transport
        self._confirmed = WeightSnapshot(directory=str(server.files.directory.absolute()), version=WeightVersion(0, 0))
        self._may_be_mixed = False  # whether a load has begun, and none has been confirmed since
        self._updating = asyncio.Lock()
        self.witnesses = Witnesses(server.name, self._report)
        self._was_checked = False  # by its witnesses, after an update

    async def close(self) -> None:
        await self._transport.close()

    async def name(self, version: str, *, deadline: float) -> None:
        """Name the weights that the server serves now."""
        await post(self._server, "/update_weight_version", {"new_version": version}, deadline)

    async def update(self, snapshot: WeightSnapshot, *, deadline: float) -> None:
        """Load a snapshot into the server.

        Raises `DataError`, before asking the server, for a snapshot that is not of this model. Raises a `RequestError`
        if the server has resumed with the weights that it had, and `ProcessDiedError` if it must be restarted.
        """
        async with self._updating:
            layout = await check_snapshot(snapshot.directory, self._server.files.directory)
            await self._transport.prepare(deadline=deadline)
            try:
                await self._pause(deadline)
                await self._replace(snapshot, layout, deadline)
                await self._resume()
            except (RequestError, asyncio.CancelledError):
                # Even without an answer, the server may have paused. With mixed weights it must stay so.
                if not self._may_be_mixed:
                    await self._resume_after_failure()
                raise

    async def _pause(self, deadline: float) -> None:
        try:
            await post(self._server, "/pause?mode=keep", None, deadline)
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
        """Load, name and check weights. The server is paused."""
        self._may_be_mixed = True
        await self._transport.send(snapshot, layout, deadline=deadline)
        # Cached prefixes have keys and values of the old weights.
        flushed = await post(self._server, "/reset_prefix_cache", None, deadline)
        if flushed.get("success") is False:
            raise TransientError(f"{self._server.name}/reset_prefix_cache: the server could not drop its prefix cache")
        held = (await self._server.get("/weight_info", dict[str, Any], deadline=deadline)).get("weight_version")
        if held != str(snapshot.version):
            raise PoisonedReplyError(f"{self._server.name}: holds weights {held} after an update to {snapshot.version}")
        size_bytes = sum(path.stat().st_size for path in weight_files(Path(snapshot.directory)))
        if size_bytes < LARGE_BYTES or not self._was_checked:
            await self.witnesses.check(snapshot, deadline=deadline)
            self._was_checked = True
        self._confirmed = snapshot
        self._may_be_mixed = False

    async def _report(self, deadline: float) -> dict[str, str]:
        return (await self._server.post("/weight_checker", CHECKSUM, _Checksums, deadline=deadline)).checksums

    async def _restore(self, error: RequestError | asyncio.CancelledError) -> None:
        """Go back to the previous weights. Raises `ProcessDiedError` if that fails. A cancellation stays one."""
        name, cause = self._server.name, str(error) or "the update was cancelled"
        before, deadline = self._confirmed, self._recovery_deadline()
        try:
            layout = await check_snapshot(before.directory, self._server.files.directory)
            await self._transport.prepare(deadline=deadline)
            await self._load(before, layout, deadline)
        except (RequestError, ConfigError, DataError) as second:
            # A cancelled task must end as cancelled, so the failure can only be logged.
            if isinstance(error, asyncio.CancelledError):
                structlog.get_logger().error("the server stays paused: restart it", role=name, cause=str(second))
                return
            raise ProcessDiedError(
                f"{name}: the server took no new weights, stays paused and must be restarted: {cause}; then {second}"
            ) from error
        structlog.get_logger().warning("went back to the weights before", role=name, cause=cause)

    async def _resume_after_failure(self) -> None:
        """Try to resume, and ignore a failure: the caller is told what failed first."""
        try:
            await self._resume()
        except RequestError as second:
            structlog.get_logger().warning("the server may stay paused", role=self._server.name, cause=str(second))

    async def _resume(self) -> None:
        await post(self._server, "/resume", None, self._recovery_deadline())

    def _recovery_deadline(self) -> float:
        return asyncio.get_running_loop().time() + RECOVERY_TIMEOUT_S


async def post(
    server: RemoteServer, path: str, body: object, deadline: float, *, resend: bool = True
) -> dict[str, Any]:
    """Send a control request and return the reply's fields. Older servers send an empty reply to some."""
    return await server.ask(path, body, _fields, deadline=deadline, resend=resend)


def _fields(reply: bytes) -> dict[str, Any]:
    return msgspec.json.decode(reply, type=dict[str, Any]) if reply.strip() else {}
