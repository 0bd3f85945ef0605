"""Starts a node's ranks under torch's own elastic launcher, as a child process of the orchestrator or of a joined node.

    python -m spot_async.trainer.launcher SETTINGS_FILE CHANNEL_DIRECTORY [--nodes 2 --node-rank 1 --address A ...]

It adds three things to `torchrun`. It dies with its parent, and the ranks die with it. A launcher meets itself through
files in a private directory, so that nothing listens on the network. When a rank dies, the log's last line says which
one and how.

Launchers of several nodes do not meet: torch's would unpickle what anybody writes to their store. Each knows its own
node's ranks. They never restart ranks: then all nodes begin again, with other launchers (`nodes/`).
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from spot_async.base.processes.exits import exit_with_parent
from spot_async.base.processes.resources import without_gc

if __name__ == "__main__":
    exit_with_parent()  # first, because importing torch takes seconds

with without_gc():
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from spot_async.base.addresses import LOOPBACK, interface_of, own_address_towards
from spot_async.trainer.messages import NODE_RANK_VARIABLE, NODES_VARIABLE, STORE_PORT_VARIABLE, WAS_KILLED
from spot_async.trainer.settings import TrainerSettings

MONITOR_INTERVAL_S = 0.1
# Of torch's allocator: with either the user has decided. torch before 2.9 reads the first alone.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# Torch logs these warnings when it is stopped, as at the end of every run. `main` and `describe` say it in one line.
_OF_EVERY_END = ("Received %s death signal", "Sending process %s closing signal")
_THEIR_LOGGERS = ("torch.distributed.elastic.agent.server.api", "torch.distributed.elastic.multiprocessing.api")


def main(words: Sequence[str]) -> int:
    """Run the ranks until they fail or are stopped. They do not end otherwise."""
    given = arguments(words)
    settings = TrainerSettings.load(given.settings)
    for name in _THEIR_LOGGERS:
        logging.getLogger(name).addFilter(lambda record: not str(record.msg).startswith(_OF_EVERY_END))
    os.environ.update(
        SPOT_ASYNC_PARENT=str(os.getpid()),  # the ranks must not outlive this process
        # Ranks must not use the launcher's store, which would listen on every interface.
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        OMP_NUM_THREADS=str(settings.training.threads),
    )
    os.environ.update(of_allocator(os.environ))
    ranks = settings.training.ranks // given.nodes
    os.environ.update(among_nodes(given) if given.nodes > 1 else alone())
    launch = elastic_launch(
        LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id="trainer",
            rdzv_backend="c10d",
            rdzv_endpoint=f"{given.channel_directory}/rendezvous",
            rdzv_configs={"store_type": "file"},
            local_addr=LOOPBACK,
            max_restarts=0,
            monitor_interval=MONITOR_INTERVAL_S,
            logs_specs=DefaultLogsSpecs(log_dir=f"{given.channel_directory}/logs"),
        ),
        entrypoint=sys.executable,
    )
    try:
        launch("-m", "spot_async.trainer", given.settings, given.channel_directory)
    except ChildFailedError as error:
        sys.stderr.write(f"{describe(error.failures, first_rank=given.node_rank * ranks)}\n")
        return 1
    except SignalException as stopped:  # the launcher has ended the ranks already
        sys.stderr.write(f"stopped by {stopped.sigval.name}\n")
        return 128 + stopped.sigval
    return 0


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


def describe(failures: dict[int, ProcessFailure], first_rank: int = 0) -> str:
    """Say in one line which rank failed first, and how. `first_rank` is the number of this node's first.

    Times of failures cannot tell, because they are whole seconds. But a killed rank makes the others raise, and the
    launcher sends SIGTERM to the rest. So a rank killed by another signal was first, else one that raised.
    """

    def suspicion(item: tuple[int, ProcessFailure]) -> tuple[int, int]:
        rank, failure = item
        return (2 if failure.exitcode == -signal.SIGTERM else int(failure.exitcode >= 0)), rank

    _, failure = min(failures.items(), key=suspicion)
    if failure.exitcode < 0:
        how = f"{WAS_KILLED} {failure.signal_name()}"
    else:
        how = f"exited with code {failure.exitcode}: {_reason(failure)}"
    return f"rank {first_rank + failure.local_rank} (pid {failure.pid}) {how}"


def _reason(failure: ProcessFailure) -> str:
    message = failure.message
    text = message["message"] if isinstance(message, dict) else str(message)
    return text.splitlines()[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
