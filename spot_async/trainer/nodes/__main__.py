"""The agent of a node as a command of its own, for whoever places nodes without a configuration there."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from spot_async.base.processes.exits import exit_with_parent
from spot_async.config import ClusterConfig
from spot_async.errors import SpotError
from spot_async.trainer.nodes.authentication import cluster_secret
from spot_async.trainer.nodes.joining import EXIT_CODES, JoiningNode
from spot_async.trainer.nodes.messages import hello_of
from spot_async.trainer.nodes.topology import Topology


def main() -> int:
    exit_with_parent()
    place = json.loads(sys.argv[1])  # by `agent_command`
    try:
        topology = Topology(**place, secret=cluster_secret(os.environ, ClusterConfig()))
        # Only who placed it stops it: it may die of any signal at once, and its ranks with it.
        return EXIT_CODES[asyncio.run(JoiningNode(topology, hello_of(topology, None), _say).run())]
    except SpotError as error:
        _say(f"error: {error}")
        return 1


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
