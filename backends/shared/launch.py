"""Starts inference servers as child processes, in their own Python environment.

A backend turns `LaunchSettings` into a command line. Here the command becomes a child process, here or on the far side
of a prefix. We wait until it is ready, explain a failure by its log, and stop it with everything that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import socket
import subprocess
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self, TypeVar

import pydantic
import structlog
from pydantic import Field

from spot_async.base.addresses import LOOPBACK
from spot_async.base.processes.child import ChildProcess, foreign_environment
from spot_async.base.processes.far_side import FarProgram
from spot_async.base.processes.gpus import VISIBLE, has_instances, physical_gpus
from spot_async.base.processes.last_words import headline, readable
from spot_async.base.processes.private_directory import private_directory, short_temporary_directory
from spot_async.base.tasks import while_alive
from spot_async.config import PositiveFloat, PositiveInt, Probability
from spot_async.errors import ConfigError, ProcessDiedError, RequestError, TransientError
from spot_async.serving.http.credentials import new_secret

from .far_side import FarSide
from .process_settings import ProcessSettings

LOG_LINES = 10  # lines shown from the end of a failed server's log
LOG_ERRORS = 3  # messages shown of exceptions above those lines
ASK_TIMEOUT_S = 10.0
ASK_INTERVAL_S = 0.25
VERSION_TIMEOUT_S = 60.0
LAST_REPLY_S = 10.0  # longest time between a crashing server's last reply and its end; SGLang takes five seconds
# These ports are below those of outgoing connections. Otherwise a connection to a server that does not listen yet might
# get that very port as its own end, be connected to itself, and keep the server from listening.
FREE_PORTS = range(20_000, 32_768)
NO_SUCH_MODULE = 3
# Prints the version of the distribution that a module belongs to. Exits with 3 if there is no such module.
VERSION_CODE = """
import importlib.metadata, importlib.util, sys
sys.path[:] = [path for path in sys.path if path]
spec = importlib.util.find_spec(sys.argv[1])
if spec is None or spec.origin is None:
    sys.exit(3)
names = importlib.metadata.packages_distributions().get(sys.argv[1], [])
print(importlib.metadata.version(names[0]) if names else "unknown")
"""
# Prints whether there is a distribution of this name. One of another name may have a module of this one.
NAME_CODE = """
import importlib.metadata, sys
print(any(True for _ in importlib.metadata.distributions(name=sys.argv[1])))
"""
# Prints the version of the NCCL that is installed beside torch, if there is one.
NCCL_CODE = """
import importlib.metadata
for each in importlib.metadata.distributions():
    if (each.name or "").startswith("nvidia-nccl-cu"):
        print(each.version)
        break
"""


T = TypeVar("T")


def _numbers_too(value: Any) -> Any:
    return str(value) if type(value) is int else value  # `devices: 0` is a number to YAML


class LaunchSettings(ProcessSettings):
    """The settings of a server to start. Its environment does not need this package."""

    devices: Annotated[str | None, pydantic.BeforeValidator(_numbers_too)] = Field(
        None,
        description="GPUs of the server, such as `0,1`, counted as the trainer's ranks are: among those that this "
        "command's CUDA_VISIBLE_DEVICES leaves; default: all",
    )
    tensor_parallel_size: PositiveInt = Field(1, description="devices that share the model")
    replicas: PositiveInt = Field(
        1,
        description="so many servers alike, each on its own `tensor_parallel_size` of the `devices`; by default these "
        "are the first ones",
    )
    memory_fraction: Probability | None = Field(
        None,
        description="share of each device's memory that the server takes: weights, workspace and cache; default: the "
        "server's own",
    )
    cache_gib: PositiveFloat | None = Field(
        None,
        description="GiB of each device for keys and values; default: what memory_fraction leaves, where the devices "
        "have numbers, else as the server measures it",
    )
    dtype: str = Field("auto", description="type of weights and activations, as the server spells it")
    arguments: list[str] = Field([], description="further command-line arguments, as the server spells them")

    @property
    def is_narrow(self) -> bool:
        """Whether the server may compute in 16 bits. Its logits, rounded to those, would be up to 0.25 nats off.

        A server in 32 bits changes nothing when it is told to compute them in float32, so `auto` may be either.
        """
        return self.dtype not in ("float32", "float")

    @property
    def variables(self) -> dict[str, str]:
        if self.devices is None:
            return super().variables
        # The far side of a prefix has a variable of its own, which is not known here.
        devices = self.devices if self.is_elsewhere else physical_gpus(self.devices, os.environ)
        return {VISIBLE: devices, **super().variables}

    def check_machine(self, section: str) -> None:
        super().check_machine(section)
        try:
            _ = self.variables
        except ValueError as error:
            raise ConfigError(f"{section}.devices={self.devices} {error}") from None

    @pydantic.model_validator(mode="after")
    def _check_devices(self) -> Self:
        if self.resources and self.devices is not None:
            raise ValueError("devices: Ray chooses the devices of a server with resources: remove one of them")
        if self.environment.get(VISIBLE) != "":  # so a server on the CPU may say
            self.check_gpus_of_ray(self.tensor_parallel_size)
        if self.resources and self.resources.get("GPU", self.tensor_parallel_size) < self.tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} takes as many devices: set resources.GPU to that"
            )
        named = [] if self.devices is None else [each.strip() for each in self.devices.split(",")]
        if twice := next((each for each in named if named.count(each) > 1), None):
            raise ValueError(f"devices={self.devices} names {twice} twice: name each device once")
        if self.tensor_parallel_size > 1 and has_instances(named):
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size}: a process sees one instance of MIG: set it to 1, "
                "or name whole GPUs in devices"
            )
        given = None if self.devices is None else len(named)
        taken = self.replicas * self.tensor_parallel_size
        if given is not None and 1 < taken != given:
            each = f"tensor_parallel_size={self.tensor_parallel_size} takes as many devices"
            words = each if self.replicas == 1 else f"replicas={self.replicas} take {taken} devices"
            raise ValueError(f"{words}, but devices={self.devices} names {given}")
        return self

    def servers(self) -> list[Self]:
        """Return the settings of each of the `replicas`, with its own devices. Ray chooses those of `resources`."""
        if self.replicas == 1:
            return [self]
        size = self.tensor_parallel_size
        devices = ",".join(map(str, range(self.replicas * size))) if self.devices is None else self.devices
        names = [each.strip() for each in devices.split(",")]
        shares = [",".join(names[first : first + size]) for first in range(0, len(names), size)]
        return [
            self.model_copy(update={"replicas": 1, "devices": None if self.resources else share}) for share in shares
        ]


def check_installed(settings: ProcessSettings, section: str, package: str) -> None:
    """Check that the server is installed, as `BackendSettings.check_installed`.

    Nothing is known yet of a node that Ray is to choose.
    """
    if settings.resources and not settings.prefix:
        return
    try:
        installed_version(settings.model_copy(update={"python": settings.interpreter}), package)
    except ConfigError as error:
        raise ConfigError(str(error).replace("launch", section, 1)) from None


def check_together(launches: Sequence[LaunchSettings]) -> None:
    """Raise ValueError, with the keys at fault, if one machine has no room for all of the servers.

    If several servers name a device, each must give its share, and the shares may sum to at most 1. Which devices the
    machine has is not known here. So servers pass if none of them names a device. Those of another prefix are taken to
    run on another machine, and Ray gives those that it places their own devices.
    """
    ports = [(each.host, each.port) for each in launches if each.port is not None]
    if twice := sorted({port for host, port in ports if ports.count((host, port)) > 1}):
        raise ValueError(f"port={twice[0]} is given twice: give each server a port of its own, or none for free ones")
    chosen = [each for each in launches if not each.resources]
    for prefix in dict.fromkeys(tuple(each.prefix) for each in chosen):
        _check_devices_of([each for each in chosen if tuple(each.prefix) == prefix])


def _check_devices_of(launches: Sequence[LaunchSettings]) -> None:
    """Check the servers of one machine."""
    names = [None if each.devices is None else each.devices.split(",") for each in launches]
    if None in names and any(names):
        raise ValueError("devices: a server without this key uses all devices: set it for each server, or for none")
    for device in sorted({device.strip() for each in names for device in each or []}):
        shares = [
            each.memory_fraction
            for each, named in zip(launches, names, strict=True)
            if device in map(str.strip, named or [])
        ]
        if len(shares) > 1 and sum(share if share is not None else 1.0 for share in shares) > 1.0:
            raise ValueError(
                f"devices: {device} is given to {len(shares)} servers: give each its own devices, or each a "
                "memory_fraction, with a sum of at most 1"
            )


@dataclass(frozen=True)
class Command:
    """What starts a server: its whole command line, with the settings' own arguments.

    Devices and the settings' environment variables are added to `environment` later. `make_command` may be slow,
    because it runs in a thread. It raises `ConfigError` with keys that begin with `launch`.
    """

    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    package: str | None = None  # module that the interpreter must be able to import; None: not checked
    uds: str | None = None  # Unix socket to listen on; None: the doorway's port
    files: Mapping[str, str] = field(default_factory=dict, repr=False)  # of secrets, by name in the doorway's directory


@dataclass(frozen=True)
class Doorway:
    """How a server can be reached. On a port only its key protects it, because every user can connect to that."""

    port: int
    directory: Path  # private, for a socket, or for a file of secrets that a command line would show to all users
    key: str = field(repr=False)
    host: str = LOOPBACK  # with the port

    @property
    def uds(self) -> str:
        """The path of a Unix socket, to use in place of the port if the server can."""
        return str(self.directory / "http")


@dataclass(frozen=True)
class Assignment:
    """What a server is started for."""

    role: str  # for configuration keys
    name: str  # for messages, which tell a role's servers apart
    model: Path
    log_path: Path
    reads: Path | None = None  # directory of ours that the server must see
    cores: frozenset[int] | None = None  # that it has to itself; None: it shares them


MakeCommand = Callable[[Any, Path, Doorway], Command]  # given the kind's own settings, and the model's directory
Ask = Callable[[float], Awaitable[object]]  # given a deadline; raises a `RequestError` while the server is not ready


class LaunchedServer:
    """A server as our child process. Entering starts it; `until_ready` waits until it answers; leaving ends it."""

    def __init__(
        self, settings: ProcessSettings, assignment: Assignment, make_command: MakeCommand, *, key: str | None = None
    ) -> None:
        self._settings = settings
        self._role = assignment.role
        self._name = assignment.name
        self._assignment = assignment
        self._make_command = make_command
        self._child: ChildProcess
        self._exit_stack: contextlib.AsyncExitStack
        self.key = key or new_secret()  # the user's key, or one that only this object knows
        self.url: str
        self.uds: str | None

    async def __aenter__(self) -> Self:
        """Start the server. Raises `ConfigError` for an interpreter, package or port that cannot be used."""
        section = f"{self._role}.backend.launch"
        if self._settings.resources and not self._settings.prefix:
            raise ConfigError(f"{section}.resources: this command places no servers: train, eval and check do")
        self._settings.check_machine(section)
        async with contextlib.AsyncExitStack() as stack:
            start = self._start_there if self._settings.is_elsewhere else self._start_here
            try:
                command, port = await start(stack)
            except ConfigError as error:
                raise type(error)(str(error).replace("launch", section, 1)) from None
            self.uds = command.uds
            self.url = f"http://{self._settings.address}:{port}" if command.uds is None else "http://localhost"
            stack.push_async_callback(self._child.stop)
            self._exit_stack = stack.pop_all()
        return self

    async def _start_here(self, stack: contextlib.AsyncExitStack) -> tuple[Command, int]:
        directory, given = stack.enter_context(private_directory("spot-server-")), self._settings.port
        port = free_port() if given is None else check_port(given)
        command = await asyncio.to_thread(self._command, Doorway(port, directory, self.key))
        for name, text in command.files.items():
            (directory / name).touch(mode=0o600)
            (directory / name).write_text(text, encoding="utf-8")
        self._child = await ChildProcess.start_foreign(
            self._name,
            command.argv,
            log_path=self._assignment.log_path,
            # Servers put sockets of their own there, whose paths may not be long either.
            environment={
                "TMPDIR": short_temporary_directory(),
                **self._settings.passed_environment("launch"),
                **command.environment,
            },
            cores=self._assignment.cores,
            secrets=[self.key, *self._settings.passed_secrets],
        )
        return command, port

    async def _start_there(self, stack: contextlib.AsyncExitStack) -> tuple[Command, int]:
        settings, directory = self._settings, Path("/tmp") / f"spot-server-{new_secret()[:16]}"
        port = await asyncio.to_thread(self._far_port)
        command = await asyncio.to_thread(self._command, Doorway(port, directory, self.key, settings.host))
        program = FarProgram(
            settings.prefix,
            settings.interpreter or "",
            command.argv,
            {**settings.passed_environment("launch"), **command.environment},
            silence_s=settings.heartbeat_timeout_s,
            directory=directory if command.files else None,
            files=command.files,
        )
        secrets = [self.key, *settings.passed_secrets]
        self._child = await ChildProcess.start_far(
            self._name, program, log_path=self._assignment.log_path, secrets=secrets
        )
        return command, port

    def _far_port(self) -> int:
        """Return a port that is free on the far side, which must also have what the server needs."""
        settings, far_side = self._settings, self._settings.far_side
        assert far_side is not None
        ports = random.SystemRandom().sample(FREE_PORTS, 16) if settings.port is None else [settings.port]
        model, reads = self._assignment.model.absolute(), self._assignment.reads
        written = reads.absolute() if reads is not None else None
        return far_side.place(settings.host, ports, is_given=settings.port is not None, model=model, written=written)

    def _command(self, doorway: Doorway) -> Command:
        """Return the command with its whole environment. Runs the interpreter, so call it in a thread."""
        settings = self._settings.model_copy(update={"python": self._settings.interpreter})
        command = self._make_command(settings, self._assignment.model.absolute(), doorway)
        if command.package is not None:
            version = installed_version(settings, command.package)
            structlog.get_logger().info("starting", process=self._name, package=command.package, version=version)
        return replace(command, environment={**command.environment, **settings.variables})

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit_stack.__aexit__(kind, error, trace)

    async def watch(self) -> None:
        """Run for as long as the server lives. Raises `ProcessDiedError` when it ends, with the log's last lines."""
        try:
            await self._child.watch()
        except ProcessDiedError as error:
            self._explain(error)
            raise

    async def alongside(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which asks the server something. If that ends the server, raise its end."""
        try:
            return await while_alive(work, self.watch)
        except TransientError:  # a crashing server may still reply before it ends, so wait for that
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_REPLY_S):
                    await self.watch()
            raise

    async def until_ready(self, ask: Ask) -> None:
        """Wait until the server answers. Raises `ProcessDiedError` if it ends instead, or takes too long."""
        last: RequestError | None = None

        async def answered() -> None:
            nonlocal last
            while True:
                try:
                    await ask(asyncio.get_running_loop().time() + ASK_TIMEOUT_S)
                    return
                except RequestError as error:
                    last = error
                await asyncio.sleep(ASK_INTERVAL_S)

        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self.alongside(answered())
        except TimeoutError:
            late = ProcessDiedError(
                f"{self._name} (pid {self._child.pid}) was not ready after {self._settings.start_timeout_s:g} s "
                f"({last}): raise {self._role}.backend.launch.start_timeout_s or see the log: "
                f"{self._assignment.log_path}"
            )
            self._explain(late)
            raise late from None

    def _explain(self, error: ProcessDiedError) -> None:
        lines, errors = self._child.last_lines(LOG_LINES), self._child.earlier_errors(LOG_ERRORS, LOG_LINES)
        error.add_note("\n".join(f"  {line}" for line in [*errors, *(["..."] if errors else []), *lines]))


def installed_version(settings: ProcessSettings, package: str) -> str:
    """Return the version of the distribution that a module belongs to, in the settings' environment. Cached.

    Raises `ConfigError` if there is no such module.
    """
    return _asked(settings, VERSION_CODE, package)


def is_installed(settings: ProcessSettings, distribution: str) -> bool:
    """Return whether a distribution of this very name is in the settings' environment. Cached."""
    return _asked(settings, NAME_CODE, distribution) == "True"


def installed_nccl(settings: ProcessSettings) -> str | None:
    """Return the version of NCCL in the settings' environment; None if torch brings its own there, or has none."""
    return _asked(settings.model_copy(update={"python": settings.interpreter}), NCCL_CODE, "NCCL") or None


def _asked(settings: ProcessSettings, program: str, package: str) -> str:
    """Return the line that a program about a package prints in the settings' environment."""
    variables = tuple(sorted(settings.environment.items()))
    return _ask(settings.python, program, package, tuple(settings.prefix), variables, settings.ray_node)


@functools.lru_cache
def _ask(
    python: str,
    program: str,
    package: str,
    prefix: tuple[str, ...],
    variables: tuple[tuple[str, str], ...],
    ray_node: str | None,
) -> str:
    environment = dict(variables)
    if prefix:
        far_side = FarSide(prefix, python, environment, ray_node)
        code, line, errors = far_side.ask(program, [package])
        where = f"{python} on the far side of {far_side.shown}"
    else:
        code, line, errors = _ask_interpreter(python, program, package, environment.get("PYTHONPATH"))
        where = python
    if code == NO_SUCH_MODULE:
        raise ConfigError(f"launch.python: no {package} in {where}: install it there, or name another interpreter")
    if code:
        reason = headline(readable(errors)) or f"exit code {code}"
        raise ConfigError(f"launch.python: {where} cannot look for {package}: {reason}")
    return line


def _ask_interpreter(python: str, program: str, package: str, python_path: str | None) -> tuple[int, str, str]:
    own = {} if python_path is None else {"PYTHONPATH": python_path}
    command = [python, "-c", program, package]
    try:
        done = subprocess.run(
            command,
            env=foreign_environment(own),
            capture_output=True,
            text=True,
            timeout=VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"launch.python: cannot run {python}: {error}") from None
    return done.returncode, (done.stdout.split() or [""])[-1], done.stderr


def check_port(port: int) -> int:
    """Return the port if it is free. Raises `ConfigError` if another program listens on it."""
    if not _is_free(port):
        raise ConfigError(f"launch.port={port}: taken by another program; give another one, or none for a free one")
    return port


def free_port() -> int:
    """Return a loopback port on which nobody listens."""
    return next(port for port in random.SystemRandom().sample(FREE_PORTS, len(FREE_PORTS)) if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lingering connections do not count
        try:
            listener.bind((LOOPBACK, port))
        except OSError:
            return False
        return True
