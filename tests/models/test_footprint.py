"""Sizes of models and memory of devices, against numbers worked out by hand from public configurations."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from spot_async.base.processes.gpus import operations_per_s
from spot_async.config import LoraConfig, SamplingConfig, TrainingConfig
from spot_async.models.footprint import ASLEEP_GIB, GIB, MachineMemory, ServerOnDevice, per_device, trainer_memory
from spot_async.models.model_size import size_of, training_operations

QWEN3 = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}
ROOT = Path(__file__).parents[2]
LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256}


def shape(base, layers, hidden, feed_forward, heads, tied):
    return size_of(
        base
        | {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": feed_forward,
            "num_attention_heads": heads,
            "tie_word_embeddings": tied,
        }
    )


QWEN3_06B = shape(QWEN3, 28, 1024, 3072, 16, True)


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        # config.json of Qwen/Qwen3-0.6B-Base. Embedding: 151,936 x 1,024. Each of 28 layers: 2,097,152 for queries, as
        # much for outputs, 1,048,576 each for keys and values, 3 x 3,145,728 feed-forward, 2 x 1,024 + 2 x 128 norms.
        # The last norm: 1,024.
        (QWEN3_06B, 155_582_464 + 28 * 15_730_944 + 1_024),
        (shape(QWEN3, 28, 2048, 6144, 16, True), 1_720_574_976),  # Qwen3-1.7B-Base
        (shape(QWEN3, 36, 2560, 9728, 32, True), 4_022_468_096),  # Qwen3-4B-Base
        (shape(QWEN3, 36, 4096, 12288, 32, False), 8_190_735_360),  # Qwen3-8B
        (shape(LLAMA, 28, 3072, 8192, 24, True), 3_212_749_824),  # Llama-3.2-3B-Instruct
        (shape(LLAMA, 32, 4096, 14336, 32, False), 8_030_261_248),  # Llama-3.1-8B-Instruct
    ],
)
def test_parameters_follow_from_the_configuration(size, parameters):
    assert size.parameters == parameters


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "mistral"])
def test_parameters_are_those_of_the_model_itself(name, random_architecture):
    from safetensors import safe_open

    directory = random_architecture(name)
    config = json.loads((directory / "config.json").read_text())
    with safe_open(directory / "model.safetensors", "pt") as file:
        count = sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118 - no mapping
    assert size_of(config).parameters == count


def test_what_is_not_known_is_not_sized(random_architecture):
    for name in ("gpt2", "mixtral", "llama"):  # this llama has biases
        assert size_of(json.loads((random_architecture(name) / "config.json").read_text())) is None


def test_cache_and_activations_of_a_token():
    assert QWEN3_06B.cache_bytes_per_token == 28 * 2 * 1024 * 2 == 114_688
    autocast = QWEN3_06B.activation_bytes_per_token("autocast")
    assert autocast == 28 * (26 * 1024 + 8 * 3072 + 10 * 3072) == 2_293_760
    layer = 16 * 1024 + 8 * 3072 + 10 * 3072
    assert QWEN3_06B.activation_bytes_per_token("bfloat16") == 28 * layer
    assert QWEN3_06B.activation_bytes_per_token("bfloat16", recomputed_layers=28) == 28 * 2 * 1024 + layer
    assert QWEN3_06B.activation_bytes_per_token("bfloat16", recomputed_layers=8) == 8 * 2 * 1024 + 21 * layer


@pytest.mark.parametrize("documents", [(257,), (101, 156)], ids=["padded", "packed"])
@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
def test_activations_are_what_autograd_keeps(precision, documents):
    """Between two depths of a small model, so that what is not in layers falls out."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from spot_async.trainer.packing import Documents, attend_per_document

    is_packed = len(documents) > 1
    packed = {"position_ids": torch.cat([torch.arange(each) for each in documents])[None]}
    packed |= {"documents": Documents(documents)}
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 32, "vocab_size": 64, "tie_word_embeddings": True}  # fmt: skip
    tokens = sum(documents)  # no width of the model

    def kept(layers: int) -> int:
        model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=layers, **sizes)).train()
        if is_packed:
            attend_per_document(model)
        if precision == "bfloat16":
            for parameter in model.parameters():  # and not the tables of positions
                parameter.data = parameter.data.bfloat16()
        found = {}

        def pack(tensor):
            if {tokens, *documents} & set(tensor.shape):  # not weights, nor their copies in bfloat16
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast")
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), autocast:
            ids = torch.zeros((1, tokens), dtype=torch.long)
            model.base_model(input_ids=ids, use_cache=False, **(packed if is_packed else {}))
        return sum(size for size, _ in found.values())

    small = shape(QWEN3 | {"head_dim": 32, "num_key_value_heads": 2, "vocab_size": 64}, 1, 64, 192, 4, True)
    expected = small.activation_bytes_per_token(precision, is_packed=is_packed)
    assert (kept(3) - kept(1)) / 2 / tokens == pytest.approx(expected, rel=0.02)


def rank_of(size, *, longest_tokens=1_000, shards=None, copies=0, **keys):
    """Return what a rank keeps whose rows are padded, in bfloat16 unless told otherwise."""
    ranks = {} if shards is None else {"ranks": shards, "sharding": "fsdp2"}
    given = {"dtype": "bfloat16", "packing": False, "micro_batch_tokens": longest_tokens} | ranks | keys
    training = TrainingConfig(iterations=1, batch_size=12, mini_batch_size=12, **given)
    return trainer_memory(size, training, longest_tokens=longest_tokens, copies=copies)


def test_a_rank_keeps_sixteen_bytes_a_parameter_and_one_sequence_at_least():
    memory = rank_of(QWEN3_06B, micro_batch_tokens=16_384, longest_tokens=5_120)
    assert memory.weights == memory.gradients == pytest.approx(596_049_920 * 4 / 2**30)
    assert memory.optimiser == 2 * memory.weights
    assert memory.copies == memory.weights / 2
    assert rank_of(QWEN3_06B, copies=2).optimiser == 4 * memory.weights  # of two teachers that follow
    assert memory.activations == pytest.approx(35.0)  # 16,384 x 2,293,760 bytes
    alone = rank_of(QWEN3_06B, micro_batch_tokens=1_000, longest_tokens=5_120, dtype="float32")
    assert alone.activations == pytest.approx(5_120 * 3_440_640 / GIB)  # 28 x (24 x 1,024 + 16 x 3,072 + 16 x 3,072)
    assert alone.copies == 0


def server_on(role, device, size, *, memory_fraction, sleeps):
    """Return a server's part of a device of 80 GiB, which it has to itself."""
    taken = 2 * size.parameters / GIB + 3  # context, graphs, activations
    return ServerOnDevice(role, role, device, 80.0, memory_fraction, taken, size.cache_bytes_on(1), sleeps=sleeps)


def test_a_server_that_sleeps_makes_room_and_one_that_does_not_takes_it():
    rank = rank_of(QWEN3_06B, micro_batch_tokens=16_384, longest_tokens=5_120)
    student = server_on("student", 0, QWEN3_06B, memory_fraction=0.4, sleeps=True)
    teacher = server_on("teacher", 1, QWEN3_06B, memory_fraction=0.9, sleeps=False)
    assert student.cache_gib == pytest.approx(32 - 2 * 596_049_920 / 2**30 - 3)  # context, graphs, activations
    first, second = per_device([student, teacher], rank, 1)
    assert first.sampling == pytest.approx(32 + rank.resting)
    assert first.training == pytest.approx(0.8 + 1.2 + rank.training)  # its context and graphs stay
    assert second.sampling == second.training == pytest.approx(72)
    assert first.fits
    awake = server_on("student", 0, QWEN3_06B, memory_fraction=0.4, sleeps=False)
    assert not per_device([awake], rank, 1)[0].fits


@pytest.mark.parametrize("binding", ["activations", "cache", "context"])
def test_the_longest_response_is_the_last_that_fits(binding):
    training = TrainingConfig(iterations=1, batch_size=32, dtype="bfloat16", micro_batch_tokens=1_024)
    share = 0.06 if binding == "cache" else 0.4
    server = server_on("student", 0, QWEN3_06B, memory_fraction=share, sleeps=True)
    context = 8_192 if binding == "context" else 1_000_000
    sampling = SamplingConfig(max_prompt_tokens=1_024)
    machine = MachineMemory(
        student=QWEN3_06B, training=training, sampling=sampling, context_tokens=context, servers=[server], ranks=1
    )
    found = machine.longest_response(80.0)

    def fits(response):
        rank = trainer_memory(QWEN3_06B, training, longest_tokens=1_024 + response)
        return per_device([server], rank, 1)[0].fits, server.cache_tokens >= 1_024 + response

    assert fits(found) == (True, True)
    beyond = {"activations": (False, True), "cache": (True, False), "context": (True, True)}
    assert fits(found + 1) == beyond[binding]
    assert (found == 8_192 - 1_024) == (binding == "context")


@pytest.mark.parametrize(
    "size", [shape(QWEN3, 36, 2560, 9728, 32, True), shape(LLAMA, 28, 3072, 8192, 24, True)], ids=["4B", "Llama"]
)
def test_the_students_of_4b_and_of_llama_fit_only_when_they_are_sharded(size):
    def devices(**choices):
        rank = rank_of(size, longest_tokens=5_120, **choices)
        server = server_on("student", 0, size, memory_fraction=0.4, sleeps=True)
        return per_device([server], rank, 1)

    assert not devices()[0].fits
    assert not devices(recompute_layers=True)[0].fits
    assert devices(shards=3)[0].fits


def test_a_sharded_rank_keeps_its_part_and_what_it_gathers():
    rank = rank_of(QWEN3_06B, shards=4, recompute_layers=True)
    assert rank.weights == rank.gradients == rank.optimiser / 2 == pytest.approx(596_049_920 / 2**30)
    # In bfloat16 embedding with last norm, and two layers; their gradients (one layer's), and those in float32.
    outer, layer = 155_583_488, 15_730_944
    assert rank.copies == pytest.approx((8 * outer + 10 * layer) / 2**30)
    assert rank.activations == pytest.approx(1_000 * (28 * 2 * 1_024 + 71_680) / 2**30)


def test_what_is_offloaded_is_in_the_cpus_memory_and_not_on_the_device():
    def rank(**choices):
        return rank_of(QWEN3_06B, shards=4, **choices)

    plain, optimizer, everything = (rank(offload=kind) for kind in ("none", "optimizer", "all"))
    assert (optimizer.weights, optimizer.gradients, optimizer.optimiser) == (plain.weights, plain.gradients, 0)
    assert (plain.on_cpu, optimizer.on_cpu) == (0, plain.optimiser)
    assert everything.weights == everything.gradients == everything.optimiser == 0
    assert everything.on_cpu == pytest.approx(4 * 596_049_920 / 2**30)
    for each in (optimizer, everything):
        assert each.training == pytest.approx(plain.training - each.on_cpu)


def test_with_lora_a_rank_holds_frozen_weights_in_their_type_and_sixteen_bytes_for_each_number_that_is_trained():
    # 28 layers: q and o 1,024 + 2,048, k and v 1,024 + 1,024, three of 1,024 + 3,072, each 16 times.
    adapters = 28 * 16 * (2 * 3_072 + 2 * 2_048 + 3 * 4_096)
    memory = rank_of(QWEN3_06B, lora=LoraConfig(rank=16))
    assert memory.weights == pytest.approx((2 * 596_049_920 + 4 * adapters) / 2**30)
    assert memory.gradients == memory.optimiser / 2 == pytest.approx(4 * adapters / 2**30)
    assert memory.copies == pytest.approx(2 * adapters / 2**30)
    attention = rank_of(QWEN3_06B, dtype="float32", lora=LoraConfig(rank=16, targets="attention"))
    assert attention.weights == pytest.approx((4 * 596_049_920 + 4 * 28 * 16 * 10_240) / 2**30)
    assert attention.copies == 0
    sharded = rank_of(QWEN3_06B, shards=4, lora=LoraConfig(rank=16))
    assert sharded.weights == pytest.approx(memory.weights / 4)
    outer, layer = 155_583_488, 15_730_944
    assert sharded.copies == pytest.approx((2 * outer + 4 * layer + 6 * adapters / 28) / 2**30)


def test_the_benchmark_on_a_gpu_trains_and_shows_the_estimate_of_the_same_settings(tmp_path, monkeypatch):
    """A GPU is rarely at hand: its worker, with a tiny shape on the CPU."""
    import torch

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark, models = (importlib.import_module(name) for name in ("gpu_training", "qwen3_models"))
    monkeypatch.setattr(models, "SHAPES", {"0.6b": (32, 48, 2, 4, 2, True)})
    for module in (benchmark, models):
        monkeypatch.setattr(module, "VOCABULARY", 101)
    save = models.save_qwen3
    monkeypatch.setattr(benchmark, "save_qwen3", lambda size, directory, device: save(size, directory, "cpu"))
    monkeypatch.setattr(benchmark, "matrix_rate", lambda device: 1e12)
    small = {"TRAJECTORIES": 4, "PROMPT_TOKENS": 5, "RESPONSE_TOKENS": (8, 20), "MICRO_BATCH_TOKENS": {"0.6b": 60}}
    for name, value in small.items():
        monkeypatch.setattr(benchmark, name, value)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # which the worker sets
    choices = {"sharding": "fsdp2", "recompute_layers": True}
    found = benchmark.train_once("0.6b", choices, tmp_path)
    size = size_of(json.loads((tmp_path / "0.6b" / "config.json").read_bytes()))
    expected = rank_of(size, micro_batch_tokens=60, longest_tokens=25, shards=1, recompute_layers=True, packing="auto")
    assert found["estimate_gib"] == expected.training
    samples = benchmark.trajectories(1, "0.6b", 4)
    lengths = [len(each.prompt_ids) + len(each.response_ids) - 1 for each in samples]
    rows = sum(len(each.response_ids) for each in samples)
    operations = training_operations(size, lengths, rows)  # as `perf/mfu` counts
    assert found["bound_s"] == pytest.approx(operations / 1e12)
    assert found["loss"] != 0


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("A100-SXM4-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA A800-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_devices_rate_is_known_by_its_whole_name_or_not_at_all(name, rate):
    assert operations_per_s(name) == rate


@pytest.mark.parametrize("sleeps", [False, True])
def test_of_servers_that_share_a_gpu_one_is_awake(sleeps):
    shares = {"math": 0.6, "code": 0.5}
    servers = [ServerOnDevice(name, name, 0, 80.0, share, 10.0, 1.0, sleeps, True) for name, share in shares.items()]
    servers.append(ServerOnDevice("student", "student", 0, 80.0, 0.2, 10.0, 1.0, False))
    trainer = trainer_memory(QWEN3_06B, TrainingConfig(iterations=1, batch_size=32), longest_tokens=1_000)
    (device,) = per_device(servers, trainer, 1)
    assert device.sampling == pytest.approx(0.6 * 80 + ASLEEP_GIB + 0.2 * 80 + trainer.resting)
    training = 2 * ASLEEP_GIB if sleeps else 0.6 * 80 + ASLEEP_GIB
    assert device.training == pytest.approx(training + 0.2 * 80 + trainer.training)
