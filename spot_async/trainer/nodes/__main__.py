"""The agent of a node as a command of its own, for whoever places nodes without a configuration there."""

from __future__ import annotations

import json
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
    told = json.loads(sys.argv[1])  # by `agent_command`
    cluster = ClusterConfig(**told["cluster"])
    try:
        topology = Topology(**told["place"], secret=cluster_secret(os.environ, cluster))
        return run_agent(topology, cluster, None, _say, leaves_at_once=True)  # only who placed it stops it
    except SpotError as error:
        _say(f"error: {error}")
        return 1


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
