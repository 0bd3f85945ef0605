"""Forks children of ours from one warm process, the nursery, which has imported what they all need.

    python -m spot_async.base.processes.nursery SOCKET MODULE...

A start is mostly imports of torch and transformers, done anew in each server and rank. The nursery does them once,
while the orchestrator still reads models and problems. Then a fork of it becomes a child within milliseconds. The
nursery dies with the orchestrator, however that dies, and its children die with it. Without a nursery, `ChildProcess`
starts programs as ever.

A fork copies one thread, and no state of a GPU's driver. So the nursery has one thread, and begins only on Linux and
where no GPU is visible.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import importlib
import os
import re
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import structlog

from spot_async.base.processes import guard
from spot_async.base.processes.exits import SAFE_PATH, exit_with_parent
from spot_async.base.processes.gpus import gpu_count, torch_has_gpus, visible_gpus
from spot_async.base.processes.resources import available_cores, without_gc
from spot_async.base.secrets import SECRETS

MODULE = "spot_async.base.processes.nursery"
# A child's own variables come with its order. The nursery has only those that an interpreter and libraries read as they
# begin, and ours, because its environment stays readable in /proc for as long as any child lives.
_OF_NURSERY = re.compile(
    r"(PATH|HOME|USER|TMPDIR|LANG|VIRTUAL_ENV|(LC|LD|XDG)_.*|PYTHON.*|SPOT_ASYNC_.*|"
    r"(OMP|GOMP|KMP|MKL|OPENBLAS|ATEN|ONEDNN|DNNL|TORCH|PYTORCH|HF|TRANSFORMERS|TOKENIZERS|CUDA)_.*)"
)
# Of a child, and what makes it differ from others. With any further variable it is started by itself, since a library
# may have read that one before the fork.
_OF_CHILDREN = re.compile(
    r"OMP_NUM_THREADS|SPOT_ASYNC_.*|"
    r"RANK|LOCAL_RANK|WORLD_SIZE|(GLOO|NCCL)_SOCKET_IFNAME|PYTORCH_CUDA_ALLOC_CONF|TORCHELASTIC_ERROR_FILE|"
    r"TORCH_NCCL_ASYNC_ERROR_HANDLING"  # torch reads these when a rank makes its group or uses a GPU, not before
)
PATIENCE_S = 120.0  # for its imports, from a slow disk
LARGEST_ORDER = 1 << 17  # bytes; a message on the socket may have some more
_NUMBER = struct.Struct("=i")  # a report: the child's process id, and later its exit code


class Order(msgspec.Struct, frozen=True):
    """A child to fork: a module to run, as `python -m` does, its arguments, and its whole environment."""

    module: str
    words: Sequence[str]
    environment: Mapping[str, str]


class ForkedProcess:
    """A child of the nursery, with what `ChildProcess` uses of an `asyncio.subprocess.Process`."""

    def __init__(self, reports: int) -> None:
        """`reports` is the end of a pipe on which the child and the nursery tell. Call this in the event loop."""
        self.pid = 0  # until it has begun
        self.returncode: int | None = None  # below 0: the signal that killed it
        self._reports = reports
        self._loop = asyncio.get_running_loop()
        self._heard = asyncio.Event()
        self._ended = asyncio.Event()
        self._loop.add_reader(reports, self._hear)

    async def begun(self) -> bool:
        """Wait for the fork. Return False if the nursery ended, refused, or does not answer."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._heard.wait()
        except TimeoutError:
            pass
        finally:
            if not self.pid and self.returncode is None:
                self._end(-signal.SIGKILL)  # by a closed pipe the nursery knows that nobody waits for the child
        return self.pid > 0

    async def wait(self) -> int:
        """Return the exit code once the child has ended. If the nursery is killed, so are its children."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def _hear(self) -> None:
        told = os.read(self._reports, _NUMBER.size)
        if told and not self.pid:
            (self.pid,) = _NUMBER.unpack(told)
            self._heard.set()
        else:
            self._end(_NUMBER.unpack(told)[0] if told else -signal.SIGKILL)

    def _end(self, code: int) -> None:
        self.returncode = code
        self._loop.remove_reader(self._reports)
        os.close(self._reports)
        self._heard.set()
        self._ended.set()


class Nursery:
    """The orchestrator's end: starts the nursery, and orders children from it."""

    def __init__(self) -> None:
        self._orders: socket.socket | None = None
        self._programs: Collection[str] = ()
        self._process: subprocess.Popen[bytes]

    def begin(self, programs: Collection[str], imports: Sequence[str]) -> None:
        """Start the nursery, which imports modules and then forks `programs`. Do nothing where forks do not work.

        Call this first, in the main thread: the kernel ends the nursery with the thread that started it.
        """
        gpus = gpu_count()
        if sys.platform != "linux" or (torch_has_gpus() and (gpus is None or visible_gpus(os.environ, gpus) > 0)):
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **{name: value for name, value in os.environ.items() if _OF_NURSERY.fullmatch(name)},
            **SAFE_PATH,
            "SPOT_ASYNC_PARENT": str(os.getpid()),
            "OMP_NUM_THREADS": "1",  # or OpenBLAS starts threads as it is imported; each child sets its own number
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno()), *imports],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what it cannot import, its programs cannot either, and they say so
                stderr=subprocess.DEVNULL,
                env=SECRETS.without_keys(environment),
                start_new_session=True,
            )
        self._orders, self._programs = ours, frozenset(programs)
        atexit.register(self.end)

    def end(self) -> None:
        """End the nursery, and children that it has. From then on programs are started as without it."""
        if self._orders is not None:
            self._process.kill()
            self._process.wait()  # or nobody would count its CPU time and its children's
            self._orders.close()
            self._orders = None

    async def fork(
        self, argv: Sequence[str], own: Mapping[str, str], environment: Mapping[str, str], log: BinaryIO
    ) -> ForkedProcess | None:
        """Return a child that runs `argv`, with its output in `log`; None if it must be started without the nursery.

        `own` are those variables of the environment that are for this child alone.
        """
        interpreter, *option, module = argv[:3]
        is_ours = interpreter == sys.executable and option == ["-m"] and module in self._programs
        further = dict(own.items() - SAFE_PATH.items())  # the nursery began with that one
        if self._orders is None or not is_ours or not all(map(_OF_CHILDREN.fullmatch, further)):
            return None
        cores = {guard.CORES_VARIABLE: ",".join(map(str, sorted(available_cores())))}  # the nursery began with all
        order = msgspec.json.encode(Order(module, argv[3:], {**cores, **environment}))
        if len(order) > LARGEST_ORDER:
            return None
        reports, told = os.pipe()
        child = ForkedProcess(reports)
        try:
            socket.send_fds(self._orders, [order], [log.fileno(), told])
        except OSError:  # the nursery was killed
            self.end()
        finally:
            os.close(told)
        if await child.begun():
            return child
        structlog.get_logger().warning("started without the nursery, which forked nothing", module=module)
        return None


NURSERY = Nursery()  # of this process


def fork(work: Callable[[], object]) -> int:
    """Return the process id of a copy of this process, which does `work` and then ends as a program would."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        work()
        code = 0
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
        if isinstance(asked.code, str):
            sys.stderr.write(f"{asked.code}\n")
    except BaseException:  # noqa: BLE001 - nothing is above this in the copy
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_as_program(order: Order) -> None:
    """Run a module in this process as if it had been started for it."""
    os.environ.clear()
    os.environ.update(order.environment)
    sys.argv[1:] = order.words
    _show([sys.executable, "-m", order.module, *order.words])
    runpy.run_module(order.module, run_name="__main__", alter_sys=True)


def _show(command: Sequence[str]) -> None:
    """Let `ps` show a command line as this process's: as much of it as there is room in the one it was started with."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # proc(5): arg_start and arg_end
    shown = "\0".join(command).encode()[: max(0, end - start - 1)]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


class _Child(NamedTuple):
    pid: int
    end: int  # of a pipe that the child has open until it ends
    reports: int

    def close(self) -> None:
        os.close(self.end)
        os.close(self.reports)


def _tend(orders: socket.socket) -> None:
    """Fork a child for each order, and report how each has ended, until the orchestrator is gone."""
    children: dict[int, _Child] = {}  # by both of their descriptors
    poll = select.poll()
    poll.register(orders, select.POLLIN)
    while True:
        descriptor, _ = poll.poll()[0]  # one at a time: what was closed may have a new meaning for the next
        if descriptor == orders.fileno():
            message, given, *_ = socket.recv_fds(orders, LARGEST_ORDER, 2)
            if not message:
                return
            if (born := _bear(msgspec.json.decode(message, type=Order), given, orders, children)) is not None:
                children |= {born.end: born, born.reports: born}
                poll.register(born.end, select.POLLIN)
                poll.register(born.reports, 0)
            continue
        child = children[descriptor]
        poll.unregister(descriptor)
        if descriptor == child.reports:  # nobody reads there, so nobody wants the child
            os.kill(child.pid, signal.SIGKILL)
            continue
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        with suppress(BrokenPipeError):
            os.write(child.reports, _NUMBER.pack(code))
        with suppress(KeyError):
            poll.unregister(child.reports)
        del children[child.end], children[child.reports]
        child.close()


def _bear(order: Order, given: Sequence[int], orders: socket.socket, children: Mapping[int, _Child]) -> _Child | None:
    """Fork a child. Return None, with nothing reported, if a library has started a thread here."""
    log, reports = given
    if len([*Path("/proc/self/task").iterdir()]) > 1:
        os.close(log)
        os.close(reports)
        return None
    end, held = os.pipe()
    nursery = str(os.getpid())  # asked in the child it could be whoever adopts orphans

    def become() -> None:
        orders.close()
        for each in {*children.values()}:
            each.close()
        os.close(end)
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.write(reports, _NUMBER.pack(os.getpid()))
        os.close(reports)
        environment = {**order.environment, "SPOT_ASYNC_PARENT": nursery}
        run_as_program(msgspec.structs.replace(order, environment=environment))

    pid = fork(become)
    os.close(held)
    os.close(log)
    return _Child(pid, end, reports)


def main(words: Sequence[str]) -> None:
    """Import what children need, and then fork them."""
    exit_with_parent()
    with without_gc():
        for name in words[1:]:
            importlib.import_module(name)
    gc.freeze()  # a collection in a child would copy all pages of what is imported
    with socket.socket(fileno=int(words[0])) as orders:
        _tend(orders)


if __name__ == "__main__":
    main(sys.argv[1:])
