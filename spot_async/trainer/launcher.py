"""Starts a node's ranks, as a child process of the orchestrator or of a joined node.

    python -m spot_async.trainer.launcher SETTINGS_FILE CHANNEL_DIRECTORY [--nodes 2 --node-rank 1 --address A ...]

It tells ranks their places by variables, as `torchrun` would. It imports no torch, for which ranks would have to wait.
It dies with its parent, and the ranks die with it. Nothing listens on the network. When a rank ends, the others are
ended too, and the log's last line says which one was first, and how.

Launchers of several nodes do not meet. Each knows its own node's ranks. They never restart ranks: then all nodes begin
again, with other launchers (`nodes/`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from spot_async.base.addresses import interface_of, own_address_towards
from spot_async.base.processes.exits import exit_with_parent
from spot_async.trainer.messages import NODE_RANK_VARIABLE, NODES_VARIABLE, STORE_PORT_VARIABLE, WAS_KILLED
from spot_async.trainer.settings import TrainerSettings

# Of torch's allocator: with either the user has decided. torch before 2.9 reads the first alone.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# Where torch's `record` writes what a rank raised.
ERROR_FILE, ERROR_FILE_VARIABLE = "error-{}.json", "TORCHELASTIC_ERROR_FILE"
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(words: Sequence[str]) -> int:
    """Run the ranks until one fails or they are stopped. They do not end otherwise."""
    given = arguments(words)
    settings = TrainerSettings.load(given.settings)
    ranks = settings.training.ranks // given.nodes
    variables = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as under `torchrun`
        **os.environ,
        **of_allocator(os.environ),
        **(among_nodes(given) if given.nodes > 1 else alone()),
        "SPOT_ASYNC_PARENT": str(os.getpid()),  # the ranks must not outlive this process
        "OMP_NUM_THREADS": str(settings.training.threads),
        "WORLD_SIZE": str(ranks),
    }
    command = [sys.executable, "-m", "spot_async.trainer", given.settings, given.channel_directory]
    running: dict[int, int] = {}  # ranks by process id
    for number in STOPPING:
        signal.signal(number, stop)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until it is known which ranks there are
    try:
        for rank in range(ranks):
            error_file = str(Path(given.channel_directory) / ERROR_FILE.format(rank))
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), ERROR_FILE_VARIABLE: error_file}
            running[start(command, variables | own)] = rank
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        ended = first_ends(running)
    finally:
        end(running)
    sys.stderr.write(f"{describe(ended, given.channel_directory, first_rank=given.node_rank * ranks)}\n")
    return 1


def start(command: list[str], environment: Mapping[str, str]) -> int:
    """Start a rank and return its process id. A launcher that was forked has torch already, and forks it too."""
    if "torch" not in sys.modules:
        return os.posix_spawn(sys.executable, command, environment, setsigmask=())
    from spot_async.base.processes.nursery import Order, fork, run_as_program

    _, _, module, *words = command

    def become() -> None:
        for number in STOPPING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        run_as_program(Order(module, words, environment))

    return fork(become)


def stop(number: int, frame: object) -> NoReturn:
    """Say which signal stops the ranks, and exit."""
    sys.stderr.write(f"stopped by {signal.Signals(number).name}\n")
    sys.exit(128 + number)


def first_ends(running: dict[int, int]) -> list[tuple[int, int, int]]:
    """Wait until a rank has ended. Take those that have from `running`; return their ranks, process ids and exit codes.

    Below 0 a code is the signal that killed it.
    """
    ended = []
    pid, status = os.wait()
    while pid:
        ended.append((running.pop(pid), pid, os.waitstatus_to_exitcode(status)))
        pid, status = os.waitpid(-1, os.WNOHANG) if running else (0, 0)
    return ended


def end(running: Mapping[int, int]) -> None:
    """End the ranks that still run. Whatever they have published is complete, and a frozen one hears nothing else."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    for pid in running:
        os.waitpid(pid, 0)


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("settings")
    parser.add_argument("channel_directory")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--address", help="node 0's")
    parser.add_argument("--store-port", help="of loopback, where ranks reach the process group's store")
    return parser.parse_args(words)


def of_allocator(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which ranks keep little of a GPU that they do not use: segments grow, without gaps.

    It is theirs alone. Servers that sleep have memory pools of their own, with which such segments may conflict.
    """
    if any(name in environ for name in ALLOCATOR_VARIABLES):
        return {}
    return {ALLOCATOR_VARIABLES[0]: "expandable_segments:True"}


def alone() -> dict[str, str]:
    """Return the variables of ranks that are all on this node."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}


def among_nodes(given: argparse.Namespace) -> dict[str, str]:
    """Return the variables of ranks that are on several nodes.

    gloo would take the address of this machine's name, which is often loopback. NCCL looks for fast networks itself.
    """
    variables = {
        NODES_VARIABLE: str(given.nodes),
        NODE_RANK_VARIABLE: str(given.node_rank),
        STORE_PORT_VARIABLE: given.store_port,
    }
    interface = interface_of(own_address_towards(given.address))
    if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        variables["GLOO_SOCKET_IFNAME"] = interface
    return variables


def describe(ended: Sequence[tuple[int, int, int]], channel_directory: str, first_rank: int = 0) -> str:
    """Say in one line which rank failed first, and how. `first_rank` is the number of this node's first.

    A killed rank makes the others raise. So of several that have ended one that was killed was first.
    """
    rank, pid, code = min(ended, key=lambda each: each[2] >= 0)
    if code < 0:
        how = f"{WAS_KILLED} {signal.Signals(-code).name}"
    else:
        how = f"exited with code {code}: {_reason(Path(channel_directory) / ERROR_FILE.format(rank))}"
    return f"rank {first_rank + rank} (pid {pid}) {how}"


def _reason(error_file: Path) -> str:
    """Return the first line of what a rank raised."""
    with suppress(FileNotFoundError):
        text: str = json.loads(error_file.read_bytes())["message"]["message"]
        return text.splitlines()[0]
    return "its last words are above"


if __name__ == "__main__":
    exit_with_parent()
    sys.exit(main(sys.argv[1:]))
