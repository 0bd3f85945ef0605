"""Runs the agent of a node that joins: one process, which ends with the run. `__main__.py` is its own command."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Mapping

import structlog

from spot_async.config import ClusterConfig, Config
from spot_async.trainer.nodes.joining import JoiningNode
from spot_async.trainer.nodes.messages import Ending, hello_of
from spot_async.trainer.nodes.topology import Topology

# 75 is that of a run that a signal stopped and that can go on, also on node 0.
EXIT_CODES: Mapping[Ending, int] = {"done": 0, "stopped": 75, "failed": 1}


def agent_command(topology: Topology, cluster: ClusterConfig) -> list[str]:
    """Return the command that makes a machine with this environment one of a run's other nodes.

    It needs no configuration: what to train it gets from node 0.
    """
    return [
        *(sys.executable, "-m", "spot_async.trainer.nodes"),
        f"--nodes={topology.nodes}",
        f"--node-rank={topology.node_rank}",
        f"--address={topology.address}",
        f"--port={topology.port}",
        f"--run-id={topology.run_id}",
        f"--join-timeout-s={cluster.join_timeout_s}",
        f"--heartbeat-timeout-s={cluster.heartbeat_timeout_s}",
    ]


def run_agent(
    topology: Topology,
    cluster: ClusterConfig,
    config: Config | None,
    say: Callable[[str], None],
    *,
    leaves_at_once: bool = False,
) -> int:
    """Take part in the run until it is over; return the exit code. Raises as `JoiningNode.run` does.

    Schedulers send SIGTERM and SIGUSR1 to all nodes. Node 0 then ends the run in order, and this node must stay for
    that. A second SIGTERM, or Ctrl-C, means this node: the code is then 128 and the signal's number. With
    `leaves_at_once` the first SIGTERM does already.
    """
    received: list[signal.Signals] = []

    async def take_part() -> Ending:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def hear(number: signal.Signals) -> None:
            is_asked_again = number in received
            received.append(number)
            if number is signal.SIGTERM and not is_asked_again and not leaves_at_once:
                say("SIGTERM: this node stays until node 0 ends the run; once more to leave it")
            else:
                task.cancel()

        loop.add_signal_handler(signal.SIGUSR1, lambda: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, hear, number)
        return await JoiningNode(topology, hello_of(topology, config), cluster, say).run()

    # Without a run's log, events would be printed: these are for people to read only if something is wrong.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    try:
        ending = asyncio.run(take_part())
    except asyncio.CancelledError:
        if not received:  # nobody asked for it, so it is a bug
            raise
        say(f"left the run by {received[-1].name}")
        return 128 + received[-1]
    finally:
        structlog.reset_defaults()
    words = {"done": "the run is over", "stopped": "the run was stopped, and can go on", "failed": "the run failed"}
    say(f"{words[ending]} (node 0 has its files)")
    return EXIT_CODES[ending]
