"""Sends new weights to an SGLang server: pause, update, flush, verify, resume, in the order that its version needs.
Or it loads them as LoRA adapters beside the server's own (`SglangLora`), for which nothing is paused.

From 0.5.21 on, requests in flight are set back (`retract`). After the update the server reads them in again and
continues with the new weights, and it states each token's version. Older servers cannot flush the cache while they hold
requests, and crash if a flush is refused. There requests are aborted, and their stages ask again.

The server reads weights from a directory, or receives them in a process group (`shared/weight_transport.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from spot_async.base.tasks import both
from spot_async.errors import ConfigError, PermanentError, PoisonedReplyError, RequestError
from spot_async.types import WeightSnapshot, WeightVersion

from ..shared.discovery import release
from ..shared.remote import RemoteServer
from ..shared.snapshots import Layout, check_snapshot
from ..shared.weight_transport import CLEAN_UP_TIMEOUT_S, WeightSender, WeightSettings, WeightTransport, buckets
from ..shared.witnesses import Witnesses

GENERATE = "/generate"
FLUSH_WHILE_PAUSED = (0, 5, 21)  # from this version on; weight-update sessions too
UPDATED_BUT_NOT_FLUSHED = "Weights were updated, but"
BUSY = "HTTP 400:"  # how a refused flush begins; the rest differs between versions
PARTLY_UPDATED = "partially updated"
FLUSH_RETRY_S = 0.2
UNKNOWN_ADAPTER = ("never been loaded", "Failed to implicitly load")


class ServerInfo(msgspec.Struct):
    """The fields of `/server_info` that are read."""

    version: str = "unknown"
    max_req_input_len: int | None = None
    max_total_tokens: int | None = None  # that its cache was to hold
    max_total_num_tokens: int | None = None  # that it holds
    page_size: int | None = None  # tokens
    dtype: str = "auto"
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    enable_deterministic_inference: bool = False
    disable_radix_cache: bool = False
    enable_memory_saver: bool = False
    enable_weights_cpu_backup: bool = False
    enable_watermark: bool = False
    speculative_algorithm: str | None = None
    speculative_accept_threshold_single: float = 1.0
    speculative_accept_threshold_acc: float = 1.0


class ModelInfo(msgspec.Struct):
    """The fields of `/model_info` that are read."""

    weight_version: str | None = None
    preferred_sampling_params: dict[str, Any] | None = None  # by name; they go into every request without its own


class Outcome(msgspec.Struct):
    success: bool = True
    message: str = ""


class _Rank(msgspec.Struct):
    checksums: dict[str, str]


class _Checksums(msgspec.Struct):
    ranks: list[_Rank]


class SglangWeights:
    """Updates the weights of one server, one update at a time. Close it at the end."""

    def __init__(
        self, server: RemoteServer, settings: WeightSettings, info: ServerInfo, *, log_directory: Path
    ) -> None:
        self._server = server
        self.control = Control(server)
        self.holds_requests = release(info.version) >= FLUSH_WHILE_PAUSED  # through an update; else it aborts them
        self.witnesses = Witnesses(server.name, self._report)
        self._others: list[str] = []  # tensors that it reports on, besides those that are compared
        self._is_checked = True  # what it holds since the last load
        self._lock = asyncio.Lock()
        self._transport: WeightTransport
        if settings.transport != "distributed":
            self._transport = DiskTransport(self.control, flush=self.holds_requests)
        elif info.dp_size > 1:
            raise ConfigError(
                f"{server.role}.backend.weights.transport=distributed: the server has {info.dp_size} data-parallel "
                "replicas, which SGLang does not update so; start it with --dp-size 1 or set it to disk"
            )
        else:
            sender = WeightSender(settings, name=server.name, log_directory=log_directory)
            ranks = info.tp_size * info.pp_size
            self._transport = DistributedTransport(self.control, settings, sender, ranks, self.holds_requests)

    async def close(self) -> None:
        await self._transport.close()

    async def update(self, snapshot: WeightSnapshot, *, deadline: float) -> None:
        """Update as in `protocols.WeightSink`. Raises `DataError` for a snapshot that would crash the server."""
        layout = await check_snapshot(snapshot.directory, self._server.files.directory)
        async with self._lock, self._paused(deadline):
            await self._transport.send(snapshot, layout, deadline=deadline)
            await self.control.confirm(snapshot.version, deadline)
            self._is_checked = False
            try:
                await self.witnesses.check(snapshot, deadline=deadline)
            except PoisonedReplyError as error:
                raise error.reworded(f"{error}; it stays paused") from None
            self._is_checked = True

    async def _report(self, deadline: float) -> dict[str, str]:
        body: dict[str, Any] = {"action": "checksum", "selector": "target"}
        names = self.witnesses.names
        if names:  # parts of names that are left out
            body["skip_tensor_list"] = [other for other in self._others if not any(other in name for name in names)]
        found = await self._server.post("/weights_checker", body, _Checksums, deadline=deadline)
        report = {
            f"{rank}:{name}": each for rank, own in enumerate(found.ranks) for name, each in own.checksums.items()
        }
        self._others = self._others or sorted({key.partition(":")[2] for key in report})
        return report

    @contextlib.asynccontextmanager
    async def _paused(self, deadline: float) -> AsyncIterator[None]:
        """Pause the server during the `with` block. It stays paused if an error leaves it with mixed or wrong ones."""
        mode = "retract" if self.holds_requests else "abort"
        try:  # the pause request is inside, because the server may be paused even if nobody waited for its reply
            await self.control.post("/pause_generation", {"mode": mode}, deadline)
            if not self.holds_requests:
                await self.control.flush(deadline)
            yield
            await self.control.post("/continue_generation", {}, deadline)
        except BaseException as error:  # a cancelled update must resume the server too
            if not self._is_checked:
                raise
            if not self._transport.mixed:
                with contextlib.suppress(RequestError):
                    await self.control.post("/continue_generation", {}, _soon())
            elif isinstance(error, RequestError):
                raise PermanentError(
                    f"{self._server.name}: the update ended half-way, so the server holds parts of two models and "
                    f"stays paused: restart it, or POST /continue_generation and resume the run, which sends it whole "
                    f"weights first. What ended the update: {error}"
                ) from error
            raise


class Control:
    """The server's control endpoints. To refuse they answer 400 or `success: false`."""

    def __init__(self, server: RemoteServer) -> None:
        self._server = server

    async def post(self, path: str, body: dict[str, Any], deadline: float, *, resend: bool = True) -> None:
        outcome = await self._server.post(path, body, Outcome, deadline=deadline, resend=resend)
        if not outcome.success:
            raise PermanentError(f"{self._server.name}{path}: {outcome.message}")

    async def flush(self, deadline: float) -> None:
        """Empty the prefix cache. The server refuses while requests are still leaving, so ask until it is done."""
        while True:
            try:
                await self._server.ask("/flush_cache", {}, bytes, deadline=deadline)
            except PermanentError as error:
                if BUSY not in str(error):  # for example a wrong key, or a path that a router does not know
                    raise
                await asyncio.sleep(FLUSH_RETRY_S)
            else:
                return

    async def confirm(self, version: WeightVersion, deadline: float) -> None:
        """Raise `PoisonedReplyError` unless the server says that it holds `version`."""
        path = "/model_info"
        served = (await self._server.get(path, ModelInfo, deadline=deadline)).weight_version
        if served != str(version):
            raise PoisonedReplyError(f"{self._server.name}{path}: serves weights {served} after an update to {version}")

    async def name(self, version: WeightVersion, deadline: float) -> None:
        """Name the weights that the server holds. Without the request's last key it would abort all requests."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self.post("/update_weight_version", body, deadline)


class SglangLora:
    """The `AdapterServer` of an SGLang server."""

    def __init__(self, server: RemoteServer) -> None:
        self._server = server
        self._control = Control(server)

    async def load(self, name: str, adapter: WeightSnapshot, *, deadline: float) -> None:
        try:
            await self._control.post(
                "/load_lora_adapter", {"lora_name": name, "lora_path": adapter.directory}, deadline, resend=False
            )
        except PermanentError as error:
            raise ConfigError(
                f"{self._server.section}: the server does not take this run's adapters: start it with --enable-lora, "
                f"and with --max-lora-rank and --lora-target-modules that fit: {error}"
            ) from None
        one_token = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}, "lora_path": name}
        await self._server.ask(GENERATE, one_token, bytes, deadline=deadline)

    async def unload(self, name: str, *, deadline: float) -> None:
        with contextlib.suppress(PermanentError):  # it has none of that name
            await self._control.post("/unload_lora_adapter", {"lora_name": name}, deadline, resend=False)

    def has_lost(self, refusal: PermanentError) -> bool:
        return any(each in str(refusal) for each in UNKNOWN_ADAPTER)


class DiskTransport(WeightTransport):
    """The server reads the published directory itself. If it cannot read all of it, it reads the old weights again."""

    def __init__(self, control: Control, *, flush: bool) -> None:
        self._control = control
        self._flush = flush

    async def send(self, snapshot: WeightSnapshot, layout: Layout, *, deadline: float) -> None:
        body = {
            "model_path": str(Path(snapshot.directory).absolute()),  # noqa: ASYNC240 - touches no disk
            "weight_version": str(snapshot.version),
            "flush_cache": self._flush,
            "abort_all_requests": False,
        }
        try:
            await self._control.post("/update_weights_from_disk", body, deadline)
        except PermanentError as error:
            if UPDATED_BUT_NOT_FLUSHED not in str(error):
                raise
            # The weights are loaded. Only the flush, and the name that follows it, are left to do.
            await self._control.flush(deadline)
            await self._control.name(snapshot.version, deadline)


@dataclass(eq=False)
class DistributedTransport(WeightTransport):
    """The server's ranks receive the tensors from a process of ours.

    The first update makes the group, which is then kept. Any failure ends our process, which frees a server that waits
    for it. The next update makes a new group.
    """

    control: Control
    settings: WeightSettings
    sender: WeightSender
    ranks: int  # the server's
    sessions: bool  # whether updates are made in sessions
    _group: str | None = field(default=None, init=False)

    async def send(self, snapshot: WeightSnapshot, layout: Layout, *, deadline: float) -> None:
        try:
            if self._group is None:
                await self._join(deadline)
            if self.sessions:
                await self.control.post("/begin_weight_update", {}, deadline)
            await self._broadcast(snapshot, layout, deadline)
            if self.sessions:
                await self.control.post("/end_weight_update", {}, deadline)
        except BaseException:
            await self._leave(in_session=self.sessions)
            raise
        self.mixed = False

    async def close(self) -> None:
        """Leave the group, at both ends."""
        if self._group is not None:
            await self._leave(in_session=False)

    async def _join(self, deadline: float) -> None:
        self._group = f"spot-async-{uuid.uuid4().hex}"  # new each time, because the server refuses a name it has had
        port = await self.sender.start(deadline=deadline)
        world_size = 1 + self.ranks
        body = {
            "master_address": self.settings.address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": self._group,
            "backend": self.settings.backend,
        }
        # At the same time, because each side waits for the other.
        await both(
            self.sender.join(self._group, world_size=world_size, deadline=deadline),
            self.control.post("/init_weights_update_group", body, deadline, resend=False),
        )

    async def _broadcast(self, snapshot: WeightSnapshot, layout: Layout, deadline: float) -> None:
        parts = list(buckets(layout))
        self.mixed = len(parts) > 1  # a single part is received as a whole before any of it is used
        for number, tensors in enumerate(parts, 1):
            body = {
                "names": [tensor.name for tensor in tensors],
                "dtypes": [tensor.dtype for tensor in tensors],
                "shapes": [tensor.shape for tensor in tensors],
                "group_name": self._group,
                "flush_cache": number == len(parts),
                "weight_version": str(snapshot.version) if number == len(parts) else None,
            }
            try:
                await both(
                    self.sender.broadcast(snapshot.directory, tensors, deadline=deadline),
                    self.control.post("/update_weights_from_distributed", body, deadline, resend=False),
                )
            except PermanentError as error:
                self.mixed = number > 1 or PARTLY_UPDATED in str(error)
                raise

    async def _leave(self, *, in_session: bool) -> None:
        """End our process, then close what the server has open. The server may not be able to answer any more."""
        group, self._group = self._group, None
        await self.sender.stop()
        with contextlib.suppress(RequestError):
            if in_session:
                await self.control.post("/end_weight_update", {}, _soon())
        with contextlib.suppress(RequestError):
            await self.control.post("/destroy_weights_update_group", {"group_name": group}, _soon())


def _soon() -> float:
    return asyncio.get_running_loop().time() + CLEAN_UP_TIMEOUT_S
