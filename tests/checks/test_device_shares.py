"""Shares of a GPU: what the servers' caches get, and what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spot_async.backends.sglang import SglangBackend
from spot_async.backends.sglang.process import sglang_command
from spot_async.backends.sglang.sglang_discovery import check_cache
from spot_async.backends.sglang.weights import ServerInfo
from spot_async.backends.shared.launch import Doorway
from spot_async.backends.shared.launch_settings import LaunchSettings
from spot_async.backends.vllm import VllmBackend
from spot_async.base.processes.gpus import GpuMemory, read_gpu_memory
from spot_async.checks import device_shares
from spot_async.checks.device_shares import (
    added_start_s,
    check_room,
    device_gib,
    servers_on_devices,
    shared_out,
    starting_order,
    taking_turns,
    weight_bytes,
)
from spot_async.config import ClusterConfig, ModelConfig, ServingConfig
from spot_async.errors import ConfigError
from spot_async.models.footprint import GIB, WORKSPACE_GIB
from spot_async.models.model_size import read_size

QWEN3_17B = {
    "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936, "hidden_size": 2048,
    "num_hidden_layers": 28, "intermediate_size": 6144, "num_attention_heads": 16, "tie_word_embeddings": True,
}  # fmt: skip
WEIGHTS_GIB = 2 * 1_720_574_976 / GIB


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_17B))
    return tmp_path


@pytest.fixture
def gpus(monkeypatch):
    """Say what this machine's GPUs are."""

    def have(**found: tuple[float, ...]) -> None:
        memory = {int(name.removeprefix("gpu")): GpuMemory(*each) for name, each in found.items()}
        monkeypatch.setattr(device_shares, "gpu_memory", lambda: memory)

    have()
    return have


def served(model: Path, *, backend=VllmBackend, kind="vllm", **launches) -> dict[str, ModelConfig]:
    return {
        role: ModelConfig(model=str(model), backend=backend.Settings(kind=kind, launch=launch))
        for role, launch in launches.items()
    }


def launch(**settings) -> LaunchSettings:
    return LaunchSettings(python="python", **settings)


def caches(models: dict[str, ModelConfig]) -> list[float | None]:
    return [each.launch.cache_gib for model in models.values() for each in model.backend.servers()]


def test_a_cache_is_what_weights_and_workspace_leave_of_the_share(model, gpus):
    one = served(model, student=launch(devices="0", memory_fraction=0.4))
    assert caches(shared_out(one, ClusterConfig())) == pytest.approx([32 - WEIGHTS_GIB - WORKSPACE_GIB])
    two = served(model, student=launch(devices="0,1", tensor_parallel_size=2, memory_fraction=0.4))
    assert caches(shared_out(two, ClusterConfig())) == pytest.approx([32 - WEIGHTS_GIB / 2 - WORKSPACE_GIB])
    many = served(model, student=launch(replicas=3, memory_fraction=0.4))
    assert caches(shared_out(many, ClusterConfig())) == pytest.approx([32 - WEIGHTS_GIB - WORKSPACE_GIB] * 3)


@pytest.mark.parametrize(
    "settings",
    [{"devices": "0"}, {"memory_fraction": 0.4}, {"devices": "MIG-1", "memory_fraction": 0.4},
     {"devices": "0", "memory_fraction": 0.4, "prefix": ["ssh", "other"]}],
    ids=["no share", "no devices", "no numbers", "elsewhere"],
)  # fmt: skip
def test_a_server_whose_share_is_not_known_here_measures_its_cache_itself(settings, model, gpus):
    assert caches(shared_out(served(model, student=launch(**settings)), ClusterConfig())) == [None]


def test_a_cache_that_is_stated_stays_and_counts_for_the_device(model, gpus):
    models = shared_out(served(model, student=launch(devices="0", cache_gib=5.0, memory_fraction=0.9)), ClusterConfig())
    assert caches(models) == [5.0]
    (server,) = servers_on_devices(models, 80.0)
    assert server.gib == pytest.approx(5.0 + WEIGHTS_GIB + WORKSPACE_GIB)


def test_an_instance_of_mig_has_the_memory_that_is_stated(model, gpus, monkeypatch):
    models = served(model, student=launch(devices="0", memory_fraction=0.9))

    def refused() -> None:
        with pytest.raises(
            ConfigError, match=r"^cluster\.device_gib: the GPU is divided by MIG, and nobody here knows"
        ):
            shared_out(models, ClusterConfig())

    gpus(gpu0=(79.6, 79.0, True))  # what nvidia-smi says is of the whole
    refused()
    gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a")
    refused()
    assert caches(shared_out(models, ClusterConfig(device_gib=10))) == pytest.approx([9 - WEIGHTS_GIB - WORKSPACE_GIB])


def test_the_size_of_a_device_is_what_it_is_here_unless_less_is_stated(model, gpus):
    def size(**cluster):
        return device_gib(ClusterConfig(**cluster), served(model, student=launch(devices="1,2")))

    assert size() == 80.0
    gpus(gpu0=(23.7, 20.0), gpu1=(139.7, 139.0), gpu2=(79.6, 20.0))  # nothing of ours is on the first
    assert size() == 79.6
    assert size(device_gib=40) == 40
    assert size(device_gib=80) == 79.6  # as such cards are sold
    with pytest.raises(ConfigError, match=r"^cluster\.device_gib=141: this machine's GPUs have 79\.6 GiB: remove the"):
        size(device_gib=141)


def test_shares_that_cannot_be_are_refused_in_one_line_with_both_sides(model, gpus):
    with pytest.raises(ConfigError) as refused:
        shared_out(served(model, student=launch(devices="0", memory_fraction=0.05)), ClusterConfig())
    assert str(refused.value) == (
        "student.backend.launch.memory_fraction=0.05 is 4.0 of 80.0 GiB, and the server's weights and workspace take "
        "6.2: give it more than 0.08, or more devices (tensor_parallel_size)"
    )
    for shares in ((0.6, 0.5), (0.6, None)):
        first, second = (launch(devices="0", **({} if each is None else {"memory_fraction": each})) for each in shares)
        with pytest.raises(ConfigError) as refused:
            shared_out(served(model, student=first, teacher=second), ClusterConfig())
        assert str(refused.value) == (
            "teacher.backend.launch.memory_fraction: student and teacher share GPU 0: give each its own devices, or "
            "each a memory_fraction, with a sum of at most 1"
        )


def test_servers_that_share_a_gpu_may_each_have_most_of_a_device(model, gpus):
    def shares_time(student: float, first: float, second: float) -> dict[str, ModelConfig]:
        shares = {"student": student, "math": first, "code": second}
        models = served(model, **{role: launch(devices="0", memory_fraction=share) for role, share in shares.items()})
        sleeps = {"sleep_while_others_answer": True}
        return {
            role: each
            if role == "student"
            else each.model_copy(update={"backend": each.backend.model_copy(update=sleeps)})
            for role, each in models.items()
        }

    models = shared_out(shares_time(0.2, 0.7, 0.6), ClusterConfig())
    gpus(gpu0=(80.0, 75.0))  # 16 of the student, 56 of the one that is awake, 2 of the other
    check_room(servers_on_devices(models, 80.0))
    gpus(gpu0=(80.0, 73.0))
    with pytest.raises(ConfigError, match=r"student, math, code take 74\.0 GiB of GPU 0, and 73\.0 of its 80\.0 GiB"):
        check_room(servers_on_devices(models, 80.0))
    with pytest.raises(
        ConfigError, match=r"^code\.backend\.launch\.memory_fraction: student and math and code share GPU 0"
    ):
        shared_out(shares_time(0.4, 0.7, 0.6), ClusterConfig())


def test_a_device_that_others_use_is_refused_before_a_server_finds_out(model, gpus):
    models = served(
        model, student=launch(devices="0", memory_fraction=0.4), teacher=launch(devices="0", memory_fraction=0.3)
    )
    gpus(gpu0=(79.6, 31.2), gpu1=(79.6, 79.0))
    servers = servers_on_devices(shared_out(models, ClusterConfig()), 79.6)
    with pytest.raises(ConfigError) as refused:
        check_room(servers)
    assert str(refused.value) == (
        "student.backend.launch.memory_fraction: student, teacher take 55.7 GiB of GPU 0, and 31.2 of its 79.6 GiB are "
        "free: end what else uses it, or lower memory_fraction"
    )
    gpus(gpu0=(79.6, 60.0))
    check_room(servers)


def test_an_sglang_server_that_found_less_room_than_it_was_to_have_is_refused():
    class Server:
        section = "student.backend"

    check_cache(Server, ServerInfo(max_total_tokens=1000, max_total_num_tokens=992, page_size=16))
    check_cache(Server, ServerInfo(max_total_num_tokens=10))  # it was to measure that itself
    with pytest.raises(ConfigError, match="to have a cache of 1000 tokens, and its devices had room for 984: end what"):
        check_cache(Server, ServerInfo(max_total_tokens=1000, max_total_num_tokens=984, page_size=16))


def test_sglang_is_told_tokens_by_the_heads_that_each_device_has(model, tmp_path):
    def tokens(parallel):
        settings = launch(tensor_parallel_size=parallel, cache_gib=7.0)
        argv = sglang_command(settings, model, Doorway(3000, tmp_path, "secret")).argv
        return int(argv[argv.index("--max-total-tokens") + 1])

    once = 7 * 2**30 // (28 * 2 * 1024 * 2)
    assert [tokens(each) for each in (1, 2, 8, 16)] == [once, 2 * once, 8 * once, 8 * once]  # of 8 heads
    (model / "config.json").write_text('{"model_type": "other"}')
    with pytest.raises(ConfigError, match=r"launch\.cache_gib=7: SGLang counts tokens, and what one takes is"):
        tokens(1)


def test_the_reply_of_nvidia_smi_is_numbered_as_ranks_and_servers_count():
    reply = "0, GPU-a, 81559, 81000, Disabled\n1, GPU-b, 24576, 1024, [N/A]\n2, MIG-c, [N/A], [N/A], [N/A]\n"
    first, second = GpuMemory(81559 / 1024, 81000 / 1024), GpuMemory(24.0, 1.0)
    assert read_gpu_memory(reply, {}) == {0: first, 1: second}
    assert read_gpu_memory(reply, {"CUDA_VISIBLE_DEVICES": "1"}) == {0: second}
    assert read_gpu_memory(reply, {"CUDA_VISIBLE_DEVICES": "GPU-b,0"}) == {0: second, 1: first}
    assert read_gpu_memory("NVIDIA-SMI has failed", {}) == {}
    (divided,) = read_gpu_memory("0, GPU-a, 81559, 81000, Enabled\n", {}).values()
    assert divided.is_divided


def test_who_shares_a_device_starts_in_turn_the_trainer_last(model, gpus):
    models = served(
        model,
        student=[launch(devices="0", memory_fraction=0.3), launch(devices="1", memory_fraction=0.3)],
        teacher=launch(devices="1", memory_fraction=0.3),
    )
    order = starting_order(models, ranks=2)
    assert [*order] == ["student-1", "student-2", "teacher", "trainer"]
    assert taking_turns(order) == [
        "start one after another on device 0: student-1, trainer",
        "start one after another on device 1: student-2, teacher, trainer",
    ]
    patient = {"serving": ServingConfig(recovery_timeout_s=900.0)}
    models["teacher"] = models["teacher"].model_copy(update=patient)
    assert added_start_s(models) == 600.0  # of student-2, before the teacher
    assert taking_turns(starting_order(served(model, student=launch(devices="0")))) == []


def test_a_quantised_model_takes_what_its_files_take(model):
    size = read_size(model)
    assert weight_bytes(model, size) == 2 * size.parameters
    assert weight_bytes(model, size, "float32") == 4 * size.parameters
    (model / "config.json").write_text(json.dumps(QWEN3_17B | {"quantization_config": {"quant_method": "fp8"}}))
    assert weight_bytes(model, size) == 2 * size.parameters  # its weights are not here
    (model / "model.safetensors").write_bytes(b"x" * 1_234_567)
    assert weight_bytes(model, size) == 1_234_567


def test_sglang_and_vllm_servers_are_shared_out_alike(model, gpus):
    one = served(model, backend=SglangBackend, kind="sglang", student=launch(devices="0", memory_fraction=0.4))
    assert caches(shared_out(one, ClusterConfig())) == pytest.approx([32 - WEIGHTS_GIB - WORKSPACE_GIB])
