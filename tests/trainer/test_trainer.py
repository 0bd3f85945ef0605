"""The trainer inside one process: gradients, errors, publishing."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from makers import DenseLoss, MakeModel, MakeSample, MakeTargets, MakeTrainer, MixedBatch
from metrics_page import of_area
from spoiled_gradient import SPOILS, spoiled_loss
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import spot_async.trainer.model as trainer_model
from spot_async.config import TrainingConfig
from spot_async.errors import ConfigError, DataError, TrainerError
from spot_async.models.responses import counted_tokens
from spot_async.terms import written
from spot_async.trainer.loading import new_student
from spot_async.trainer.messages import Batch
from spot_async.trainer.rank import StudentTrainer
from spot_async.types import Pull, WeightVersion

VOCAB = 50
METRICS = of_area("train") - {"loss_entropy"}  # which is of an entropy bonus alone


def gradients(trainer: StudentTrainer) -> dict[str, torch.Tensor]:
    """Of the last update; the optimiser leaves them in place."""
    found = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    return {name: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for name, g in found.items()}


@pytest.mark.parametrize(
    ("training", "temperature", "logits_per_block"),
    [
        ({"loss_aggregation": "sequence_mean"}, 1.0, 1 << 20),
        ({"loss_aggregation": "token_mean", "reference_kl": 0.3, "dual_clip": 1.5}, 0.7, 1 << 20),
        ({"reference_kl": 0.1, "micro_batch_tokens": 40}, 1.0, 7 * VOCAB),
        ({"micro_batch_tokens": 1}, 1.3, VOCAB),
        ({"recompute_layers": True, "micro_batch_tokens": 80}, 1.3, 7 * VOCAB),
        ({"sharding": "fsdp2", "reference_kl": 0.3}, 0.7, 1 << 20),
        ({"sharding": "fsdp2", "recompute_layers": True, "micro_batch_tokens": 80}, 1.0, 7 * VOCAB),
        ({"offload": "optimizer"}, 1.0, 1 << 20),
        ({"sharding": "fsdp2", "offload": "all", "recompute_layers": True}, 1.0, 7 * VOCAB),
        ({"packing": False, "loss_aggregation": "token_mean", "micro_batch_tokens": 40}, 1.0, 7 * VOCAB),
        ({"packing": False, "sharding": "fsdp2", "recompute_layers": 1, "micro_batch_tokens": 80}, 1.0, 1 << 20),
        pytest.param({"compile": True}, 1.0, 1 << 20, marks=pytest.mark.long),
        pytest.param(
            {"compile": True, "sharding": "fsdp2", "recompute_layers": 1, "micro_batch_tokens": 80},
            1.3,
            7 * VOCAB,
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"compile": True, "packing": False, "micro_batch_tokens": 40},
            1.0,
            1 << 20,
            marks=[pytest.mark.long, pytest.mark.nightly],
        ),
    ],
    ids=[
        "defaults",
        "token mean, all terms, temperature",
        "micro-batches of rows in blocks",
        "one at a time",
        "recomputed layers",
        "sharded",
        "sharded, recomputed layers",
        "offloaded optimiser",
        "sharded, all offloaded, recomputed layers",
        "padded",
        "padded, sharded, a recomputed layer",
        "compiled",
        "compiled, sharded, a recomputed layer",
        "compiled, padded",
    ],
)
def test_loss_and_gradients_equal_a_dense_float64_reference(
    student: Path,
    student_trainer: MakeTrainer,
    mixed_batch: MixedBatch,
    dense_loss: DenseLoss,
    monkeypatch: pytest.MonkeyPatch,
    training: dict[str, Any],
    temperature: float,
    logits_per_block: int,
) -> None:
    monkeypatch.setattr(trainer_model, "LOGITS_PER_BLOCK", logits_per_block)
    config = TrainingConfig(iterations=10, max_grad_norm=1e9, **training)
    batch = mixed_batch()
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float64).eval()
    expected_loss = dense_loss(model, batch, config, temperature)
    expected_loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    trainer = student_trainer(temperature=temperature, max_grad_norm=1e9, **training)
    metrics = trainer.train(Batch(0, tuple(batch))).metrics

    assert metrics["loss"] == pytest.approx(expected_loss.item(), rel=1e-5)
    found = gradients(trainer)
    assert found.keys() == expected.keys()
    norm = torch.sqrt(sum((g**2).sum() for g in expected.values())).item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].double(), gradient, rtol=1e-4, atol=2e-6 * norm)


@pytest.mark.parametrize(
    ("name", "sharding"),
    [
        *(("qwen3_5", "none"), ("lfm2", "none"), ("falcon_h1", "fsdp2")),
        *(pytest.param(name, "fsdp2", marks=pytest.mark.long) for name in ("qwen3_5", "lfm2")),
        pytest.param("falcon_h1", "none", marks=pytest.mark.long),
    ],
)
def test_students_with_recurrent_or_convolutional_layers_train_as_a_dense_reference_says(
    random_architecture: MakeModel,
    make_trainer: MakeTrainer,
    supervision: MakeSample,
    dense_loss: DenseLoss,
    tmp_path: Path,
    name: str,
    sharding: str,
) -> None:
    weights = random_architecture(name)
    trainer = make_trainer(weights, tmp_path, max_grad_norm=1e9, sharding=sharding)
    config = TrainingConfig(iterations=10, max_grad_norm=1e9)
    for iteration in range(2):
        batch = [supervision(4 * iteration + i, length) for i, length in enumerate((3, 12, 7, 1))]
        model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float64).eval()
        expected = dense_loss(model, batch, config, 1.0)
        expected.backward()
        norm = torch.sqrt(sum((each.grad**2).sum() for each in model.parameters())).item()
        report = trainer.train(Batch(iteration, tuple(batch)))
        assert report.metrics["loss"] == pytest.approx(expected.item(), rel=1e-4)
        assert report.metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
        weights = Path(report.snapshot.directory)


@pytest.mark.parametrize(("recomputed", "expected"), [(True, [0, 1, 1, 0]), (1, [0, 1, 0])])
@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_recomputed_layers_run_once_more_in_the_backward_pass(
    student_trainer: MakeTrainer, mixed_batch: MixedBatch, sharding: str, recomputed: bool | int, expected: list[int]
) -> None:
    trainer = student_trainer(sharding=sharding, recompute_layers=recomputed)
    layers = trainer.model.base_model.layers
    runs: list[int] = []
    for number, layer in enumerate(layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: runs.append(number))
    trainer.train(Batch(0, tuple(mixed_batch())))
    assert runs == expected


def test_no_soft_targets_and_empty_soft_targets_train_bit_for_bit_alike(
    student_trainer: MakeTrainer, supervision: MakeSample, soft_targets: MakeTargets
) -> None:
    results = []
    for name, targets in (("none", ()), ("empty", (soft_targets([], 4),))):
        trainer = student_trainer(name)
        report = trainer.train(Batch(0, tuple(supervision(i, 4 + i, *targets) for i in range(4))))
        results.append((gradients(trainer), report.metrics))
    (left, left_metrics), (right, right_metrics) = results
    assert all(torch.equal(left[name], right[name]) for name in left)
    untimed = METRICS - {"train_s", "publish_s", "checkpoint_s", "tokens_per_s"} - STALENESS_METRICS
    untimed -= DIVERGENCE_METRICS
    assert {name: left_metrics[name] for name in untimed} == {name: right_metrics[name] for name in untimed}


def test_report_holds_the_documented_metrics(student_trainer: MakeTrainer, mixed_batch: MixedBatch) -> None:
    batch = mixed_batch()
    metrics = student_trainer(mini_batch_size=4).train(Batch(0, tuple(batch))).metrics
    assert metrics.keys() == (METRICS | {"loss_entropy"}) - STALENESS_METRICS - {"checkpoint_s"}
    parts = (metrics[f"loss_{part}"] for part in ("policy", "branch", "reference", "entropy"))
    assert metrics["loss"] == pytest.approx(sum(parts), rel=1e-6)
    assert metrics["loss_entropy"] != 0
    assert metrics["updates"] == 2
    assert metrics["trajectories"] == 8
    assert metrics["tokens"] == sum(counted_tokens(sample).sum() for sample in batch)
    assert metrics["branch_positions"] == 3 + 1 + 0 + 3 + 2 + 5  # a repeated one counts once
    known = [slice(None) if s.policy_mask is None else s.policy_mask for s in batch]
    follow = [(s, mask) for s, mask in zip(batch, known, strict=True) if s.pulls]
    first = [(s.pulls[0].logprobs - s.behavior_logprobs)[mask] for s, mask in follow]
    limited = np.maximum(first[-1], -0.5)  # problem 7 has the same pull twice, with limits, and a reward
    given = batch[5].advantages[known[5]]
    expected = np.concatenate([*first[:-1], 1 + 2 * limited, given]).mean()  # 6 has no policy term
    assert metrics["advantage_mean"] == pytest.approx(expected, rel=1e-5)
    assert metrics["kl_to_teacher"] == pytest.approx(-np.concatenate(first).mean(), rel=1e-5)
    pulls = np.concatenate([*first[:-1], limited, limited])
    assert metrics["pull_mean"] == pytest.approx(pulls.mean(), rel=1e-5)
    assert metrics["pull_clipped"] == pytest.approx(2 * (first[-1] < -0.5).sum() / len(pulls))
    assert 0 < metrics["student_mass"] < 1
    assert 0 < metrics["clipped_cells"] < 1


POLICY_METRICS = {"ratio_mean", "ratio_max", "importance_weight_mean", "importance_capped", "clip_fraction"} | {
    "behavior_kl", "advantage_mean", "kl_to_teacher", "pull_mean", "pull_clipped"}  # fmt: skip
DIVERGENCE_METRICS = {"student_mass", "teacher_mass", "clipped_cells"}
MISMATCH_METRICS = {"mismatch_mean", "mismatch_max", "mismatch_kl"}
STALENESS_METRICS = {"lag_mean", "lag_max", "staleness_mean", "staleness_max", "staleness_kl", "effective_sample_share"}


@pytest.mark.parametrize("behavior", ["served", "recomputed"])
def test_metrics_of_the_policy_term_are_left_out_where_there_is_none(
    student_trainer: MakeTrainer, supervision: MakeSample, soft_targets: MakeTargets, behavior: str
) -> None:
    taught = supervision(1, 6, soft_targets([0, 3], 4), pulls=())
    trainer = student_trainer(behavior=behavior)
    metrics = trainer.train(Batch(0, (taught, taught))).metrics
    without = POLICY_METRICS | MISMATCH_METRICS | STALENESS_METRICS | DIVERGENCE_METRICS | {"checkpoint_s"}
    assert metrics.keys() == METRICS - without
    assert metrics["loss"] == metrics["loss_branch"] > 0


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("behavior_logprobs", np.nan, "non-finite policy loss"),
        ("behavior_logprobs", -np.inf, "non-finite policy loss"),
        ("pulls", np.inf, "non-finite policy loss"),
        ("probabilities", np.nan, "non-finite branch loss"),
        ("reference_logprobs", np.nan, "non-finite reference loss"),
        ("behavior_logprobs", SPOILS, "non-finite gradient"),
    ],
)
def test_non_finite_numbers_stop_training_before_the_step_and_name_their_sample(
    student_trainer: MakeTrainer,
    supervision: MakeSample,
    soft_targets: MakeTargets,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: float,
    what: str,
) -> None:
    if what == "non-finite gradient":
        monkeypatch.setattr("spot_async.trainer.accumulator.clipped_policy_loss", spoiled_loss)
    poisoned = supervision(3, 8, soft_targets([2], 4))
    arrays = {"probabilities": poisoned.soft_targets[0].probabilities[0], "pulls": poisoned.pulls[0].logprobs}
    (arrays[name] if name in arrays else getattr(poisoned, name))[1] = value
    trainer = student_trainer(reference_kl=0.1, mini_batch_size=2)
    before = {key: tensor.clone() for key, tensor in trainer.model.state_dict().items()}
    with pytest.raises(TrainerError) as caught:
        trainer.train(Batch(7, (poisoned, supervision(4, 5))))
    message = str(caught.value)
    assert message.startswith("iteration 8, mini-batch 1 of 1")
    assert f"{what} in sample 'problem-3' (ordinal 3)" in message
    assert "problem-4" not in message
    assert "\n" not in message
    assert all(torch.equal(before[key], tensor) for key, tensor in trainer.model.state_dict().items())
    assert list((tmp_path / "weights").iterdir()) == []


def test_culprits_are_looked_for_with_the_log_probabilities_that_were_trained_on(
    student_trainer: MakeTrainer, supervision: MakeSample
) -> None:
    served_oddly = supervision(3, 8)
    served_oddly.behavior_logprobs[1] = -200.0  # which training on recomputed ones never sees
    culprit = supervision(4, 5)
    culprit.pulls[0].logprobs[2] = np.nan
    trainer = student_trainer(behavior="recomputed", mini_batch_size=2)
    with pytest.raises(TrainerError) as caught:
        trainer.train(Batch(0, (served_oddly, culprit)))
    assert "in sample 'problem-4'" in str(caught.value)
    assert "problem-3" not in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "changes", "complaint"),
    [
        (4, {"pulls": (Pull(logprobs=np.zeros(3, np.float32)),)}, "pulls.logprobs have shape (3,) instead of (4,)"),
        (4, {"reference_logprobs": None}, "reference_kl"),
        (0, {}, "empty"),
        (4, {"soft_targets": (written(np.zeros(5, np.int32)),)}, "positions are not all in 0 to 3"),
        (4, {"soft_targets": (written(np.array([VOCAB], np.int32)),)}, f"token_ids are not all in 0 to {VOCAB - 1}"),
    ],
)
def test_malformed_samples_are_named_before_anything_is_trained(
    student_trainer: MakeTrainer, supervision: MakeSample, tokens: int, changes: dict[str, Any], complaint: str
) -> None:
    trainer = student_trainer(reference_kl=0.1)
    with pytest.raises(TrainerError, match=r"'problem-0' \(ordinal 0\)") as caught:
        trainer.train(Batch(0, (supervision(0, tokens, **changes),)))
    assert complaint in str(caught.value)


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_a_batch_without_samples_moves_neither_weights_nor_optimiser_and_is_published(
    student_trainer: MakeTrainer, mixed_batch: MixedBatch, sharding: str
) -> None:
    def trained(name: str, batches: list[Batch]) -> list[tuple[dict[str, float], bytes]]:
        trainer = student_trainer(name, schedule="constant", sharding=sharding, keep_weights=3)
        reports = [trainer.train(batch) for batch in batches]
        assert [each.snapshot.version.step for each in reports] == [batch.iteration + 1 for batch in batches]
        files = [Path(each.snapshot.directory) / "model.safetensors" for each in reports]
        return [(each.metrics, file.read_bytes()) for each, file in zip(reports, files, strict=True)]

    first, last = Batch(0, tuple(mixed_batch())), Batch(2, tuple(mixed_batch()))
    with_gap, without = trained("gap", [first, Batch(1, ()), last]), trained("none", [first, last])
    metrics, weights = with_gap[1]
    assert metrics["updates"] == metrics["trajectories"] == metrics["tokens"] == 0
    assert not {"loss", "grad_norm"} & metrics.keys()
    assert weights == with_gap[0][1]
    assert with_gap[2][1] == without[1][1]


def test_published_weights_load_with_their_tokenizer_and_old_ones_go(
    student_trainer: MakeTrainer, mixed_batch: MixedBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = tmp_path / "weights" / ".step-000001"
    interrupted.mkdir(parents=True)
    remove = shutil.rmtree

    def remove_too_late(path: Path, **choices: Any) -> None:
        remove(path)  # another rank
        remove(path, **choices)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove_too_late)
        trainer = student_trainer(keep_weights=2)
    reports = [trainer.train(Batch(i, tuple(mixed_batch()))) for i in range(3)]

    assert [report.snapshot.version for report in reports] == [WeightVersion(0, step) for step in (1, 2, 3)]
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["step-000002", "step-000003"]
    directory = reports[-1].snapshot.directory
    assert Path(directory) == tmp_path / "weights" / "step-000003"
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.arange(VOCAB)[None]
    torch.testing.assert_close(loaded(ids).logits, trainer.model.eval()(ids).logits, rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(directory)("w3 w7")["input_ids"] == [3, 7]

    def refuse(path: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        trainer.train(Batch(3, tuple(mixed_batch())))
    # Its name is taken away first, so that nobody takes half of it for the whole.
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == [".step-000002", "step-000003", "step-000004"]
    trainer.train(Batch(4, tuple(mixed_batch())))
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["step-000004", "step-000005"]


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_bfloat16_trains_float32_parameters_and_publishes_bfloat16(
    student_trainer: MakeTrainer, mixed_batch: MixedBatch, sharding: str
) -> None:
    exact = student_trainer("exact")
    exact.train(Batch(0, tuple(mixed_batch())))
    trainer = student_trainer(dtype="bfloat16", sharding=sharding)
    report = trainer.train(Batch(0, tuple(mixed_batch())))
    expected, found = (torch.cat([g.flatten() for g in gradients(each).values()]) for each in (exact, trainer))
    assert 0 < (found - expected).norm() < 0.05 * expected.norm()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    published = Path(report.snapshot.directory)
    assert AutoModelForCausalLM.from_pretrained(published).dtype == torch.bfloat16
    parameters = sum(p.numel() for p in trainer.model.parameters())
    size = (published / "model.safetensors").stat().st_size
    assert 2 * parameters <= size < 2 * parameters + 8192  # the tied output layer is not written again


def test_a_failed_publish_leaves_older_weights_and_nothing_of_the_new(
    student_trainer: MakeTrainer, mixed_batch: MixedBatch, tmp_path: Path
) -> None:
    trainer = student_trainer()
    trainer.train(Batch(0, tuple(mixed_batch())))
    weights = tmp_path / "weights"
    (weights / "step-000002").mkdir()
    (weights / "step-000002" / "in the way").touch()  # renaming onto it fails, whatever the user
    with pytest.raises(TrainerError, match=r"^cannot publish weights to .*step-000002: Directory not empty; "):
        trainer.train(Batch(1, tuple(mixed_batch())))
    assert sorted(p.name for p in weights.iterdir()) == ["step-000001", "step-000002"]
    AutoModelForCausalLM.from_pretrained(weights / "step-000001")


def test_an_architecture_that_rescales_its_logits_is_refused(random_architecture: MakeModel) -> None:
    with pytest.raises(DataError, match="GraniteForCausalLM"):
        new_student(str(random_architecture("granite")))


def test_an_unreadable_student_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=os.fspath(tmp_path)) as caught:
        new_student(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_student_without_marked_layers_is_not_sharded(
    student_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank would gather all of it, and take as much memory as without."""
    monkeypatch.setattr("spot_async.trainer.rank.decoder_layers", lambda model: [])
    with pytest.raises(ConfigError, match=r"^training\.sharding=fsdp2: .*marks no layers"):
        student_trainer(sharding="fsdp2")
