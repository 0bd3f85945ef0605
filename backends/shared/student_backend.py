"""What the backends have in common whose servers may serve a student: its weights, sleep, and health.

A student's new weights replace the server's own, or come as LoRA adapters beside them (`lora.py`). A backend inherits
from `StudentBackend` and adds the requests that its own server understands.

A server that sleeps frees its devices' memory while the trainer trains. It keeps the weights in the host's memory and
has them again when it wakes, so it is whole even if training fails. Weights wake before the cache of keys and values,
so that new ones can be sent in between. A sleeping server must not be asked anything.

Health checks are cheap, bypass the request queue, and fail on a hung server. A process in front of the engine answers
HTTP, so most routes answer even if the engine is frozen. Backends know the routes that ask the engine itself, which
answers between two of its steps however many requests wait. While an engine loads weights or sleeps it answers nothing.
Then only the process in front is asked (`ping`).
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, get_args

from spot_async.errors import ConfigError, PermanentError, RequestError
from spot_async.types import BehindUrl, ScoreRequest, TokenScores, WeightSnapshot, WeightVersion

from .discovery import Saying, ask_behind
from .held_weights import INITIAL, ReadName, WeightNames
from .lora import Adapters, AdapterServer
from .remote import RemoteBackend, RemoteServer, Server
from .settings import PlacedSettings, StudentServerSettings

DISCOVERY_TIMEOUT_S = 300.0  # the first request for log-probabilities may compile for half a minute

Part = Literal["weights", "kv_cache"]
PARTS: tuple[Part, ...] = get_args(Part)  # in the order in which they wake


class AdapterBackend(RemoteBackend, abc.ABC):
    """Base of a `Scorer` and `WeightSink` around one server, whose new weights may be adapters beside its own."""

    def __init__(
        self, settings: PlacedSettings, server: Server, loads: AdapterServer, *, base: Path, run_directory: Path
    ) -> None:
        """`loads` is asked to load adapters of the model `base`, where the student's new weights are such."""
        self._server = server
        self._name = server.name
        self._is_student = settings.takes_weights(server.role)  # or a teacher that follows it
        self._adapters: Adapters | None = None
        if (lora := settings.adapters(server.role)) is not None:
            self._adapters = Adapters(
                loads,
                lora,
                name=self._name,
                base=base,
                directory=run_directory / "weights",
                unloads=settings.is_attached,
            )

    async def _start_adapters(self, stack: contextlib.AsyncExitStack, deadline: float) -> None:
        if self._adapters is not None:
            stack.push_async_callback(self._adapters.close)
            await self._adapters.start(deadline=deadline)

    @abc.abstractmethod
    async def score(
        self, request: ScoreRequest, *, top_k: int, expected_version: WeightVersion | None = None
    ) -> TokenScores: ...

    async def score_base(self, request: ScoreRequest, *, top_k: int) -> TokenScores:
        return await self.score(request, top_k=top_k, expected_version=INITIAL)

    @abc.abstractmethod
    async def _update(self, snapshot: WeightSnapshot, deadline: float) -> None:
        """Load new weights in place of the server's own."""

    async def update_weights(self, snapshot: WeightSnapshot, *, deadline: float) -> None:
        """Load new weights, all or nothing.

        Responses under way continue with the new weights. Those of an adapter end with the adapter that they began
        with.
        """
        if self._adapters is not None:
            await self._adapters.update(snapshot, deadline=deadline)
        else:
            await self._update(snapshot, deadline)


class StudentBackend(AdapterBackend):
    """Base of a `Generator`, `Scorer`, `WeightSink`, `Sleeper` and `HealthCheck` around one server of others."""

    _server: RemoteServer
    SAYINGS: ClassVar[Mapping[str, Saying]]  # what only one server says; see `discovery.py`

    def __init__(
        self, settings: StudentServerSettings, server: RemoteServer, loads: AdapterServer, run_directory: Path
    ) -> None:
        super().__init__(settings, server, loads, base=server.files.directory, run_directory=run_directory)
        self._settings = settings
        self._names = WeightNames(self._name, is_student=self._is_student)
        self._loads = 0  # updates of weights under way
        self._changes = 0  # how often one, or a sleep, has begun or ended
        self._asleep: set[Part] = set()

    @contextlib.contextmanager
    def _asked_of(self, expected: WeightVersion | None = None) -> Iterator[tuple[str | None, ReadName]]:
        """Give the adapter that one request is to name, if any, and what reads the names of weights in its reply."""
        if self._adapters is None or not self._adapters.has_any:
            yield None, self._names.reader()
            return
        with self._adapters.request(expected) as adapter:
            yield adapter.name, adapter.version

    def _check_temperature_is_1(self, temperature: float) -> None:
        """Raise `PermanentError` for any other, since vLLM and SGLang score given tokens at no other."""
        if temperature != 1.0:
            raise PermanentError(
                f"{self._name}: {self._settings.kind} scores given tokens at temperature 1 only, not at "
                f"{temperature:g}: set sampling.temperature=1"
            )

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        await super()._open(stack)
        deadline = asyncio.get_running_loop().time() + DISCOVERY_TIMEOUT_S
        try:
            with self._server.starting():
                await self._discover(stack, deadline)
                await self._start_adapters(stack, deadline)
        except PermanentError as error:  # the first requests show wrong flags, a wrong key or another model
            raise ConfigError(str(error)) from None

    @abc.abstractmethod
    async def _discover(self, stack: contextlib.AsyncExitStack, deadline: float) -> None:
        """Find out what the server offers. What has to be closed at the end goes onto the stack."""

    @abc.abstractmethod
    async def _replace_weights(self, snapshot: WeightSnapshot, deadline: float) -> None:
        """Do as `_update`, while nothing else is asked of the engine."""

    @abc.abstractmethod
    async def _sleep(self, deadline: float) -> None:
        """Send the server to sleep."""

    @abc.abstractmethod
    async def _wake(self, part: Part, deadline: float) -> None:
        """Wake a part of the server."""

    @abc.abstractmethod
    async def _ask_engine(self, deadline: float) -> None:
        """Raise a `RequestError` unless the engine answers, and has weights that we sent."""

    async def behind_url(self, *, deadline: float) -> BehindUrl | None:
        """Return how many servers answer at its address."""
        return await ask_behind(self._server, self.SAYINGS, deadline=deadline)

    async def _update(self, snapshot: WeightSnapshot, deadline: float) -> None:
        self._loads += 1
        self._changes += 1
        try:
            with self._names.updating(snapshot.version):
                await self._replace_weights(snapshot, deadline)
        finally:
            self._loads -= 1
            self._changes += 1

    @property
    def sleeps_while_training(self) -> bool:
        return self._settings.sleep_while_training

    async def sleep(self, *, deadline: float) -> None:
        self._changes += 1
        self._asleep.update(PARTS)
        await self._sleep(deadline)

    async def wake_weights(self, *, deadline: float) -> None:
        await self._wake_those(["weights"], deadline)

    async def wake(self, *, deadline: float) -> None:
        await self._wake_those(PARTS, deadline)
        self._changes += 1

    async def _wake_those(self, parts: Sequence[Part], deadline: float) -> None:
        """Wake those of the parts that sleep, in order."""
        for part in parts:
            if part in self._asleep:
                await self._wake(part, deadline)
                self._asleep.discard(part)

    async def ping(self, *, deadline: float) -> None:
        """Ask the engine, or the process in front of it while the engine stands still."""
        if self._loads or self._asleep:
            await self._server.ask_whether_ready(deadline)
            return
        changes = self._changes
        try:
            await self._ask_engine(deadline)
        except RequestError:
            if changes == self._changes:  # otherwise the engine began to stand still while it was asked
                raise


def cannot_sleep(server: RemoteServer, flags: str) -> ConfigError:
    """Return the error for a server that was started without the `flags` that sleeping needs."""
    return ConfigError(f"{server.role}.backend.sleep_while_training: the server cannot sleep: start it with {flags}")
