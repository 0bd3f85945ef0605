"""Servers that Ray places: what is asked of it, what becomes of its answer, and what is said of its refusals."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys

import pytest
import yaml
from kill_drill import ROOT

import spot_async.running.ray_places as placed_nodes_module
from spot_async.backends.local.settings import LocalSettings
from spot_async.backends.shared.launch_settings import LaunchSettings
from spot_async.backends.shared.settings import StudentServerSettings
from spot_async.base.processes import ray_shell
from spot_async.base.processes.ray_helper import Request, not_placed, refused
from spot_async.config import ClusterConfig, Config, ModelConfig, resources_of
from spot_async.errors import ConfigError, FarSideError, ProcessDiedError
from spot_async.running.ray_places import placed, placed_nodes, with_places
from spot_async.trainer.nodes.topology import Topology, topology


def models():
    both = [{"python": "p", "resources": {"GPU": 2}, "tensor_parallel_size": 2}, {"python": "p"}]
    return {
        "student": ModelConfig(
            model="m", backend=LocalSettings(replicas=2, launch={"python": "p", "resources": {"CPU": 1}})
        ),
        "teacher": ModelConfig(model="m", backend=StudentServerSettings(kind="vllm", launch=both)),
        "reference": ModelConfig(model="m", backend=LocalSettings()),
    }


def test_each_server_with_resources_is_asked_for_and_gets_the_prefix_and_address_of_its_place(tmp_path):
    asked = resources_of(models())
    assert asked == {"student-1": {"CPU": 1}, "student-2": {"CPU": 1}, "teacher-1": {"GPU": 2}}
    found = with_places(models(), dict(zip(asked, ["10.0.0.1", "10.0.0.2", "10.0.0.3"], strict=True)), tmp_path)
    launches = {
        each.server_name(role): each.launch for role, model in found.items() for each in model.backend.servers()
    }
    assert [*launches] == ["student-1", "student-2", "teacher-1", "teacher-2", "reference"]
    assert [launches[name].host for name in asked] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert [launches[name].prefix[-2:] for name in asked] == [[str(tmp_path), place] for place in "012"]
    assert not launches["teacher-2"].is_elsewhere
    assert launches["reference"] is None


@pytest.mark.parametrize(
    ("settings", "keys", "expected"),
    [
        (LaunchSettings, {"prefix": ["ssh"]}, "prefix: Ray chooses the node"),
        (LaunchSettings, {"host": "10.0.0.1"}, "host: Ray chooses the node"),
        (LaunchSettings, {"devices": "0"}, "devices: Ray chooses the devices"),
        (LaunchSettings, {"tensor_parallel_size": 2, "resources": {"GPU": 1}}, r"set resources\.GPU to that"),
        (
            LaunchSettings,
            {"tensor_parallel_size": 2},
            "without GPU Ray hides .*: add GPU: 2, or for",
        ),
        (
            LocalSettings,
            {"device": "cuda"},
            "resources: without GPU Ray hides .*: add GPU: 1, or",
        ),
        (ClusterConfig, {"kind": "ray", "nodes": 2}, "nodes=2: with kind=ray say in resources what each but this one"),
        (ClusterConfig, {"kind": "ray", "node_rank": 1}, "node_rank: with kind=ray this machine is node 0"),
        (ClusterConfig, {"nodes": 2, "resources": {"GPU": 8}}, "resources: needs kind=ray, and nodes=2 or more"),
    ],
)
def test_keys_that_contradict_each_other_are_named(settings, keys, expected):
    launch = {"python": "p", "resources": {"CPU": 1}}
    base = launch if settings is LaunchSettings else {"launch": launch} if settings is LocalSettings else {}
    with pytest.raises(ValueError, match=expected):
        settings(**{**base, **keys})


def test_a_server_that_ray_places_may_be_on_the_cpu():
    launch = {"python": "p", "resources": {"CPU": 1}}
    LaunchSettings(**launch, environment={"CUDA_VISIBLE_DEVICES": ""})
    LocalSettings(launch=launch)


def test_resources_and_the_cluster_s_kind_need_each_other():
    tree = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    placed_student = tree["student"] | {"backend": {"launch": {"resources": {"CPU": 1}}}}
    with pytest.raises(ValueError, match=r"launch\.resources of student: needs cluster\.kind=ray"):
        Config.model_validate(tree | {"student": placed_student})
    with pytest.raises(ValueError, match=r"cluster\.kind=ray: give the servers to place launch\.resources, or cluster"):
        Config.model_validate(tree | {"cluster": {"kind": "ray"}})
    Config.model_validate(tree | {"student": placed_student, "cluster": {"kind": "ray"}})
    Config.model_validate(tree | {"cluster": {"kind": "ray", "nodes": 2, "resources": {"GPU": 1}}})


def test_under_ray_a_scheduler_s_variables_do_not_spread_the_trainer():
    environ = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "10.0.0.1", "PET_MASTER_PORT": "29500"}
    assert topology(environ, ClusterConfig()) is not None
    assert topology(environ, ClusterConfig(kind="ray", address="10.0.0.9:6379")) is None


def test_with_nodes_that_ray_places_this_is_node_0_and_the_cluster_s_head_says_where_they_meet():
    cluster = ClusterConfig(kind="ray", nodes=3, resources={"GPU": 8})
    assert [*cluster.placed_nodes] == [1, 2]
    with pytest.raises(ConfigError, match=r"cluster\.address: say HOST:PORT of Ray's head"):
        topology({}, cluster)
    for environ, given in ({"RAY_ADDRESS": "10.0.0.9:6379"}, None), ({"RAY_ADDRESS": "x:1"}, "10.0.0.9:6379"):
        found = topology(environ, cluster.model_copy(update={"address": given}))
        assert (found.nodes, found.node_rank, found.address, found.source) == (3, 0, "10.0.0.9", "Ray")


def test_what_cannot_be_placed_is_told_with_what_is_asked_what_nodes_have_and_what_is_free():
    request = Request("auto", {"student": {"GPU": 1, "CPU": 2}}, 30.0, {"trainer node 1": {"GPU": 8}})
    nodes = {"10.0.0.1": {"CPU": 4.0, "memory": 1e9, "node:10.0.0.1": 1.0, "GPU": 1.0}}
    assert not_placed(request, "NO_RESOURCES", nodes, {"CPU": 3.0, "object_store_memory": 7.0}) == (
        "cluster: Ray could not place all within cluster.join_timeout_s=30: not enough of it is free: asked: "
        "student {CPU: 2, GPU: 1}; trainer node 1 {GPU: 8}: nodes: 10.0.0.1 {CPU: 4, GPU: 1}: free in all: {CPU: 3}"
    )
    assert "no node has what one of them takes" in not_placed(request, "INFEASIBLE", nodes, {})


def test_a_cluster_of_another_version_and_one_that_is_not_there_are_one_line_each():
    other = (
        "Version mismatch: The cluster was started with:\n    Ray: 2.59.0\n    Python: 3.11.7\nThis process on node "
        "10.0.0.1 was started with:\n    Ray: 2.60.0\n    Python: 3.11.8\n"
    )
    assert refused("auto", other) == (
        "cluster.address=auto: the cluster has Ray 2.59.0 and Python 3.11.7, here are Ray 2.60.0 and Python 3.11.8: "
        "install the same here"
    )
    assert refused("auto", "Version mismatch:\n told\n otherwise").endswith(
        "versions here: Version mismatch: told otherwise"
    )
    assert refused("h:1", "Could not\nconnect").startswith("cluster.address=h:1: no Ray cluster that this machine is")


def test_the_prefix_hands_over_its_descriptors_and_exits_with_what_it_is_told(tmp_path):
    path = str(tmp_path / "shells")
    with socket.socket(socket.AF_UNIX) as helper:
        helper.bind(path)
        helper.listen()
        command = [sys.executable, "-I", "-S", ray_shell.__file__, path, "3", "sh"]

        def shell():
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )

        with shell() as told, helper.accept()[0] as connection:
            place, (given, output, errors), _, _ = socket.recv_fds(connection, 16, 3)
            os.write(output, b"said there")
            for each in (given, output, errors):
                os.close(each)
            connection.send(b"137")
            assert (place, told.communicate(timeout=10)[0], told.wait()) == (b"3", "said there", 137)
        with shell() as lost:
            helper.accept()[0].close()
            assert lost.communicate(timeout=10)[1] == "error: the process that speaks to Ray has ended\n"
            assert lost.wait() == ray_shell.UNREACHED


def test_what_a_place_lacks_is_told_of_ray_s_node_without_the_prefix_that_leads_there(tmp_path):
    there = with_places(models(), {"student-1": "10.0.0.1"}, tmp_path)["student"].backend.servers()[0].launch
    with pytest.raises(FarSideError) as caught:
        there.far_side.ask("", [])
    assert str(caught.value) == (
        "launch.resources: Ray's node 10.0.0.1 reached no shell: exit code 255: error: the process that speaks to Ray "
        "has ended"
    )


class JoinedStandIn:
    """All that a placed node asks of node 0."""

    def __init__(self, *, have_begun):
        self.topology, self.have_begun = Topology(2, 0, "10.0.0.1", 29600, "run", "Ray", 9.0), have_begun


async def test_a_placed_node_that_ends_is_started_again_but_ends_the_run_if_it_never_began(tmp_path, monkeypatch):
    said = "import sys; sys.exit(f'error: node {sys.argv[1]} has no torch')"
    monkeypatch.setattr(placed_nodes_module, "PAUSE_S", 0.0)
    monkeypatch.setattr(
        placed_nodes_module, "agent_command", lambda topology: [sys.executable, "-c", said, str(topology.node_rank)]
    )

    def nodes(*, have_begun):
        (tmp_path / "logs").mkdir(exist_ok=True)
        return placed_nodes(JoinedStandIn(have_begun=have_begun), {1: ["env"]}, tmp_path)

    log = tmp_path / "logs" / "node-1.log"
    async with asyncio.timeout(30):
        with pytest.raises(ExceptionGroup) as caught:
            async with nodes(have_begun=False):
                await asyncio.Event().wait()
        assert caught.group_contains(ProcessDiedError, match="node-1 .* exited with code 1: error: node 1 has no torch")
        async with nodes(have_begun=True):
            while log.read_text().count("node 1 has no torch") < 3:  # noqa: ASYNC110 - other processes write it
                await asyncio.sleep(0.02)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
async def test_a_machine_without_ray_is_told_what_to_install(tmp_path):
    with pytest.raises(ConfigError, match=r"ray is not installed here \(pip install ray"):
        async with placed(models(), ClusterConfig(kind="ray"), tmp_path):
            pass
