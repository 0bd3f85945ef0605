"""Adapters against a dense float64 reference that adds B A to its weights, and what the trainer publishes of them."""

from __future__ import annotations

import errno
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from makers import DenseLoss, MakeModel, MakeSettings, MakeTrainer, MixedBatch
from rank_groups import SAVED_AT, Group, job, save, train_in_groups
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from spot_async.config import LoraConfig, TrainingConfig
from spot_async.errors import ConfigError, TrainerError
from spot_async.models.adapter_files import check_lora, layers_of
from spot_async.models.footprint import Parameters
from spot_async.models.weight_files import has_weights
from spot_async.trainer.checkpoint import load_checkpoint
from spot_async.trainer.lora import AdaptedLinear, layer_shapes
from spot_async.trainer.messages import Batch
from spot_async.trainer.rank import StudentTrainer

LORA = {"rank": 4, "alpha": 8.0}
VOCAB = 50
ALL_LAYERS = 14  # seven in each of two


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(trainer: StudentTrainer) -> dict[str, torch.nn.Parameter]:
    return {name: each for name, each in trainer.model.named_parameters() if each.requires_grad}


@pytest.fixture
def moved_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters do not begin with B = 0, where A has no gradient."""
    begin = AdaptedLinear.__init__

    def begin_moved(self: AdaptedLinear, frozen: Any, rank: int, scale: float, generator: torch.Generator) -> None:
        begin(self, frozen, rank, scale, generator)
        torch.nn.init.normal_(self.lora_B, std=0.1, generator=generator)

    monkeypatch.setattr(AdaptedLinear, "__init__", begin_moved)


class Reference(torch.nn.Module):
    """A plain float64 model with `W + scale B A` in place of some weights."""

    def __init__(self, student: Path, adapters: dict[str, torch.Tensor], scale: float) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float64).eval()
        self.adapters = {name: each.double().requires_grad_() for name, each in adapters.items()}
        self.scale = scale

    def forward(self, ids: torch.Tensor) -> Any:
        weights = {}
        for name in {each.rpartition(".")[0] for each in self.adapters}:
            delta = self.scale * self.adapters[f"{name}.lora_B"] @ self.adapters[f"{name}.lora_A"]
            weights[f"{name}.weight"] = self.model.get_parameter(f"{name}.weight").detach() + delta
        return functional_call(self.model, weights, (ids,))


@pytest.mark.parametrize(
    ("lora", "training", "scale", "adapted"),
    [
        ({}, {}, 2.0, ALL_LAYERS),
        ({"targets": "attention", "alpha": 16.0}, {"reference_kl": 0.1}, 4.0, 8),
        ({"targets": "mlp"}, {"recompute_layers": True, "micro_batch_tokens": 40}, 2.0, 6),
        ({}, {"sharding": "fsdp2", "recompute_layers": True, "micro_batch_tokens": 80}, 2.0, ALL_LAYERS),
        pytest.param({}, {"compile": True}, 2.0, ALL_LAYERS, marks=[pytest.mark.long, pytest.mark.nightly]),
    ],
    ids=["all", "attention, another alpha", "mlp, recomputed layers", "sharded, recomputed layers", "compiled"],
)
@pytest.mark.usefixtures("moved_adapters")
def test_loss_and_gradients_of_adapters_equal_a_dense_float64_reference(
    student: Path,
    student_trainer: MakeTrainer,
    mixed_batch: MixedBatch,
    dense_loss: DenseLoss,
    lora: dict[str, Any],
    training: dict[str, Any],
    scale: float,
    adapted: int,
) -> None:
    choices = {"max_grad_norm": 1e9, "lora": {**LORA, **lora}, **training}
    trainer = student_trainer(**choices)
    adapters = {name: whole(each) for name, each in trained(trainer).items()}
    assert len(adapters) == 2 * adapted
    batch = mixed_batch()
    reference = Reference(student, adapters, scale)
    expected = dense_loss(reference, batch, TrainingConfig(iterations=10, **choices), 1.0)
    expected.backward()
    metrics = trainer.train(Batch(0, tuple(batch))).metrics

    norm = math.sqrt(sum(float(each.grad.square().sum()) for each in reference.adapters.values()))
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, parameter in trainer.model.named_parameters():
        if name in adapters:
            gradient = whole(parameter.grad).double()
            torch.testing.assert_close(gradient, reference.adapters[name].grad, rtol=1e-4, atol=2e-6 * norm)
        else:
            assert parameter.grad is None


def test_an_adapter_that_is_not_finite_is_not_published(student_trainer: MakeTrainer, mixed_batch: MixedBatch) -> None:
    trainer = student_trainer(lora=LORA)
    first = Path(trainer.train(Batch(0, tuple(mixed_batch()))).snapshot.directory)
    with torch.no_grad():
        next(iter(trained(trainer).values())).fill_(math.nan)
    with pytest.raises(TrainerError, match="not finite"):
        trainer._publisher.publish(trainer.model, 2)
    assert list(first.parent.iterdir()) == [first]


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_what_is_published_is_merged_and_has_the_adapter_beside_it(
    random_model: MakeModel, make_trainer: MakeTrainer, mixed_batch: MixedBatch, tmp_path: Path, sharding: str
) -> None:
    # With 0.3, as elsewhere, rounding the weights to float32 alone makes 3e-6 nats, however they were merged.
    student = random_model(initializer_range=0.1)
    trainer = make_trainer(student, tmp_path, sharding=sharding, lora=LORA, learning_rate=1e-2)
    for iteration in range(3):
        report = trainer.train(Batch(iteration, tuple(mixed_batch())))
    published = Path(report.snapshot.directory)
    assert all(each.stat().st_mode & 0o444 == 0o444 for each in published.rglob("*"))
    ids = torch.arange(VOCAB)[None]
    # In float64, so that what differs is the merge and not the forward passes.
    merged = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float64).eval()
    base = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float64).eval()
    assert merged.state_dict().keys() == base.state_dict().keys()
    adapters = {name: whole(each).double() for name, each in trained(trainer).items()}
    with torch.no_grad():
        expected = Reference(student, adapters, 2.0)(ids).logits.log_softmax(-1)
        found = merged(ids).logits.log_softmax(-1)
        before = base(ids).logits.log_softmax(-1)
    assert (found - before).abs().max() > 0.1
    assert (found - expected).abs().max() < 2e-6

    peft = pytest.importorskip("peft")
    with torch.no_grad():
        beside = peft.PeftModel.from_pretrained(base, published / "adapter")(ids).logits.log_softmax(-1)
    assert (beside - found).abs().max() < 2e-6


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_most_steps_publish_the_adapter_alone_and_those_of_a_checkpoint_are_made_whole(
    student: Path, student_trainer: MakeTrainer, mixed_batch: MixedBatch, tmp_path: Path, sharding: str
) -> None:
    choices = {"sharding": sharding, "lora": LORA, "iterations": 6, "learning_rate": 1e-2}
    whole_ones = student_trainer("whole", **choices, keep_weights=9)
    trainer = student_trainer("alone", **choices, merged_every=0)
    saved = threading.Semaphore(0)
    for iteration in range(6):
        for each in (whole_ones, trainer):
            each.train(Batch(iteration, tuple(mixed_batch())))
        if iteration in (0, 2):
            trainer.begin_to_save(tmp_path / f"checkpoint-{iteration}", lambda seconds, failure: saved.release())
            assert saved.acquire(timeout=60)
    published = tmp_path / "alone" / "weights"
    # The last two steps, and the last two whole ones: `student` may still point to the first of them.
    assert sorted(each.name for each in published.iterdir()) == ["step-000003", "step-000005", "step-000006"]
    assert [has_weights(each) for each in sorted(published.iterdir())] == [True, False, True]
    for file in (tmp_path / "whole/weights").glob("step-00000[356]/**/*"):
        own = published / file.relative_to(tmp_path / "whole/weights")
        if file.is_file() and (own.exists() or "step-000005" not in str(own)):
            assert own.read_bytes() == file.read_bytes(), own
            assert own.stat().st_mode == file.stat().st_mode
    alone = sum(each.stat().st_size for each in (published / "step-000005").rglob("*.safetensors"))
    assert alone == (published / "step-000006/adapter/adapter_model.safetensors").stat().st_size


def test_a_full_disk_while_a_step_is_made_whole_leaves_its_adapter(
    student_trainer: MakeTrainer, mixed_batch: MixedBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = student_trainer(lora=LORA, merged_every=0)
    published = Path(trainer.train(Batch(0, tuple(mixed_batch()))).snapshot.directory)
    before = sorted(each.name for each in published.rglob("*"))

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("spot_async.trainer.streaming.write_tensors", full)
        with pytest.raises(TrainerError, match=r"cannot publish weights to .*step-000001: No space left on device"):
            trainer.begin_to_save(tmp_path / "checkpoint", lambda seconds, failure: None)
    assert sorted(each.name for each in published.rglob("*")) == before
    assert list(published.parent.iterdir()) == [published]
    assert not has_weights(published)


def test_an_adapter_is_written_as_servers_read_it(
    student: Path, student_trainer: MakeTrainer, mixed_batch: MixedBatch
) -> None:
    lora = {**LORA, "alpha": 16.0, "targets": "attention"}
    report = student_trainer(lora=lora, dtype="bfloat16").train(Batch(0, tuple(mixed_batch())))
    adapter = Path(report.snapshot.directory) / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 16.0, False)
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"].shape == (4, 32)
    assert len(tensors) == 16
    assert {each.dtype for each in tensors.values()} == {torch.float32}  # of a student in bfloat16
    assert {each.dtype for each in AutoModelForCausalLM.from_pretrained(adapter.parent).parameters()} == {
        torch.bfloat16
    }


def test_bfloat16_holds_frozen_matrices_in_bfloat16_and_trains_adapters_in_float32(
    student_trainer: MakeTrainer, mixed_batch: MixedBatch
) -> None:
    gradients = []
    for name, choices in (("exact", {}), ("none", {"dtype": "bfloat16"}), ("fsdp2", {"dtype": "bfloat16"})):
        sharding = "fsdp2" if name == "fsdp2" else "none"
        trainer = student_trainer(name, lora=LORA, sharding=sharding, **choices)
        trainer.train(Batch(0, tuple(mixed_batch())))
        gradients.append(torch.cat([whole(each.grad).flatten() for each in trained(trainer).values()]))
        assert {each.dtype for each in trained(trainer).values()} == {torch.float32}
        frozen = {each.dtype for each in trainer.model.parameters() if not each.requires_grad and each.ndim > 1}
        assert frozen == {torch.bfloat16 if choices else torch.float32}
    exact, *others = gradients
    assert all(0 < (each - exact).norm() < 0.1 * exact.norm() for each in others)


def test_adapters_resume_bit_for_bit_from_what_is_trained_alone(
    student: Path, student_trainer: MakeTrainer, mixed_batch: MixedBatch, tmp_path: Path
) -> None:
    def train(trainer: StudentTrainer, until: int) -> None:
        for iteration in range(trainer.step, until):
            trainer.train(Batch(iteration, tuple(mixed_batch())))

    choices = {"lora": LORA, "mini_batch_size": 2, "iterations": 4}
    straight = student_trainer("straight", **choices)
    train(straight, 2)
    assert save(straight, tmp_path / "tensors") == ""
    (file,) = (tmp_path / "tensors").iterdir()
    others = {name for name in load_file(file) if "lora_" not in name}
    assert len(others) == 2 + torch.cuda.is_available()  # the step and the random states
    numbers = sum(each.numel() for each in trained(straight).values())
    assert Parameters.of(student, LoraConfig(**LORA)).checkpoint_bytes() == 12 * numbers
    resumed = student_trainer("resumed", **choices)
    load_checkpoint(tmp_path / "tensors", 2, resumed.model, resumed._optimizer, resumed._strategy)
    resumed.step = 2
    for trainer in (straight, resumed):
        train(trainer, 4)
    for name, parameter in straight.model.named_parameters():
        assert torch.equal(parameter, resumed.model.get_parameter(name)), name
    plain = student_trainer("plain", iterations=4)
    with pytest.raises(TrainerError, match=r"cannot load checkpoint .*: tensor parameter\.model\S+ is missing"):
        load_checkpoint(tmp_path / "tensors", 2, plain.model, plain._optimizer, plain._strategy)


def test_a_student_without_the_layers_names_those_that_it_has(
    random_architecture: MakeModel, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    for targets in ("mlp", "all"):
        with pytest.raises(ConfigError) as failure:
            make_trainer(random_architecture("mixtral"), tmp_path, lora={"targets": targets})
        assert str(failure.value) == (
            f"training.lora.targets={targets}: MixtralForCausalLM has no layer gate_proj, up_proj, down_proj that "
            "takes an adapter (experts of mixtures take none); its linear layers: k_proj, o_proj, q_proj, v_proj"
        )


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama", "mistral", "mixtral", "qwen3_moe"])
def test_files_and_trainer_agree_on_the_layers_that_get_an_adapter(
    name: str, random_architecture: MakeModel, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    directory = random_architecture(name)
    targets = "attention" if name in ("mixtral", "qwen3_moe") else "all"
    lora = LoraConfig.model_validate({**LORA, "targets": targets})
    check_lora(directory, lora)
    trainer = make_trainer(directory, tmp_path, lora=lora.model_dump())
    assert layers_of(directory, lora) == layer_shapes(trainer.model)
    if targets == "attention":
        with pytest.raises(ConfigError, match=r"all: .* has no layer gate_proj, up_proj, down_proj that takes"):
            check_lora(directory, LoraConfig.model_validate(LORA))


@pytest.mark.long
def test_ranks_sharding_and_packing_change_no_adapter_and_a_checkpoint_of_any_goes_on(
    student: Path, trainer_settings: MakeSettings, mixed_batch: MixedBatch, tmp_path: Path
) -> None:
    """On 4 ranks some have no branch positions, and a rank has no part of some adapters."""

    def run(name: str, sharding: str, resumes: str = "") -> Group:
        settings = trainer_settings(
            student,
            tmp_path / name,
            sharding=sharding,
            lora={**LORA, "rank": 3},
            packing=not name.startswith("padded"),
            recompute_layers=sharding == "fsdp2",
            mini_batch_size=4,
            iterations=4,
        )
        return Group(int(name.split()[-1]), [job(settings, until=3, saves_at=SAVED_AT, resumes=resumes)])

    names = {f"{sharding} {ranks}": sharding for ranks in (1, 2, 4) for sharding in ("none", "fsdp2")}
    names["padded 4"] = "none"
    groups = [run(name, sharding) for name, sharding in names.items()]
    groups += [run("resumed 1", "none", "none 1"), run("sharded after 2", "fsdp2", "none 1")]
    train_in_groups(tmp_path, [Batch(iteration, tuple(mixed_batch())) for iteration in range(3)], groups)

    def adapter(name: str) -> dict[str, torch.Tensor]:
        return load_file(tmp_path / name / "weights" / "step-000003" / "adapter" / "adapter_model.safetensors")

    expected = adapter("none 1")
    said = {name: json.loads((tmp_path / name / "metrics.json").read_text()) for name in names}
    for name in [*names, "sharded after 2"]:
        for tensor, found in adapter(name).items():
            torch.testing.assert_close(found, expected[tensor], rtol=0, atol=1e-6)
    for name in names:
        for found, metrics in zip(said[name], said["none 1"], strict=True):
            for each in ("loss", "grad_norm"):
                assert found[each] == pytest.approx(metrics[each], rel=1e-5, abs=1e-7)
    assert all(torch.equal(found, expected[tensor]) for tensor, found in adapter("resumed 1").items())
