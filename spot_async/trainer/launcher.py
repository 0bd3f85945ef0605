"""Starts the ranks under torch's own elastic launcher, as the orchestrator's child process.

It adds three things to `torchrun`. It dies with the orchestrator, and the ranks die with it. Ranks meet through files
in a private directory, so that nothing listens on the network. When a rank dies, the log's last line says which one and
how.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

from spot_async.base.processes.exits import exit_with_parent
from spot_async.base.processes.memory import without_gc

if __name__ == "__main__":
    exit_with_parent()  # first, because importing torch takes seconds

with without_gc():
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from spot_async.trainer.settings import TrainerSettings

MONITOR_INTERVAL_S = 0.1
# Torch logs these warnings when it is stopped, as at the end of every run. `main` and `describe` say it in one line.
_OF_EVERY_END = ("Received %s death signal", "Sending process %s closing signal")
_THEIR_LOGGERS = ("torch.distributed.elastic.agent.server.api", "torch.distributed.elastic.multiprocessing.api")


def main(settings_path: str, channel_directory: str) -> int:
    """Run the ranks until they fail or are stopped. They do not end otherwise."""
    settings = TrainerSettings.load(settings_path)
    for name in _THEIR_LOGGERS:
        logging.getLogger(name).addFilter(lambda record: not str(record.msg).startswith(_OF_EVERY_END))
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.update(
        SPOT_ASYNC_PARENT=str(os.getpid()),  # the ranks must not outlive this process
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # a TCP store would listen on every interface
        GLOO_SOCKET_IFNAME=loopback,
        NCCL_SOCKET_IFNAME=loopback,
        OMP_NUM_THREADS=str(settings.training.threads),
    )
    launch = elastic_launch(
        LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=settings.training.ranks,
            run_id="trainer",
            rdzv_backend="c10d",
            rdzv_endpoint=f"{channel_directory}/rendezvous",
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=MONITOR_INTERVAL_S,
            logs_specs=DefaultLogsSpecs(log_dir=f"{channel_directory}/logs"),
        ),
        entrypoint=sys.executable,
    )
    try:
        launch("-m", "spot_async.trainer", settings_path, channel_directory)
    except ChildFailedError as error:
        sys.stderr.write(f"{describe(error.failures)}\n")
        return 1
    except SignalException as stopped:  # the launcher has ended the ranks already
        sys.stderr.write(f"stopped by {stopped.sigval.name}\n")
        return 128 + stopped.sigval
    return 0


def describe(failures: dict[int, ProcessFailure]) -> str:
    """Say in one line which rank failed first, and how.

    Times of failures cannot tell, because they are whole seconds. But a killed rank makes the others raise, and the
    launcher sends SIGTERM to the rest. So a rank killed by another signal was first, else one that raised.
    """

    def suspicion(item: tuple[int, ProcessFailure]) -> tuple[int, int]:
        rank, failure = item
        return (2 if failure.exitcode == -signal.SIGTERM else int(failure.exitcode >= 0)), rank

    rank, failure = min(failures.items(), key=suspicion)
    if failure.exitcode < 0:
        how = f"was killed by {failure.signal_name()}"
    else:
        how = f"exited with code {failure.exitcode}: {_reason(failure)}"
    return f"rank {rank} (pid {failure.pid}) {how}"


def _reason(failure: ProcessFailure) -> str:
    message = failure.message
    text = message["message"] if isinstance(message, dict) else str(message)
    return text.splitlines()[0]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
