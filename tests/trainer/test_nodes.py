"""Nodes that join a run: who is let in, who is lost and comes back, and what is said of those that never come.

Both ends are here, over real connections. In place of ranks a node runs a program of the test.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import NAMED

import spot_async.trainer.nodes.joined as joined
import spot_async.trainer.nodes.joining as joining
from spot_async.base.processes.child import ChildProcess
from spot_async.config import Config
from spot_async.config.loading import validate
from spot_async.errors import ConfigError, ProcessDiedError, TrainerError
from spot_async.trainer.nodes.authentication import SECRET_VARIABLE
from spot_async.trainer.nodes.connection import reachable_address
from spot_async.trainer.nodes.joined import Fault, JoinedNodes, cause
from spot_async.trainer.nodes.joining import JoiningNode
from spot_async.trainer.nodes.messages import Hello, hello_of, refusal
from spot_async.trainer.nodes.topology import Topology, check_ranks
from spot_async.trainer.settings import TrainerSettings

OWN = Hello("spot", 3, 0, {"torch": "2.13.0", "spot-async": "0.1.0"}, {"training.ranks": "3", "run.seed": "0"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"keys": None}, None),
        ({"run_id": "other"}, "this is run 'spot', and node 1 is of run 'other'"),
        ({"nodes": 2}, "node 1 counts 2 nodes, node 0 counts 3"),
        ({"node_rank": 3}, "node 3 is there already: give each of the 3 nodes a rank of its own"),
        ({"node_rank": 0}, "node 0 is there already"),
        (
            {"versions": {"torch": "2.12.1", "spot-async": "0.1.0"}},
            "node 1 has torch 2.12.1, node 0 has 2.13.0: install the same on both",
        ),
        (
            {"keys": {"training.ranks": "3", "run.seed": "7"}},
            "node 1 has run.seed=7, node 0 has 0: give all nodes the same configuration",
        ),
        ({"keys": {"training.ranks": "3"}}, "node 1 has run.seed=nothing, node 0 has 0"),
    ],
)
def test_a_node_that_differs_is_told_in_what(changes: dict[str, Any], message: str | None) -> None:
    hello = Hello(
        **{"run_id": "spot", "nodes": 3, "node_rank": 1, "versions": OWN.versions, "keys": OWN.keys} | changes
    )
    found = refusal(hello, OWN)
    assert found is None if message is None else found is not None and found.startswith(message)


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["lost a connection", "rank 1 was killed by SIGKILL"], 1),
        (["rank 0 was killed by SIGKILL", "lost a connection"], 0),
        (["rank 0 exited", "rank 1 exited"], 0),
        (["rank 0 was killed by SIGABRT", "GONE"], 1),
    ],
)
def test_the_cause_is_a_node_that_is_gone_or_a_rank_that_was_killed_else_what_was_heard_first(
    words: list[str], first: int
) -> None:
    faults = {node: Fault(each, is_loss=each == "GONE") for node, each in enumerate(words)}
    assert cause(faults) is faults[first]


@pytest.mark.parametrize("host", ["127.0.1.1", "localhost"])
def test_an_address_that_every_machine_has_for_itself_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cluster.address={host}.* means each machine itself"):
        reachable_address(host)


async def test_a_name_of_node_0_may_become_known_late_but_not_never(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([OSError(-2, "Name or service not known"), "127.0.0.1", *[OSError(-2, "Name not known")] * 99])

    def resolve(name: str) -> str:
        if isinstance(answer := next(answers), OSError):
            raise answer
        return answer

    monkeypatch.setattr(joined, "reachable_address", resolve)
    monkeypatch.setattr(joined, "NAME_EVERY_S", 0.01)
    async with asyncio.timeout(60):
        async with run.nodes().open():
            pass
        monkeypatch.setattr(joined, "NAME_TIMEOUT_S", 0.02)
        with pytest.raises(ConfigError, match=r"cluster.address=127.0.0.1 is not known here: Name not known"):
            async with run.nodes().open():
                pytest.fail("opened at an address that nobody knows")


def test_ranks_that_nodes_cannot_share_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"training.ranks=3 cannot be shared by 2 nodes \(Slurm\)"):
        check_ranks(Topology(2, 0, "a", 1, "x", "Slurm", 600.0), 3)


# In place of a rank.
ENDS = "import sys, time; time.sleep(0.2); sys.exit('rank 1 (pid 5) was killed by SIGKILL')"
STAYS = "import time; time.sleep(600)"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What nodes run in place of ranks. All nodes are on loopback here."""
    chosen = [STAYS]
    start = ChildProcess.start

    async def start_chosen(name: str, argv: Sequence[str], *, log_path: Path, **given: Any) -> ChildProcess:
        return await start(name, [sys.executable, "-c", chosen[0]], log_path=log_path)

    for module in (joined, joining):
        monkeypatch.setattr(module, "reachable_address", lambda host: host)
    monkeypatch.setattr(ChildProcess, "start", start_chosen)
    monkeypatch.setattr(joining, "ATTEMPT_EVERY_S", 0.02)
    monkeypatch.setattr(joined, "REASONS_S", 0.3)
    return chosen


class Run:
    """A run of two nodes: what they say, and the parts to make them."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.said: list[str] = []
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port, wait_s = probe.getsockname()[1], config.cluster.join_timeout_s
        self.topology = Topology(2, 0, "127.0.0.1", port, "spot", "a test", wait_s)

    def nodes(self) -> JoinedNodes:
        return JoinedNodes(self.topology, self.config, self.said.append)

    def other(self, config: Config | None = None, *, node_rank: int = 1) -> Coroutine[Any, Any, str]:
        topology = replace(self.topology, node_rank=node_rank)
        hello = hello_of(topology, config or self.config)
        return JoiningNode(topology, hello, self.said.append).run()


@pytest.fixture
def run(program: list[str], quick_config: Callable[..., Config]) -> Run:
    return Run(quick_config())


@pytest.fixture(autouse=True)
def short_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("joined", "connection"):
        monkeypatch.setattr(f"spot_async.trainer.nodes.{module}.HEARTBEAT_TIMEOUT_S", 2.0)


@pytest.fixture
def quick_config() -> Callable[..., Config]:
    def make(**keys: Any) -> Config:
        own = {"training": {"iterations": 1, "ranks": 2}, "cluster": {"join_timeout_s": 30.0}}
        return validate({**NAMED, **own, **keys})

    return make


@pytest.fixture
def settings(trainer_settings: Callable[..., TrainerSettings], tmp_path: Path) -> str:
    return trainer_settings(tmp_path, tmp_path / "run", ranks=2).model_dump_json()


async def forever() -> None:
    await asyncio.Event().wait()


async def test_a_round_ends_with_a_rank_that_dies_and_the_next_with_a_node_that_goes_and_comes_back(
    run: Run, program: list[str], settings: str
) -> None:
    program[0] = ENDS
    async with asyncio.timeout(60), asyncio.TaskGroup() as group, run.nodes().open() as nodes:
        first = group.create_task(run.other())
        await nodes.begin(settings)
        with pytest.raises(ProcessDiedError, match=r"node 1 \(127.0.0.1\): rank 1 .* rank 1 \(pid 5\) was killed by"):
            await nodes.watch(forever)
        await nodes.stop()

        program[0] = STAYS
        await nodes.begin(settings)
        first.cancel()
        with pytest.raises(ProcessDiedError, match=r"node 1 \(127.0.0.1\) is gone: it "):
            await nodes.watch(forever)
        await nodes.stop()

        again = group.create_task(run.other())
        await nodes.begin(settings)
        assert nodes.meeting.store_port > 0
        await nodes.stop()  # in order: the node stays for another round
        await nodes.begin(settings)
        nodes.ends("done")
    assert again.result() == "done"
    assert "waiting for node 1" in run.said


async def test_a_node_outlives_a_lost_connection_and_joins_again(run: Run, settings: str) -> None:
    async with asyncio.timeout(60), asyncio.TaskGroup() as group, run.nodes().open() as nodes:
        other = group.create_task(run.other())
        await nodes.begin(settings)
        nodes._members[1]._writer.transport.abort()
        with pytest.raises(ProcessDiedError, match=r"node 1 .* is gone"):
            await nodes.watch(forever)
        await nodes.begin(settings)
        nodes.ends("stopped")
    assert other.result() == "stopped"
    assert [line for line in run.said if line.endswith("trying to join again")]


async def test_a_node_that_never_comes_is_named_on_both_sides(
    quick_config: Callable[..., Config], program: Any
) -> None:
    run = Run(quick_config(cluster={"join_timeout_s": 0.2}))
    with pytest.raises(
        TrainerError, match=r"node 0 did not let this node in at 127.* within cluster.join_timeout_s=0.2"
    ):
        await run.other()
    with pytest.raises(ExceptionGroup) as caught:
        async with run.nodes().open() as nodes:
            await nodes.begin("")
    assert caught.group_contains(
        TrainerError, match=r"^node 1 of 2 did not come to 127.* within cluster.join_timeout_s=0.2$"
    )


async def test_another_configuration_ends_both_and_another_run_only_itself(
    run: Run, quick_config: Callable[..., Config], settings: str
) -> None:
    other = Run(run.config)
    other.topology = replace(run.topology, run_id="another")
    message = "node 1 has run.seed=7, node 0 has 0"
    async with asyncio.timeout(60), run.nodes().open() as nodes:
        with pytest.raises(ConfigError, match="this is run 'spot', and node 1 is of run 'another'"):
            await other.other()
        with pytest.raises(ConfigError, match=message):
            await run.other(quick_config(run={"seed": 7}))
        with pytest.raises(ConfigError, match=message):
            await nodes.begin(settings)


@pytest.mark.long
async def test_two_runs_at_one_address_and_two_nodes_of_one_rank_are_refused(run: Run, settings: str) -> None:
    async with asyncio.timeout(60), asyncio.TaskGroup() as group, run.nodes().open() as nodes:
        with pytest.raises(ConfigError, match=r"cannot listen at 127.*: Address already in use: give"):
            async with run.nodes().open():
                pytest.fail("two runs listen")
        first = group.create_task(run.other())
        await nodes.begin(settings)
        with pytest.raises(ConfigError, match=r"node 1 is there already, at 127\.0"):
            await run.other()
        assert not first.done()
        nodes.ends("done")
    assert first.result() == "done"


AGENT = """
import json, os, sys
import spot_async.trainer.nodes.joining as joining
from spot_async.config import ClusterConfig
from spot_async.trainer.nodes.joining import run_agent
from spot_async.trainer.nodes.authentication import cluster_secret
from spot_async.trainer.nodes.topology import Topology

joining.reachable_address = lambda host: host
topology = Topology(**json.loads(sys.argv[1]), secret=cluster_secret(os.environ, ClusterConfig()))
sys.exit(run_agent(topology, None, lambda line: print(line, flush=True)))
"""


async def test_an_agent_stays_at_a_first_sigterm_and_leaves_at_a_second(run: Run) -> None:
    topology = replace(run.topology, node_rank=1)
    fields = json.dumps({name: getattr(topology, name) for name in topology.__dataclass_fields__ if name != "secret"})
    async with asyncio.timeout(60), run.nodes().open() as nodes:
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", AGENT, fields),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, SECRET_VARIABLE: topology.secret.value.decode()},
        )
        assert agent.stdout is not None
        await nodes._assemble()
        agent.send_signal(signal.SIGUSR1)
        agent.send_signal(signal.SIGTERM)
        while not (line := await agent.stdout.readline()).startswith(b"SIGTERM: this node stays"):
            assert line
        agent.send_signal(signal.SIGTERM)
        assert await agent.wait() == 128 + signal.SIGTERM
