"""A teacher with a tokenizer of its own, in the real program: equal tokenizers, and one that joins tokens."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from joined_teacher import with_bytes, with_joined_tokens
from transformers import AutoModelForCausalLM

import spot_async
from spot_async.models.chunks import Reading
from spot_async.models.common_vocabulary import SameTokens
from spot_async.models.own_tokens import OwnTokens

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {role: with_bytes(role, folder / role) for role in ("student", "teacher")}
    return {**found, "joined": with_joined_tokens(folder / "joined")}


async def trained(
    directory: Path, student: Path, teacher: dict[str, Any], *overrides: str, policy: Any = "opd"
) -> Path:
    """Train and return the run's directory."""
    await spot_async.run_async(
        {
            "student": {"model": str(student)},
            "teacher": teacher,
            "data": {"train": str(ROOT / "examples/running_sum/data/heldout.jsonl")},
            "prompt": {"instruction": ""},
            "sampling": {"max_prompt_tokens": 64, "max_response_tokens": 160},
            "policy": policy,
            "training": {"iterations": 3, "batch_size": 8, "mini_batch_size": 8, "learning_rate": 2e-4},
            "run": {"directory": str(directory)},
        },
        overrides,
    )
    return directory


def samples_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


async def test_equal_tokenizers_train_the_same_weights_through_chunks(
    models, tmp_path, monkeypatch, servers_on_threads, trainer_on_thread
):
    calls: Counter[type] = Counter()
    for reader in (SameTokens, OwnTokens):

        def read(self: Any, *given: Any, _reader: Any = reader, _read: Any = reader.read) -> Any:
            calls[_reader] += 1
            return _read(self, *given)

        monkeypatch.setattr(reader, "read", read)
    # A response that is cut off has a last chunk that is unknown, so none is here.
    room = "sampling.max_response_tokens=360"
    plain = await trained(tmp_path / "plain", models["student"], {"model": str(models["teacher"])}, room)
    assert calls[OwnTokens] == 0
    same = calls[SameTokens]
    own = {"model": str(models["teacher"]), "tokenizer": "own"}
    chunked = await trained(tmp_path / "own", models["student"], own, room)
    assert calls[OwnTokens] >= 24
    assert calls[SameTokens] == same
    assert {each["finish_reason"] for each in samples_of(plain)} == {"stop"}
    weights = [(run / "student" / "model.safetensors").read_bytes() for run in (plain, chunked)]
    assert weights[0] == weights[1]


async def test_a_changed_aligner_asks_for_nothing_that_a_run_has_kept(
    models, tmp_path, monkeypatch, servers_on_threads, trainer_on_thread
):
    kept = {"model": str(models["teacher"]), "tokenizer": "own", "cache": str(tmp_path / "scores")}
    first = await trained(tmp_path / "first", models["student"], kept, "training.iterations=1")
    read = OwnTokens.read

    def read_in_pairs(self: OwnTokens, *given: Any) -> Reading:
        reading = read(self, *given)
        return dataclasses.replace(reading, ours=reading.ours // 2, theirs=reading.theirs // 2)

    monkeypatch.setattr(OwnTokens, "read", read_in_pairs)
    # A replay asks nobody, and ends at the first question that is not kept.
    replayed = kept | {"replay": True}
    again = await trained(tmp_path / "again", models["student"], replayed, "training.iterations=1")
    for one, other in zip(samples_of(first), samples_of(again), strict=True):
        assert other["response_ids"] == one["response_ids"]
        assert other["teacher_chunks"] == [chunk // 2 for chunk in one["teacher_chunks"]]
        assert np.nansum(said_of(other)) == pytest.approx(np.nansum(said_of(one)), abs=1e-3)


def joined(models: dict[str, Path]) -> dict[str, Any]:
    backend = {"kind": "joined_teacher:JoinedTeacher", "parts": str(models["teacher"])}
    return {"model": str(models["joined"]), "tokenizer": "own", "backend": backend}


@pytest.mark.long
async def test_a_teacher_that_joins_tokens_says_of_chunks_what_its_model_does(
    models, tmp_path, servers_on_threads, trainer_on_thread
):
    run = await trained(tmp_path / "run", models["student"], joined(models), "training.iterations=2")
    samples = samples_of(run)
    assert len(samples) == 16
    model = AutoModelForCausalLM.from_pretrained(models["teacher"], dtype=torch.float64)
    tokenizer = spot_async.Vocabulary.load(models["student"]).tokenizer
    for each in samples:
        ids, said = each["response_ids"], said_of(each)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": each["problem"]}], add_generation_prompt=True, return_dict=False
        )
        rows = model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        dense = rows.gather(-1, torch.tensor(ids)[:, None])[:, 0].detach().numpy()
        for chunk in chunks_of(tokenizer.convert_ids_to_tokens(ids)):
            if not np.isnan(said[chunk]).any():
                assert said[chunk] == pytest.approx([dense[chunk].mean()] * len(said[chunk]), abs=2e-4)
        assert not np.isnan(said[:-2]).any()
    (first, *_) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert first["teacher/masked"] < 0.1
    assert 0.5 < first["teacher/chunked"] < 1
    assert {len(each["teacher_chunks"]) == len(each["response_ids"]) for each in samples} == {True}
    assert "teacher/entropy_nats" not in first


@pytest.mark.long
async def test_beside_one_with_the_students_tokens_each_pulls_in_its_own_way(
    models, tmp_path, servers_on_threads, trainer_on_thread
):
    await spot_async.run_async(
        {
            "student": {"model": str(models["student"])},
            "teachers": {"same": {"model": str(models["teacher"])}, "other": joined(models)},
            "data": {"train": str(ROOT / "examples/running_sum/data/heldout.jsonl")},
            "prompt": {"instruction": ""},
            "sampling": {"max_prompt_tokens": 64, "max_response_tokens": 160},
            "policy": "opd",
            "training": {"iterations": 1, "batch_size": 4, "mini_batch_size": 4},
            "run": {"directory": str(tmp_path / "run")},
        }
    )
    for each in samples_of(tmp_path / "run"):
        same, other = (each["teachers"][name] for name in ("same", "other"))
        assert "teacher_chunks" not in same
        assert max(Counter(other["teacher_chunks"]).values()) == 2
        known = np.array(other["teacher_chunks"]) >= 0
        said = [np.array([value or 0.0 for value in one["teacher_logprobs"]]) for one in (same, other)]
        # A chunk's sum is the same teacher's, whose tokens the other one joins.
        assert said[0][known].sum() == pytest.approx(said[1][known].sum(), abs=2e-3)
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 0.5 < row["teacher/other/chunked"] < 1
    assert "teacher/same/chunked" not in row


@pytest.mark.long
@pytest.mark.parametrize("staleness", [0, 2])
async def test_advantages_are_nearly_those_of_a_teacher_with_the_students_tokens(
    models, tmp_path, servers_on_threads, trainer_on_thread, staleness
):
    whole = ["iterations=14", "batch_size=32", "mini_batch_size=8", "learning_rate=3e-4"]
    run = await trained(
        tmp_path / "run",
        models["student"],
        joined(models),
        *(f"training.{each}" for each in whole),
        f"data.train={ROOT / 'examples/running_sum/data/train.jsonl'}",
        f"max_staleness={staleness}",
    )
    model = AutoModelForCausalLM.from_pretrained(models["teacher"])
    tokenizer = spot_async.Vocabulary.load(models["student"]).tokenizer
    found, right = [], []
    for each in samples_of(run):
        ids, said, student = each["response_ids"], said_of(each), np.array(each["behavior_logprobs"])
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": each["problem"]}], add_generation_prompt=True, return_dict=False
        )
        with torch.inference_mode():
            rows = model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        dense = rows.gather(-1, torch.tensor(ids)[:, None])[:, 0].numpy()
        found.append(advantages(said, student, tokenizer.convert_ids_to_tokens(ids)))
        right.append(np.where(np.isnan(said), 0, dense - student))
    assert np.corrcoef(np.concatenate(found), np.concatenate(right))[0, 1] > 0.9


Rows = list[dict[str, Any]]


async def trained_by(
    directory: Path, policy: str, *overrides: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train the example by a policy, and return the metrics and the samples."""
    small = [f"run.directory={directory}", f"policy={policy}", "evaluation=null", "training.warmup_iterations=0"]
    await spot_async.run_async(ROOT / "examples/own_tokenizer/own.yaml", [*small, *overrides])
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()], samples_of(directory)


FEW = ["training.iterations=3", "training.batch_size=8", "training.mini_batch_size=8"]
MANY = ["training.iterations=20", "training.batch_size=32", "training.mini_batch_size=8", "training.learning_rate=5e-4"]


@pytest.mark.parametrize("staleness", [0, pytest.param(2, marks=pytest.mark.long)])
async def test_spot_probes_where_the_teacher_has_candidates_and_says_that_nothing_is_certain(
    tmp_path, monkeypatch, servers_on_threads, trainer_on_thread, staleness
):
    monkeypatch.chdir(ROOT)
    policy = "{kind: spot, gate: false}"
    metrics, samples = await trained_by(tmp_path / "run", policy, f"max_staleness={staleness}", *FEW)
    branches = [(sample, branch) for sample in samples for branch in sample["branches"]]
    assert len(branches) > 24
    for sample, branch in branches:
        assert sample["teacher_chunks"][branch["position"]] >= 0
        assert branch["certain"] is False
        assert 2 <= len(branch["candidates"]) <= 4
    for row in metrics:
        assert 0.5 < row["teacher/rows"] <= 1
        assert row["spot/selection_certain"] == row["spot/selection_refined"] == 0 < row["spot/selection_uncertain"]


@pytest.mark.long
async def test_distill_approaches_a_teacher_that_joins_digits(
    tmp_path, monkeypatch, servers_on_threads, trainer_on_thread
):
    """Rows that were taken for the student's next token where a chunk starts led to no right answer here."""
    monkeypatch.chdir(ROOT)
    metrics, _ = await trained_by(tmp_path / "run", "{kind: distill, divergence: jsd}", *MANY)
    losses, accuracy = ([row[name] for row in metrics] for name in ("train/loss", "rollout/accuracy"))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert sum(accuracy[-5:]) > 0.8 * sum(accuracy[:5])


@pytest.mark.long
async def test_the_student_learns_what_a_teacher_with_other_tokens_writes(
    tmp_path, monkeypatch, servers_on_threads, trainer_on_thread
):
    monkeypatch.chdir(ROOT)
    metrics, samples = await trained_by(tmp_path / "run", "{kind: kd, forward_kl_weight: 0}", *MANY)
    tokenizer = spot_async.Vocabulary.load(ROOT / "examples/own_tokenizer/student").tokenizer
    for sample in samples[:16]:
        ids = sample["response_ids"]
        ended = sample["finish_reason"] == "stop"
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert tokenizer.encode(text, add_special_tokens=False) == ids[: len(ids) - ended], "as the student writes it"
    losses = [row["train/loss"] for row in metrics]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    assert metrics[0]["teacher/accuracy"] > 0.5


def said_of(sample: dict[str, Any]) -> np.ndarray[Any, Any]:
    return np.array([np.nan if value is None else value for value in sample["teacher_logprobs"]])


def chunks_of(tokens: list[str]) -> list[slice]:
    """What the joining tokenizer makes of tokens: a digit belongs to the label, operator or `=` before it."""
    found, place = [], 0
    while place < len(tokens):
        joins = tokens[place] in [*"abcdefghijklmnop+-="] and "".join(tokens[place + 1 : place + 2]).isdigit()
        found.append(slice(place, place + 1 + joins))
        place = found[-1].stop
    return found


def advantages(said: np.ndarray[Any, Any], student: np.ndarray[Any, Any], tokens: list[str]) -> np.ndarray[Any, Any]:
    """The equation, chunk by chunk."""
    found = np.zeros(len(said))
    for chunk in chunks_of(tokens):
        total = student[chunk].sum()
        if total and not np.isnan(said[chunk]).any():
            found[chunk] = (said[chunk].sum() - total) * student[chunk] / total
    return found
