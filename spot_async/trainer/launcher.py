"""Starts the ranks under torch's own elastic launcher, as the orchestrator's child process.

Three things it adds to `torchrun`: it dies with the orchestrator, and the ranks with it; ranks meet
through files in a private directory, so that nothing listens on the network; and when a rank dies,
the last line of the log says which one and how.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

from spot_async.base.processes.child import exit_with_parent
from spot_async.base.processes.memory import without_gc

if __name__ == "__main__":
    exit_with_parent()  # before the seconds that importing torch takes

with without_gc():
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from spot_async.trainer.settings import TrainerSettings

MONITOR_INTERVAL_S = 0.1
# What torch warns of where it is stopped, as every run does at its end: `main` and `describe` say it in a line.
_OF_EVERY_END = ("Received %s death signal", "Sending process %s closing signal")
_THEIR_LOGGERS = ("torch.distributed.elastic.agent.server.api", "torch.distributed.elastic.multiprocessing.api")


def main(settings_path: str, channel_directory: str) -> int:
    """Run the ranks until they end; they only do so by failing or by being stopped."""
    settings = TrainerSettings.load(settings_path)
    for name in _THEIR_LOGGERS:
        logging.getLogger(name).addFilter(lambda record: not str(record.msg).startswith(_OF_EVERY_END))
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.update(
        SPOT_ASYNC_PARENT=str(os.getpid()),  # whom the ranks must not outlive
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # no TCP store: it would listen on every interface
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
    except SignalException as stopped:  # the ranks have been ended
        sys.stderr.write(f"stopped by {stopped.sigval.name}\n")
        return 128 + stopped.sigval
    return 0


def describe(failures: dict[int, ProcessFailure]) -> str:
    """One line on the rank at fault.

    Times do not tell, they are whole seconds. A killed rank makes the others raise, and the launcher
    ends with SIGTERM those that did not: so a signal comes first, then an exception, then SIGTERM.
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
