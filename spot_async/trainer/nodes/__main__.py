"""The agent of a node as a command of its own, for whoever places nodes without a configuration there."""

from __future__ import annotations

import argparse
import os
import sys

from spot_async.base.processes.exits import exit_with_parent
from spot_async.config import ClusterConfig
from spot_async.errors import SpotError
from spot_async.trainer.nodes.authentication import cluster_secret
from spot_async.trainer.nodes.joining import run_agent
from spot_async.trainer.nodes.topology import Topology


def main() -> int:
    exit_with_parent()
    parser = argparse.ArgumentParser(prog="python -m spot_async.trainer.nodes", description=__doc__)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument("--address", required=True, help="node 0's")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--join-timeout-s", type=float, default=ClusterConfig().join_timeout_s)
    parser.add_argument("--heartbeat-timeout-s", type=float, default=ClusterConfig().heartbeat_timeout_s)
    given = parser.parse_args()
    cluster = ClusterConfig(join_timeout_s=given.join_timeout_s, heartbeat_timeout_s=given.heartbeat_timeout_s)
    try:
        secret = cluster_secret(os.environ, cluster)
        topology = Topology(
            given.nodes, given.node_rank, given.address, given.port, given.run_id, "its command", secret
        )
        return run_agent(topology, cluster, None, _say, leaves_at_once=True)  # only who placed it stops it
    except SpotError as error:
        _say(f"error: {error}")
        return 1


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
