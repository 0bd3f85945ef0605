"""The side of a node that joins a run: starts its ranks when node 0 says so, and ends with the run.

After the connection is lost it comes back by itself: the network may have failed, or node 0 is resumed. `run_agent` is
this side as a person's or a scheduler's command, and `__main__.py` the same for whoever places nodes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import structlog

from spot_async.base.events import logged_by
from spot_async.base.files import writing
from spot_async.base.processes.private_directory import private_directory
from spot_async.base.tasks import while_alive
from spot_async.config import Config
from spot_async.errors import ConfigError, SpotError, TrainerError
from spot_async.trainer.nodes.authentication import SECRET_VARIABLE, Purpose
from spot_async.trainer.nodes.connection import Connection, LostConnectionError, reachable_address
from spot_async.trainer.nodes.gate import UnknownSecretError, knock
from spot_async.trainer.nodes.messages import (
    Begin,
    Ended,
    Ending,
    Hello,
    Leaving,
    Over,
    Refused,
    Stop,
    ToNode,
    hello_of,
)
from spot_async.trainer.nodes.store_tunnel import tunnel
from spot_async.trainer.nodes.topology import Topology
from spot_async.trainer.rank_processes import Meeting, RankProcesses
from spot_async.trainer.settings import TrainerSettings

WRONG_SECRET = f"node 0 has another secret than this node ({SECRET_VARIABLE} or cluster.secret_file), or no room"
ATTEMPT_EVERY_S = 1.0  # between two tries to reach node 0, which may start later
# 75 is that of a run that a signal stopped and that can continue, also on node 0.
EXIT_CODES: Mapping[Ending, int] = {"done": 0, "stopped": 75, "failed": 1}


class JoiningNode:
    """A node that takes part in another's run."""

    def __init__(self, topology: Topology, hello: Hello, say: Callable[[str], None]) -> None:
        """`say` gets lines for people."""
        self._topology = topology
        self._hello = hello
        self._say = say

    async def run(self) -> Ending:
        """Take part until the run is over; return how it ended.

        Raises ConfigError if node 0 refuses this node, and `TrainerError` if it cannot be reached for too long.
        """
        while True:
            connection = await self._join()
            try:
                return await self._take_part(connection)
            except LostConnectionError as lost:
                self._say(f"node 0 {lost}; trying to join again")
            except asyncio.CancelledError:
                connection.send(Leaving("was stopped"))
                raise
            finally:
                await connection.close()

    async def _join(self) -> Connection[ToNode]:
        """Return a connection over which node 0 has let this node in. It is tried until then."""
        topology, timeout_s = self._topology, self._topology.join_timeout_s
        place = f"{topology.address}:{topology.port}"
        self._say(f"node {topology.node_rank} of {topology.nodes} ({topology.source}): joining the run at {place}")
        reason = "no answer"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        connection = await self._connect()
                        self._say("joined")
                        return connection
                    except UnknownSecretError:
                        if reason != WRONG_SECRET:
                            self._say(f"not let in yet: {WRONG_SECRET}")
                        reason = WRONG_SECRET
                    except OSError as error:
                        reason = error.strerror or str(error) or "no answer"
                    except LostConnectionError as lost:
                        reason = f"it {lost}"
                    await asyncio.sleep(ATTEMPT_EVERY_S)
        except TimeoutError:
            raise TrainerError(
                f"node 0 did not let this node in at {place} within cluster.join_timeout_s={timeout_s:g}: {reason}"
            ) from None

    async def _connect(self) -> Connection[ToNode]:
        connection: Connection[ToNode] = await self._enter(Purpose.NODE, ToNode)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(connection.close)
            connection.send(self._hello)
            answer = await connection.receive()
            if isinstance(answer, Refused):
                raise ConfigError(answer.reason)
            stack.pop_all()
        return connection

    async def _enter_store(self, number: int) -> Connection[bytes]:
        """Return a connection to the store of a round."""
        connection: Connection[bytes] = await self._enter(Purpose.STORE, bytes)
        connection.send(number.to_bytes(8, "big"))
        return connection

    async def _enter(self, purpose: Purpose, kind: Any) -> Connection[Any]:
        # Looked up each time: the name may not be known yet, or mean another machine by now.
        address = await asyncio.to_thread(reachable_address, self._topology.address)
        connected, seals = await knock(address, self._topology.port, self._topology.secret, purpose)
        return await Connection[Any].open(connected, seals, kind)

    async def _take_part(self, connection: Connection[ToNode]) -> Ending:
        """Do what node 0 says until the run is over. Raises `LostConnectionError` when it says nothing any more."""
        said = await connection.receive()
        while not isinstance(said, Over):
            if isinstance(said, Begin):
                said = await self._train(said, connection)
                continue
            if isinstance(said, Stop):
                connection.send(Ended(said.round, "was stopped"))
            said = await connection.receive()
        return said.ending

    async def _train(self, begin: Begin, connection: Connection[ToNode]) -> ToNode:
        """Run this node's ranks until node 0 says more, and return that. It is told when they end by themselves."""

        async def tell_end() -> None:
            async with AsyncExitStack() as stack:
                try:
                    ranks = await self._start(begin, stack)
                    self._say(f"training (log: {ranks.log_path})")
                    await ranks.watch()
                except (SpotError, OSError) as failed:
                    self._say(str(failed))
                    connection.send(Ended(begin.round, str(failed)))

        return await while_alive(connection.receive(), tell_end)

    async def _start(self, begin: Begin, stack: AsyncExitStack) -> RankProcesses:
        settings = TrainerSettings.model_validate_json(begin.settings)
        logs = Path(settings.run_directory) / "logs"
        with writing(logs):
            logs.mkdir(parents=True, exist_ok=True)
        channel_directory = stack.enter_context(private_directory("spot-trainer-"))
        store_port = await stack.enter_async_context(tunnel(lambda: self._enter_store(begin.round)))
        settings_path = channel_directory / "trainer.json"
        settings_path.write_text(begin.settings)
        log_path = logs / f"trainer-node-{self._topology.node_rank}.log"
        meeting = Meeting(self._topology, store_port)
        return await stack.enter_async_context(
            RankProcesses(settings, settings_path, str(channel_directory), log_path, meeting=meeting)
        )


def agent_command(topology: Topology) -> list[str]:
    """Return the command that makes a machine with this environment one of a run's other nodes.

    It needs no configuration: what to train it gets from node 0.
    """
    place = {name: value for name, value in vars(topology).items() if name != "secret"}
    return [sys.executable, "-m", "spot_async.trainer.nodes", json.dumps(place)]


def run_agent(topology: Topology, config: Config, say: Callable[[str], None]) -> int:
    """Take part in the run until it is over; return the exit code. Raises as `JoiningNode.run` does.

    Schedulers send SIGTERM and SIGUSR1 to all nodes. Node 0 then ends the run in order, and this node must stay for
    that. A second SIGTERM, or Ctrl-C, means this node: the code is then 128 and the signal's number.
    """
    received: list[signal.Signals] = []

    async def take_part() -> Ending:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def hear(number: signal.Signals) -> None:
            is_asked_again = number in received
            received.append(number)
            if number is signal.SIGTERM and not is_asked_again:
                say("SIGTERM: this node stays until node 0 ends the run; once more to leave it")
            else:
                task.cancel()

        loop.add_signal_handler(signal.SIGUSR1, lambda: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, hear, number)
        return await JoiningNode(topology, hello_of(topology, config), say).run()

    # Without a run's log, events would be printed: these are for people to read only if something is wrong.
    try:
        with logged_by(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING)):
            ending = asyncio.run(take_part())
    except asyncio.CancelledError:
        if not received:  # nobody asked for it, so it is a bug
            raise
        say(f"left the run by {received[-1].name}")
        return 128 + received[-1]
    words = {"done": "the run is over", "stopped": "the run was stopped, and can continue", "failed": "the run failed"}
    say(f"{words[ending]} (node 0 has its files)")
    return EXIT_CODES[ending]
