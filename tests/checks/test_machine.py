"""What a machine lacks for a run is a line of its own before anything starts."""

from __future__ import annotations

import shutil
import sys

import pytest
from command import arguments, assert_refused, invoke
from small_runs import EXAMPLE, NAMED

from spot_async.base.processes.gpus import GpuSoftware, gpu_count, physical_gpus, visible_gpus
from spot_async.checks.device_shares import on_named_devices
from spot_async.checks.machine import (
    Machine,
    gpu_need,
    placement_words,
    training_warnings,
    trains_on_gpus,
    without_gpu,
)
from spot_async.config.loading import config_from
from spot_async.errors import ConfigError
from spot_async.trainer.nodes.topology import left_alone
from spot_async.trainer.parallel import rank_device
from spot_async.trainer.settings import expected_attention

RUN = {**NAMED, "training": {"iterations": 1}}
NO_GPU = Machine(gpus=0, visible=0, torch_has_gpus=False, cores=2)
TWO_GPUS = Machine(gpus=2, visible=2, torch_has_gpus=True, cores=16)


def warned(machine, *overrides, nodes=1):
    config = config_from(RUN, overrides)
    served = {"student": config.student, "teacher": config.teacher}
    return training_warnings(config, served, machine, nodes=nodes)


LAUNCH = "teacher.backend={kind: vllm, launch: {python: p, devices: '%s'}}"
NCCL = "student.backend={kind: vllm, url: 'http://127.0.0.1:1', weights: {transport: distributed, device: %s}}"


OFFLOADED = "training={iterations: 1, sharding: fsdp2, offload: all, ranks: 2}"


@pytest.mark.parametrize(
    ("machine", "override", "said"),
    [
        (NO_GPU, LAUNCH % "1", "teacher.backend.launch.devices names GPU 1, but this machine has no GPU"),
        (TWO_GPUS, LAUNCH % "1,2", "teacher.backend.launch.devices names GPU 2, but this machine has 2 GPUs, 0 to 1"),
        (NO_GPU, "student.backend={kind: local, device: 'cuda:0'}", "student.backend.device names GPU 0, but"),
        (TWO_GPUS, "student.backend={kind: local, device: 'cuda:5'}", "student.backend.device names GPU 5, but"),
        (NO_GPU, NCCL % "cuda:1", "student.backend.weights.device=cuda:1 is a GPU, but this machine has no GPU"),
        (NO_GPU, "training.ranks=9", "training.ranks=9 with training.threads=1: the trainer's 9 threads share 2 cores"),
        (NO_GPU, "training.threads=3", "training.ranks=1 with training.threads=3: the trainer's 3 threads share 2"),
        (TWO_GPUS, "training.ranks=9", "training.ranks=9 needs as many GPUs, but only 2 of this machine are visible"),
        (TWO_GPUS, "training.sharding=fsdp2", "training.sharding=fsdp2 shards nothing over one rank"),
        (
            TWO_GPUS,
            OFFLOADED,
            "training.offload=all steps AdamW on the CPU, with training.threads=1: set training.threa"
            "ds=8, the cores of this machine for each of 2 ranks",
        ),
        (Machine(2, 2, False, 16), "run.seed=1", "this machine has 2 GPUs, but the torch installed here was built"),
    ],
)
def test_what_the_machine_lacks_is_one_line(machine, override, said):
    (line,) = warned(machine, override)
    assert said in line


@pytest.mark.parametrize(
    ("machine", "override"),
    [
        (TWO_GPUS, LAUNCH % "0,1"),
        (TWO_GPUS, LAUNCH % "GPU-8f3c"),  # a name, which CUDA alone can look up
        (NO_GPU, "teacher.backend={kind: vllm, launch: {python: p, devices: '7', prefix: [ssh, h], host: h}}"),
        (NO_GPU, "teacher.backend={kind: vllm, url: 'http://h:1'}"),
        (NO_GPU, NCCL % "cpu"),
        (NO_GPU, "training.ranks=2"),
        (TWO_GPUS, "training.ranks=2"),
        (TWO_GPUS, OFFLOADED.replace("ranks: 2", "ranks: 2, threads: 4")),
        (Machine(None, None, True, 2), "training.ranks=8"),  # nobody knows
        (NO_GPU, "training={iterations: 1, sharding: fsdp2, offload: all}"),
    ],
)
def test_what_it_has_or_nobody_knows_is_no_line(machine, override):
    assert warned(machine, override) == []


@pytest.mark.parametrize(
    ("override", "need"),
    [
        (LAUNCH % "0", "teacher.backend.launch.devices names GPU 0"),
        (LAUNCH % "GPU-8f3c", "teacher.backend.launch.devices names GPU GPU-8f3c"),
        ("student.backend={kind: local, device: 'cuda:0'}", "student.backend.device names GPU 0"),
        ("training.dtype=bfloat16", "training.dtype=bfloat16"),
        ("training.device=cuda", "training.device=cuda"),
    ],
)
def test_the_cpu_is_refused_to_a_trainer_that_needs_a_gpu(override, need, monkeypatch):
    software = GpuSoftware("2.13.0", "CUDA 13.0", "570.86.15", "2.29.7", has_varlen=True)
    monkeypatch.setattr(GpuSoftware, "found", lambda: software)
    config = config_from(RUN, [override])
    served = {"student": config.student, "teacher": config.teacher}
    for machine in (NO_GPU, Machine(2, 2, False, 16), Machine(2, 0, True, 16)):
        assert without_gpu(config.training, served, machine) == (
            f"{need}, but torch finds no GPU for the trainer (torch 2.13.0, CUDA 13.0, NVIDIA driver 570.86.15, NCCL "
            "2.29.7): CUDA 13.0 needs driver 580 or newer: update it, or install a torch "
            "for an older CUDA, or set training.device=cpu"
        )
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # the ranks see what files cannot tell
    with pytest.raises(ConfigError, match=f"{need}, but torch finds no GPU .*driver 570"):
        rank_device(config.training.device, gpu_need(config.training, served))
    assert without_gpu(config.training, served, TWO_GPUS) is None
    allowed = config.training.model_copy(update={"device": "cpu"})
    assert gpu_need(allowed, served) is None
    assert without_gpu(allowed, served, NO_GPU) is None


def test_a_trainer_that_needs_none_computes_on_the_cpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_need(config_from(RUN).training, {}) is None
    assert rank_device("auto", None).type == "cpu"


def test_training_on_the_cpu_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(Machine, "found", lambda _: NO_GPU)
    run = arguments(tmp_path / "run", "training.dtype=bfloat16")
    assert_refused(invoke(monkeypatch, *run), "training.dtype=bfloat16, but torch finds no GPU", "training.device=cpu")
    dry = invoke(monkeypatch, *run, "--dry-run", "--brief")
    assert dry.exit_code == 0
    assert "warning: training.dtype=bfloat16, but torch finds no GPU" in dry.output
    assert "devices   ranks on the CPU" in dry.output
    assert "software  torch " in dry.output
    assert "attention sdpa, one call for each document" in dry.output


def test_devices_count_among_those_that_the_command_was_given(monkeypatch):
    assert physical_gpus("0,1", {}) == "0,1"
    assert physical_gpus("0, 3", {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) == "4,7"
    assert physical_gpus("1,GPU-8f3c", {"CUDA_VISIBLE_DEVICES": "GPU-a, MIG-b"}) == "MIG-b,GPU-8f3c"
    for value, left in (("4,5", "2, counted from 0"), ("", "none")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        config = config_from(RUN, [LAUNCH % "4"])
        with pytest.raises(ConfigError, match=f"launch.devices=4 names GPU 4, but .*={value} of .* leaves it {left}"):
            config.teacher.backend.servers()[0].launch.model_copy(update={"python": sys.executable}).check_machine(
                "teacher.backend.launch"
            )


def test_a_dry_run_shows_physical_devices():
    config = config_from(RUN, [LAUNCH % "3", "training.ranks=2"])
    served = {"student": config.student, "teacher": config.teacher}
    machine = Machine(8, 4, True, 16, ["4", "5", "6", "7"])
    assert placement_words(config.training, served, machine, 1) == (
        "ranks on GPU 0 (4), 1 (5); teacher on GPU 3 (7); in brackets CUDA_VISIBLE_DEVICES of this command"
    )
    assert placement_words(config.training, served, NO_GPU, 1) == "ranks on the CPU; teacher on GPU 3"


def test_instances_of_mig_train_by_one_rank_alone(monkeypatch):
    config = config_from(RUN, ["training.ranks=2"])
    said = "training.ranks=2: the GPU is divided by MIG, where a process sees one instance and NCCL connects none: set "
    divided = Machine(8, 2, True, 16, ["MIG-a", "MIG-b"])
    assert without_gpu(config.training, {}, divided).startswith(said)
    (line,) = training_warnings(config, {}, divided)
    assert line.startswith(said)
    for alike in ({"ranks": 1}, {"device": "cpu"}):
        assert without_gpu(config.training.model_copy(update=alike), {}, divided) is None
    assert without_gpu(config.training, {}, Machine(2, 2, True, 16, ["GPU-a", "GPU-b"])) is None
    # Without the variable only the device itself tells.
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    with pytest.raises(ConfigError, match=r"training\.ranks=2: the GPU is divided by MIG"):
        rank_device()


def test_a_server_over_several_instances_of_mig_is_refused(tmp_path, monkeypatch):
    launch = "teacher.backend={kind: vllm, launch: {python: p, devices: 'MIG-a,MIG-b', %s: 2}}"
    refused = invoke(monkeypatch, *arguments(tmp_path / "run", launch % "tensor_parallel_size"))
    assert_refused(refused, "tensor_parallel_size=2: a process sees one instance of MIG: set it to 1")
    assert len(config_from(RUN, [launch % "replicas"]).teacher.backend.servers()) == 2  # one on each


def test_a_server_whose_memory_the_estimate_does_not_know_is_said(monkeypatch):
    said = "is in no estimate, and sizes its cache by itself: the memory of MIG-a is not known; number its devices"
    config = config_from(RUN, [LAUNCH % "MIG-a"])
    (line,) = on_named_devices({"student": config.student, "teacher": config.teacher})
    assert line.startswith(f"teacher {said}")
    assert not [*on_named_devices({"teacher": config_from(RUN, [LAUNCH % "0,1"]).teacher})]
    assert not [*on_named_devices({"teacher": config_from(RUN).teacher})]


PADDED = "training={iterations: 1, dtype: bfloat16, packing: false}"
ONCE, EACH = "torch's varlen_attn (flash kernels), one call for a row of documents", "sdpa, one call for each document"


@pytest.mark.parametrize(
    ("machine", "override", "varlen", "expected"),
    [
        (TWO_GPUS, "training.dtype=bfloat16", True, f"{ONCE}; {EACH}, if a trial of it fails"),
        (TWO_GPUS, "training.dtype=bfloat16", False, EACH),
        (TWO_GPUS, "run.seed=1", True, EACH),
        (NO_GPU, "training.dtype=bfloat16", True, EACH),
        (TWO_GPUS, PADDED, True, "sdpa, rows padded to one length"),
    ],
)
def test_the_kernels_of_attention_are_said_before_there_is_a_rank(machine, override, varlen, expected):
    training = config_from(RUN, [override]).training
    assert expected_attention(training, on_gpus=trains_on_gpus(training, machine), has_varlen=varlen) == expected


def test_the_driver_is_read_from_its_file(tmp_path):
    path = tmp_path / "version"
    for line in ("NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu", "Open Kernel Module for x86_64  535.129.03  Rel"):
        path.write_text(f"NVRM version: {line} 2023\nGCC version: 12\n")
        assert GpuSoftware.found(path).driver == "535.129.03"
    assert GpuSoftware.found(tmp_path / "none").driver is None


def test_a_reference_that_is_the_student_is_not_told_of_twice():
    config = config_from(RUN, ["student.backend={kind: local, device: 'cuda:0'}"])
    (line,) = training_warnings(config, {"student": config.student, "reference": config.student}, NO_GPU)
    assert line.startswith("student.backend.device")


def test_ranks_are_those_of_one_node():
    assert warned(TWO_GPUS, "training.ranks=4", nodes=2) == []
    (line,) = warned(TWO_GPUS, "training.ranks=6", nodes=2)
    assert line.startswith("training.ranks=6 on 2 nodes needs")


def test_gpus_are_counted_by_their_devices(tmp_path):
    assert gpu_count(tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpu_count(tmp_path) == 2
    assert visible_gpus({}, 2) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}, 2) == 1
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, 2) == 0
    (tmp_path / "kfd").touch()
    assert gpu_count(tmp_path) is None


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}, "Slurm gave this job 3 nodes, but without srun"),
        ({"SLURM_NNODES": "2"}, "Slurm gave this job 2 nodes"),
        ({"JOB_COMPLETION_INDEX": "0"}, "each pod of this indexed job begins a run of its own"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun started 4 processes"),
    ],
)
def test_a_scheduler_s_other_nodes_are_not_forgotten_in_silence(variables, said):
    cluster = config_from(RUN).cluster
    assert said in left_alone(variables, cluster)
    assert left_alone(variables, cluster.model_copy(update={"nodes": 1})) is None


def test_srun_and_jobs_of_one_node_are_taken_at_their_word():
    cluster = config_from(RUN).cluster
    assert left_alone({"SLURM_JOB_NUM_NODES": "3", "SLURM_STEP_NUM_NODES": "1"}, cluster) is None
    assert left_alone({"SLURM_JOB_NUM_NODES": "1"}, cluster) is None


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_a_model_without_weights_is_told_by_a_dry_run_and_refused_by_a_run(role, tmp_path, monkeypatch):
    model = shutil.copytree(EXAMPLE / role, tmp_path / "model")
    (model / "model.safetensors").unlink()
    run = arguments(tmp_path / "run", f"{role}.model={model}")
    dry = invoke(monkeypatch, *run, "--dry-run", "--brief")
    assert dry.exit_code == 0
    assert f"warning: {role}.model: {model}: holds neither model.safetensors nor" in dry.output
    assert_refused(invoke(monkeypatch, *run), f"{role}.model: {model}: holds neither", "put its weights there")
    assert not (tmp_path / "run").exists()
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    assert_refused(invoke(monkeypatch, *run), f"{role}.model: {model} lacks one.safetensors, which its index names")


def test_an_evaluation_says_it_too(tmp_path, monkeypatch):
    model = shutil.copytree(EXAMPLE / "student", tmp_path / "model")
    (model / "model.safetensors").unlink()
    command = ["eval", "configs/quickstart.yaml", f"student.model={model}", f"run.directory={tmp_path / 'run'}"]
    assert "warning: student.model:" in invoke(monkeypatch, *command, "--dry-run").output
    assert_refused(invoke(monkeypatch, *command), "student.model:", "holds neither")


def test_a_device_that_is_named_twice_is_refused(tmp_path, monkeypatch):
    override = "teacher.backend={kind: vllm, launch: {python: p, devices: '0,0'}}"
    assert_refused(invoke(monkeypatch, *arguments(tmp_path / "run", override)), "devices=0,0 names 0 twice")
