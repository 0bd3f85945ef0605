"""The trainer inside one process: gradients, mini-batches, errors, publishing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    get_cosine_schedule_with_warmup,
)

import spot_async.trainer.model as trainer_model
from spot_async.config import TrainingConfig
from spot_async.errors import DataError, TrainerError
from spot_async.trainer.batching import input_length, micro_batches, mini_batches, rank_share
from spot_async.trainer.messages import Batch
from spot_async.trainer.metrics import METRICS
from spot_async.trainer.model import load_student
from spot_async.trainer.parallel import Replicated, process_group
from spot_async.trainer.rank import StudentTrainer
from spot_async.trainer.schedule import learning_rate
from spot_async.trainer.settings import TrainerSettings
from spot_async.types import SoftTargets, Supervision, WeightVersion

VOCAB = 50
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("student")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        attention_dropout=0.5,  # training must not apply it
        initializer_range=0.3,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "1")
        with process_group(str(tmp_path_factory.mktemp("group")), CPU):
            yield


def make_trainer(student: Path, run_directory: Path, *, temperature: float = 1.0, **training: Any) -> StudentTrainer:
    training = {"iterations": 10, "batch_size": 8, "mini_batch_size": 8, "learning_rate": 1e-3, **training}
    return StudentTrainer(
        TrainerSettings(
            training=TrainingConfig(**training),
            model_directory=str(student),
            run_directory=str(run_directory),
            temperature=temperature,
            seed=0,
            iterations=10,
        ),
        Replicated(),
        CPU,
    )


def supervision(ordinal: int, tokens: int, *, targets: SoftTargets | None = None, **arrays: Any) -> Supervision:
    """A trajectory whose behaviour lies near a random student's log-probabilities, so that no ratio is extreme."""
    draw = np.random.default_rng(ordinal)
    behavior = draw.normal(-4.0, 1.0, tokens).astype(np.float32)
    fields: dict[str, Any] = {
        "behavior_logprobs": behavior,
        "teacher_logprobs": behavior + draw.normal(0.0, 1.0, tokens).astype(np.float32),
        "reference_logprobs": behavior + draw.normal(0.0, 0.3, tokens).astype(np.float32),
    }
    return Supervision(
        prompt_ordinal=ordinal,
        problem_id=f"problem-{ordinal}",
        prompt_ids=draw.integers(0, VOCAB, 3 + ordinal % 5).astype(np.int32),
        response_ids=draw.integers(0, VOCAB, tokens).astype(np.int32),
        version=WeightVersion(0, 0),
        soft_targets=targets,
        **{**fields, **arrays},
    )


def soft_targets(positions: list[int], k: int) -> SoftTargets:
    draw = np.random.default_rng(k)
    rows = len(positions)
    return SoftTargets(
        positions=np.array(positions, np.int32),
        token_ids=np.stack([draw.permutation(VOCAB)[:k] for _ in positions]).astype(np.int32)
        if rows
        else np.zeros((0, k), np.int32),
        probabilities=draw.dirichlet(np.ones(k), rows).astype(np.float32).reshape(rows, k),
        weights=draw.uniform(0.1, 1.0, rows).astype(np.float32),
    )


def mixed_batch() -> list[Supervision]:
    """Unequal lengths, one token, no targets, empty targets, unsorted positions, different k, given advantages."""
    return [
        supervision(0, 12, targets=soft_targets([7, 2, 11], 4)),
        supervision(1, 1, targets=soft_targets([0], 4)),
        supervision(2, 30),
        supervision(3, 5, targets=soft_targets([], 4)),
        supervision(4, 9, targets=soft_targets([0, 3], 16)),
        supervision(5, 17, teacher_logprobs=None, advantages=np.linspace(-2, 2, 17, dtype=np.float32)),
        supervision(6, 6, teacher_logprobs=None, targets=soft_targets([1, 1, 4], 3)),
    ]


def gradients(trainer: StudentTrainer) -> dict[str, torch.Tensor]:
    """Of the last update; the optimiser leaves them in place."""
    return {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}


def dense_reference(
    student: Path, batch: list[Supervision], training: TrainingConfig, temperature: float
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one mini-batch, straight from full-vocabulary logits in float64."""
    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float64).eval()
    total_tokens = sum(len(sample.response_ids) for sample in batch)
    loss = torch.zeros((), dtype=torch.float64)
    for sample in batch:
        prompt, response = sample.prompt_ids.tolist(), sample.response_ids.tolist()
        logits = model(torch.tensor([prompt + response])).logits[0] / temperature
        token_losses = []
        for t, token in enumerate(response):
            logprob = logits[len(prompt) + t - 1].log_softmax(-1)[token]
            old = float(sample.behavior_logprobs[t])
            token_loss = torch.zeros((), dtype=torch.float64)
            advantage = None
            if sample.teacher_logprobs is not None:
                advantage = float(np.float32(sample.teacher_logprobs[t]) - np.float32(old))
            elif sample.advantages is not None:
                advantage = float(sample.advantages[t])
            if advantage is not None:
                ratio = (logprob - old).exp()
                surrogate = min(ratio * advantage, ratio.clamp(1 - training.clip, 1 + training.clip) * advantage)
                if training.dual_clip is not None and advantage < 0:
                    surrogate = max(surrogate, torch.tensor(training.dual_clip * advantage))
                token_loss = token_loss - surrogate
            if training.reference_kl:
                log_ratio = float(sample.reference_logprobs[t]) - logprob
                token_loss = token_loss + training.reference_kl * (log_ratio.exp() - 1 - log_ratio)
            token_losses.append(token_loss)
        trajectory_loss = sum(token_losses) / len(response)
        if sample.soft_targets is not None:
            target = sample.soft_targets
            for n, position in enumerate(target.positions.tolist()):
                row = logits[len(prompt) + position - 1].log_softmax(-1)
                for token, probability in zip(target.token_ids[n].tolist(), target.probabilities[n], strict=True):
                    trajectory_loss = trajectory_loss - float(target.weights[n]) * float(probability) * row[token]
        share = 1 / len(batch) if training.loss_aggregation == "sequence_mean" else len(response) / total_tokens
        loss = loss + share * trajectory_loss
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("training", "temperature", "logits_per_block"),
    [
        ({"loss_aggregation": "sequence_mean"}, 1.0, 1 << 20),
        ({"loss_aggregation": "token_mean", "reference_kl": 0.3, "dual_clip": 1.5}, 0.7, 1 << 20),
        ({"reference_kl": 0.1, "micro_batch_tokens": 40}, 1.0, 7 * VOCAB),
        ({"micro_batch_tokens": 1}, 1.3, VOCAB),
    ],
    ids=["defaults", "token mean, all terms, temperature", "micro-batches of rows in blocks", "one at a time"],
)
def test_loss_and_gradients_equal_a_dense_float64_reference(
    student: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    training: dict[str, Any],
    temperature: float,
    logits_per_block: int,
) -> None:
    monkeypatch.setattr(trainer_model, "LOGITS_PER_BLOCK", logits_per_block)
    config = TrainingConfig(iterations=10, max_grad_norm=1e9, **training)
    batch = mixed_batch()
    expected_loss, expected = dense_reference(student, batch, config, temperature)

    trainer = make_trainer(student, tmp_path, temperature=temperature, max_grad_norm=1e9, **training)
    metrics = trainer.train(Batch(0, tuple(batch))).metrics

    assert metrics["loss"] == pytest.approx(expected_loss, rel=1e-5)
    found = gradients(trainer)
    assert found.keys() == expected.keys()
    norm = torch.sqrt(sum((g**2).sum() for g in expected.values())).item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].double(), gradient, rtol=1e-4, atol=2e-6 * norm)


def test_no_soft_targets_and_empty_soft_targets_train_bit_for_bit_alike(student: Path, tmp_path: Path) -> None:
    results = []
    for name, targets in (("none", None), ("empty", soft_targets([], 4))):
        trainer = make_trainer(student, tmp_path / name)
        report = trainer.train(Batch(0, tuple(supervision(i, 4 + i, targets=targets) for i in range(4))))
        results.append((gradients(trainer), report.metrics))
    (left, left_metrics), (right, right_metrics) = results
    assert all(torch.equal(left[name], right[name]) for name in left)
    untimed = METRICS.keys() - {"train_s", "publish_s", "tokens_per_s"}
    assert {name: left_metrics[name] for name in untimed} == {name: right_metrics[name] for name in untimed}


def test_report_holds_the_documented_metrics(student: Path, tmp_path: Path) -> None:
    batch = mixed_batch()
    metrics = make_trainer(student, tmp_path, mini_batch_size=4).train(Batch(0, tuple(batch))).metrics
    assert metrics.keys() == METRICS.keys()
    assert metrics["loss"] == pytest.approx(
        metrics["loss_policy"] + metrics["loss_branch"] + metrics["loss_reference"], rel=1e-6
    )
    assert metrics["updates"] == 2
    assert metrics["trajectories"] == 7
    assert metrics["tokens"] == sum(len(sample.response_ids) for sample in batch)
    assert metrics["branch_positions"] == 3 + 1 + 0 + 2 + 3
    advantages = [s.teacher_logprobs - s.behavior_logprobs for s in batch if s.teacher_logprobs is not None]
    expected = np.concatenate([*advantages, np.linspace(-2, 2, 17)]).mean()  # problem 6 has no policy term
    assert metrics["advantage_mean"] == pytest.approx(expected, rel=1e-5)


POLICY_METRICS = {"ratio_mean", "ratio_max", "importance_weight_mean", "importance_capped", "clip_fraction"} | {
    "behavior_kl", "advantage_mean"}  # fmt: skip
MISMATCH_METRICS = {"mismatch_mean", "mismatch_max", "mismatch_kl"}


@pytest.mark.parametrize("behavior", ["served", "recomputed"])
def test_metrics_of_the_policy_term_are_left_out_where_there_is_none(
    student: Path, tmp_path: Path, behavior: str
) -> None:
    taught = supervision(1, 6, targets=soft_targets([0, 3], 4), teacher_logprobs=None)
    trainer = make_trainer(student, tmp_path, behavior=behavior)
    metrics = trainer.train(Batch(0, (taught, taught))).metrics
    assert METRICS.keys() - metrics.keys() == POLICY_METRICS | MISMATCH_METRICS
    assert metrics["loss"] == metrics["loss_branch"] > 0


def poisoned(name: str, position: int, value: float) -> Supervision:
    sample = supervision(3, 8, targets=soft_targets([2], 4))
    if name == "probabilities":
        sample.soft_targets.probabilities[0, position] = value  # type: ignore[union-attr]
    else:
        getattr(sample, name)[position] = value
    return sample


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("behavior_logprobs", np.nan, "non-finite policy loss"),
        ("behavior_logprobs", -np.inf, "non-finite policy loss"),
        ("teacher_logprobs", np.inf, "non-finite policy loss"),
        ("probabilities", np.nan, "non-finite branch loss"),
        ("reference_logprobs", np.nan, "non-finite reference loss"),
        # The clip keeps the loss finite, but 0 times an infinite ratio is still the gradient.
        ("behavior_logprobs", -200.0, "non-finite gradient"),
    ],
)
def test_non_finite_numbers_stop_training_before_the_step_and_name_their_sample(
    student: Path, tmp_path: Path, name: str, value: float, what: str
) -> None:
    trainer = make_trainer(student, tmp_path, reference_kl=0.1, mini_batch_size=2)
    before = {key: tensor.clone() for key, tensor in trainer.model.state_dict().items()}
    batch = [poisoned(name, 1, value), supervision(4, 5)]
    with pytest.raises(TrainerError) as caught:
        trainer.train(Batch(7, tuple(batch)))
    message = str(caught.value)
    assert message.startswith("iteration 7, mini-batch 1 of 1")
    assert f"{what} in sample 'problem-3' (ordinal 3)" in message
    assert "problem-4" not in message
    assert "\n" not in message
    assert all(torch.equal(before[key], tensor) for key, tensor in trainer.model.state_dict().items())
    assert list((tmp_path / "weights").iterdir()) == []


def test_culprits_are_looked_for_with_the_log_probabilities_that_were_trained_on(student: Path, tmp_path: Path) -> None:
    served_oddly = poisoned("behavior_logprobs", 1, -200.0)  # which training on recomputed ones never sees
    culprit = supervision(4, 5)
    culprit.teacher_logprobs[2] = np.nan  # type: ignore[index]
    trainer = make_trainer(student, tmp_path, behavior="recomputed", mini_batch_size=2)
    with pytest.raises(TrainerError) as caught:
        trainer.train(Batch(0, (served_oddly, culprit)))
    assert "in sample 'problem-4'" in str(caught.value)
    assert "problem-3" not in str(caught.value)


@pytest.mark.parametrize(
    ("sample", "complaint"),
    [
        (supervision(0, 4, teacher_logprobs=np.zeros(3, np.float32)), "teacher_logprobs has shape (3,)"),
        (supervision(0, 4, advantages=np.zeros(4, np.float32)), "both teacher_logprobs and advantages"),
        (supervision(0, 4, reference_logprobs=None), "reference_kl"),
        (supervision(0, 0), "empty"),
        (supervision(0, 4, targets=soft_targets([4], 3)), "outside its 4 response positions"),
        (
            supervision(
                0,
                4,
                targets=SoftTargets(
                    positions=np.zeros(1, np.int32),
                    token_ids=np.full((1, 1), VOCAB, np.int32),
                    probabilities=np.ones((1, 1), np.float32),
                    weights=np.ones(1, np.float32),
                ),
            ),
            f"vocabulary of {VOCAB}",
        ),
    ],
)
def test_malformed_samples_are_named_before_anything_is_trained(
    student: Path, tmp_path: Path, sample: Supervision, complaint: str
) -> None:
    trainer = make_trainer(student, tmp_path, reference_kl=0.1)
    with pytest.raises(TrainerError, match=r"'problem-0' \(ordinal 0\)") as caught:
        trainer.train(Batch(0, (sample,)))
    assert complaint in str(caught.value)


def test_a_batch_without_samples_is_an_error(student: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="iteration 2 has no samples"):
        make_trainer(student, tmp_path).train(Batch(2, ()))


@settings(derandomize=True, max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    per_prompt=st.integers(1, 3),
    size=st.integers(1, 12),
    ranks=st.integers(1, 4),
    budget=st.integers(1, 400),
)
def test_every_sample_is_trained_exactly_once(
    lengths: list[int], per_prompt: int, size: int, ranks: int, budget: int
) -> None:
    batch = [supervision(i // per_prompt, n) for i, n in enumerate(lengths)]
    prompts = -(-len(lengths) // per_prompt)
    updates = mini_batches(batch, size, seed=1)

    assert len(updates) == -(-prompts // size)
    ordinals = [{sample.prompt_ordinal for sample in update} for update in updates]
    assert sum(map(len, ordinals)) == len(set.union(*ordinals)) == prompts  # a prompt's trajectories stay together
    assert max(map(len, ordinals)) <= size
    assert max(map(len, ordinals)) - min(map(len, ordinals)) <= 1

    trained = []
    for update in updates:
        shares = [rank_share(update, rank, ranks) for rank in range(ranks)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 2
        for share in shares:
            for group in micro_batches(share, budget):
                assert len(group) == 1 or len(group) * max(map(input_length, group)) <= budget
                trained += group
    assert sorted(map(id, trained)) == sorted(map(id, batch))


def test_mini_batch_order_depends_on_the_seed_and_not_on_arrival() -> None:
    batch = [supervision(i, 2) for i in range(32)]
    order = [[s.prompt_ordinal for s in update] for update in mini_batches(batch, 8, seed=5)]
    arrived_backwards = [supervision(i, 2) for i in reversed(range(32))]
    assert [[s.prompt_ordinal for s in update] for update in mini_batches(arrived_backwards, 8, seed=5)] == order
    assert [[s.prompt_ordinal for s in update] for update in mini_batches(batch, 8, seed=6)] != order


def test_learning_rate_is_the_cosine_to_zero_that_the_paper_used() -> None:
    training = TrainingConfig(iterations=174, learning_rate=3e-6)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=3e-6)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=174)
    for iteration in range(175):
        assert learning_rate(training, iteration, 174) == pytest.approx(schedule.get_last_lr()[0], abs=1e-15)
        optimizer.step()
        schedule.step()


def test_warm_up_rises_to_the_full_rate_and_constant_keeps_it() -> None:
    training = TrainingConfig(iterations=10, learning_rate=1.0, warmup_iterations=3, schedule="constant")
    assert [learning_rate(training, i, 10) for i in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_published_weights_load_with_their_tokenizer_and_old_ones_go(student: Path, tmp_path: Path) -> None:
    interrupted = tmp_path / "weights" / ".step-000001"
    interrupted.mkdir(parents=True)
    trainer = make_trainer(student, tmp_path, keep_weights=2)
    reports = [trainer.train(Batch(i, tuple(mixed_batch()))) for i in range(3)]

    assert [report.snapshot.version for report in reports] == [WeightVersion(0, step) for step in (1, 2, 3)]
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["step-000002", "step-000003"]
    directory = reports[-1].snapshot.directory
    assert Path(directory) == tmp_path / "weights" / "step-000003"
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.arange(VOCAB)[None]
    torch.testing.assert_close(loaded(ids).logits, trainer.model.eval()(ids).logits, rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(directory)("w3 w7")["input_ids"] == [3, 7]


def test_bfloat16_trains_float32_parameters_and_publishes_bfloat16(student: Path, tmp_path: Path) -> None:
    trainer = make_trainer(student, tmp_path, dtype="bfloat16")
    report = trainer.train(Batch(0, tuple(mixed_batch())))
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    published = Path(report.snapshot.directory)
    assert AutoModelForCausalLM.from_pretrained(published).dtype == torch.bfloat16
    parameters = sum(p.numel() for p in trainer.model.parameters())
    size = (published / "model.safetensors").stat().st_size
    assert 2 * parameters <= size < 2 * parameters + 8192  # the tied output layer is not written again


def test_a_failed_publish_leaves_older_weights_and_nothing_of_the_new(student: Path, tmp_path: Path) -> None:
    trainer = make_trainer(student, tmp_path)
    trainer.train(Batch(0, tuple(mixed_batch())))
    weights = tmp_path / "weights"
    (weights / "step-000002").mkdir()
    (weights / "step-000002" / "in the way").touch()  # renaming onto it fails, whatever the user
    with pytest.raises(TrainerError, match=r"^cannot publish weights to .*step-000002: Directory not empty; "):
        trainer.train(Batch(1, tuple(mixed_batch())))
    assert sorted(p.name for p in weights.iterdir()) == ["step-000001", "step-000002"]
    AutoModelForCausalLM.from_pretrained(weights / "step-000001")


def test_an_architecture_that_rescales_its_logits_is_refused(tmp_path: Path) -> None:
    config = GraniteConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        logits_scaling=8.0,
        initializer_range=0.3,
    )
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="GraniteForCausalLM"):
        load_student(str(tmp_path), CPU)


def test_an_unreadable_student_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=os.fspath(tmp_path)) as caught:
        load_student(str(tmp_path), CPU)
    assert "\n" not in str(caught.value)
