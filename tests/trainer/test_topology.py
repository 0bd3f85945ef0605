"""Which node of how many this is, from what schedulers tell their jobs. Each table names where it is documented."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from spot_async.config import ClusterConfig
from spot_async.errors import ConfigError
from spot_async.trainer.nodes.topology import first_host, topology

# torchrun reads each option `--x-y` from PET_X_Y (torch 2.13, torch/distributed/argparse_util.py). These are set by the
# torch plugin of Kubeflow Trainer (commit 06b555d, pkg/constants/constants.go and the plugin's torch.go). The address
# is node 0's in the JobSet of the TrainJob `spot`.
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "spot-node-0-0.spot",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "1",
}
# What torchrun tells its processes: torch 2.13, torch/distributed/run.py, "Environment Variables".
TORCHRUN = {
    "LOCAL_RANK": "0",
    "RANK": "1",
    "GROUP_RANK": "1",
    "ROLE_RANK": "1",
    "LOCAL_WORLD_SIZE": "1",
    "WORLD_SIZE": "2",
    "ROLE_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "job-7",
}
# SkyPilot 0.9.3, docs "Distributed Multi-Node Jobs" and "Secrets and Environment Variables". 0.14.1 has the same names
# (sky/skylet/constants.py).
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2025-07-01-12-00-00-000000_spot-cluster_1",
}
# What a task of `srun -N3` has: Slurm 22.05.8, man srun, "OUTPUT ENVIRONMENT VARIABLES", and seen with that version.
# HOSTNAME is the batch node's.
SLURM = {
    "HOSTNAME": "node1",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "4",
    "SLURM_JOB_NODELIST": "node[1-4]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "node[2-4]",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}
ONE_TASK = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}
# A batch script is on the first node of its job and no step: man sbatch, "OUTPUT ENVIRONMENT VARIABLES", and seen.
BATCH_SCRIPT = {"SLURM_JOB_ID": "1234567", "SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "node[1-4]", "SLURM_NODEID": "0"}
# Kubernetes, Job of batch/v1 with completionMode Indexed (stable since 1.24): nothing else is set. Below a JobSet the
# address is <jobset>-<replicated job>-<job>-<index>.<jobset>: kubernetes-sigs/jobset, commit 88837d6,
# site/static/examples/pytorch/cnn-mnist/mnist.yaml.
INDEXED_JOB = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "spot-1"}
JOBSET_KEYS = {"nodes": 4, "address": "spot-workers-0-0.spot"}


def which(environ: Mapping[str, str], **keys: Any) -> tuple[int, int, str, int, str] | None:
    found = topology(environ, ClusterConfig(**keys))
    return found and (found.nodes, found.node_rank, found.address, found.port, found.run_id)


@pytest.mark.parametrize(
    ("environ", "keys", "expected"),
    [
        pytest.param(KUBEFLOW, {}, (2, 1, "spot-node-0-0.spot", 29500, "spot-async"), id="Kubeflow"),
        pytest.param(TORCHRUN, {}, (2, 1, "10.0.0.1", 29600, "job-7"), id="torchrun"),
        pytest.param(SKYPILOT, {}, (2, 1, "10.0.0.1", 29600, SKYPILOT["SKYPILOT_TASK_ID"]), id="SkyPilot"),
        pytest.param(SLURM, {}, (3, 2, "node2", 30567, "slurm-1234567.0"), id="srun"),
        pytest.param(INDEXED_JOB, JOBSET_KEYS, (4, 1, "spot-workers-0-0.spot", 29600, "spot-async"), id="JobSet"),
        pytest.param(
            INDEXED_JOB, {"nodes": 2, "address": "spot-0.spot"}, (2, 1, "spot-0.spot", 29600, "spot-async"), id="Job"
        ),
        pytest.param(
            {},
            {"nodes": 2, "node_rank": 0, "address": "a", "port": 5},
            (2, 0, "a", 5, "spot-async"),
            id="keys alone",
        ),
        pytest.param(
            SLURM,
            {"address": "10.0.0.2", "port": 4000},
            (3, 2, "10.0.0.2", 4000, "slurm-1234567.0"),
            id="keys come before the scheduler",
        ),
        pytest.param(SLURM, {"nodes": 1}, None, id="one node wanted"),
        pytest.param({}, {}, None, id="no scheduler"),
        pytest.param(BATCH_SCRIPT, {}, None, id="a batch script"),
        pytest.param(SLURM | ONE_TASK, {}, None, id="a step of one node"),
        pytest.param(INDEXED_JOB, {}, None, id="an indexed job of runs of their own"),
        pytest.param(SKYPILOT | {"SKYPILOT_NUM_NODES": "1"}, {}, None, id="SkyPilot with one node"),
    ],
)
def test_the_node_is_what_configuration_and_scheduler_say(environ, keys, expected):
    assert which(environ, **keys) == expected


@pytest.mark.parametrize(
    ("environ", "keys", "message"),
    [
        (KUBEFLOW | {"PET_NNODES": "2:4"}, {}, "PET_NNODES=2:4: the number of nodes cannot change"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, {}, "torchrun started 8 processes on this node: give it --nproc-per-n"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "24"}, {}, "srun started 24 tasks on 3 nodes: start one on each"),
        (
            SLURM | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "8"},
            {},
            "srun started 8 tasks on one node, which each begin the run: start one, by --ntasks-per-node=1",
        ),
        (SLURM | {"SLURM_NODEID": "a"}, {}, "SLURM_NODEID=a in the environment is no number"),
        (SLURM, {"nodes": 2}, r"cluster.nodes=2, but this is node 2 \(Slurm\)"),
        ({}, {"nodes": 2, "address": "a"}, "cluster.node_rank: say which of the 2 nodes this is, 0 to 1"),
        (INDEXED_JOB, {"nodes": 2}, "cluster.address: say how the 2 nodes reach node 0"),
    ],
)
def test_half_an_answer_is_one_clear_line(environ, keys, message):
    with pytest.raises(ConfigError, match=message) as caught:
        which(environ, **keys)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node03,login1", "node03"),
        ("node[03-05,8],login1", "node03"),
        ("rack[1-2]node[7,9]", "rack1node7"),
        ("gpu[9].example", "gpu9.example"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list_of_slurm(nodes, first):
    assert first_host(nodes) == first
