"""Servers that Ray places: what is asked of it, what becomes of its answer, and what is said of its refusals."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys

import pytest
import yaml
from kill_drill import ROOT

from spot_async.backends.local.server import LocalSettings
from spot_async.backends.shared.launch import LaunchSettings
from spot_async.backends.shared.remote import RemoteSettings
from spot_async.base.processes import ray_shell
from spot_async.base.processes.ray_messages import Request, not_placed, refused
from spot_async.config import ClusterConfig, Config, ModelConfig, resources_of
from spot_async.errors import ConfigError
from spot_async.running.ray_places import placed, with_places
from spot_async.trainer.nodes.topology import topology


def models():
    both = [{"python": "p", "resources": {"GPU": 2}, "tensor_parallel_size": 2}, {"python": "p"}]
    return {
        "student": ModelConfig(
            model="m", backend=LocalSettings(replicas=2, launch={"python": "p", "resources": {"CPU": 1}})
        ),
        "teacher": ModelConfig(model="m", backend=RemoteSettings(kind="vllm", launch=both)),
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
        (ClusterConfig, {"kind": "ray", "nodes": 2}, "nodes: with kind=ray the trainer is on one machine"),
    ],
)
def test_keys_that_contradict_each_other_are_named(settings, keys, expected):
    base = {"python": "p", "resources": {"CPU": 1}} if settings is LaunchSettings else {}
    with pytest.raises(ValueError, match=expected):
        settings(**{**base, **keys})


def test_resources_and_the_cluster_s_kind_need_each_other():
    tree = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    placed_student = tree["student"] | {"backend": {"launch": {"resources": {"CPU": 1}}}}
    with pytest.raises(ValueError, match=r"launch\.resources of student: needs cluster\.kind=ray"):
        Config.model_validate(tree | {"student": placed_student})
    with pytest.raises(ValueError, match=r"cluster\.kind=ray: give the servers to place launch\.resources"):
        Config.model_validate(tree | {"cluster": {"kind": "ray"}})
    Config.model_validate(tree | {"student": placed_student, "cluster": {"kind": "ray"}})


def test_under_ray_a_scheduler_s_variables_do_not_spread_the_trainer():
    environ = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "10.0.0.1", "PET_MASTER_PORT": "29500"}
    assert topology(environ, ClusterConfig()) is not None
    assert topology(environ, ClusterConfig(kind="ray", address="10.0.0.9:6379")) is None


def test_what_cannot_be_placed_is_told_with_what_is_asked_what_nodes_have_and_what_is_free():
    request = Request("auto", {"student": {"GPU": 1, "CPU": 2}}, 30.0)
    nodes = {"10.0.0.1": {"CPU": 4.0, "memory": 1e9, "node:10.0.0.1": 1.0, "GPU": 1.0}}
    assert not_placed(request, "NO_RESOURCES", nodes, {"CPU": 3.0, "object_store_memory": 7.0}) == (
        "cluster: Ray could not place the servers within cluster.start_timeout_s=30: not enough of it is free: asked: "
        "student {CPU: 2, GPU: 1}: nodes: 10.0.0.1 {CPU: 4, GPU: 1}: free in all: {CPU: 3}"
    )
    assert "no node has what a server takes" in not_placed(request, "INFEASIBLE", nodes, {})


def test_a_cluster_of_another_version_and_one_that_is_not_there_are_one_line_each():
    other = "Version mismatch: The cluster was started with:\n    Ray: 2.59.0\n    Python: 3.11.7\nThis process ..."
    assert refused("auto", other) == (
        "cluster.address=auto: install the cluster's versions here: Version mismatch: The cluster was started with: "
        "Ray: 2.59.0 Python: 3.11.7 This process ..."
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


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
async def test_a_machine_without_ray_is_told_what_to_install(tmp_path):
    with pytest.raises(ConfigError, match=r"ray is not installed here: install spot-async\[ray\]"):
        async with placed(models(), ClusterConfig(kind="ray"), tmp_path):
            pass
