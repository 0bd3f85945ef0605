"""A teacher with a tokenizer of its own, in the real program: equal tokenizers, and one that joins tokens."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from joined_teacher import with_bytes, with_joined_tokens
from padded_models import padded_model
from small_runs import EXAMPLE, example_run, rows
from transformers import AutoModelForCausalLM

import spot_async
from spot_async.models.chunks import Reading, chunk_sums
from spot_async.models.own_tokens import OwnTokens

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    found = {role: with_bytes(role, folder / role) for role in ("student", "teacher")}
    found["padded"] = padded_model(found["teacher"], folder / "padded", rows=16)
    return {name: str(path) for name, path in found.items()} | {"joined": str(with_joined_tokens(folder / "joined"))}


async def trained(directory: Path, models: dict[str, str], *overrides: str, **sections: Any) -> list[dict[str, Any]]:
    """Train, and return the samples."""
    own = {"student": {"model": models["student"]}, "run": {"directory": str(directory)}}
    training = {"iterations": 3, "batch_size": 8, "mini_batch_size": 8, "learning_rate": 2e-4}
    await spot_async.run_async(example_run(**own, training=training, **sections), overrides)
    return rows(directory / "samples.jsonl")


def joined(models: dict[str, str]) -> dict[str, Any]:
    backend = {"kind": "joined_teacher:JoinedTeacher", "parts": models["teacher"]}
    return {"model": models["joined"], "tokenizer": "own", "backend": backend}


async def test_equal_tokenizers_train_the_same_weights_through_chunks(
    models, tmp_path, monkeypatch, servers_on_threads, trainer_on_thread
):
    """So they do where the teacher's softmax is wider than its tokenizer."""
    weights, read = [], OwnTokens.read
    for tokenizer in ("student", "own"):
        called: list[int] = []
        monkeypatch.setattr(OwnTokens, "read", lambda *given, called=called: called.append(1) or read(*given))
        teacher = {"model": models["padded"], "tokenizer": tokenizer}
        # A response that is cut off has a last chunk that is unknown, so none is here.
        samples = await trained(
            tmp_path / tokenizer, models, "training.iterations=5", "sampling.max_response_tokens=360", teacher=teacher
        )
        assert bool(called) == (tokenizer == "own")
        assert {each["finish_reason"] for each in samples} == {"stop"}
        weights.append((tmp_path / tokenizer / "student" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


async def test_a_response_that_is_cut_into_other_tokens_is_worth_what_the_model_says_of_those(
    models, tmp_path, monkeypatch, servers_on_threads, trainer_on_thread
):
    read, names = OwnTokens.read, spot_async.Vocabulary.load(Path(models["teacher"])).tokenizer.get_vocab()
    word, letters = names["one"], [names[letter] for letter in "one"]

    def cut(ids: list[int]) -> list[list[int]]:
        return [letters if token_id == word else [token_id] for token_id in ids]

    def read_in_letters(self: OwnTokens, *given: Any) -> Reading:
        reading = read(self, *given)
        parts = cut(reading.ids.tolist())
        lengths = [len(part) for part in parts]
        ids, starts = (np.array([*chain(*each)], np.int32) for each in (parts, map(range, lengths)))
        return dataclasses.replace(reading, ids=ids, theirs=np.repeat(reading.theirs, lengths), their_starts=starts)

    monkeypatch.setattr(OwnTokens, "read", read_in_letters)
    teacher = {"model": models["teacher"], "tokenizer": "own"}
    samples = await trained(tmp_path / "run", models, "sampling.max_response_tokens=360", teacher=teacher)
    assert sum(word in each["response_ids"] for each in samples) > len(samples) / 3
    others = [each | {"response_ids": [*chain.from_iterable(cut(each["response_ids"]))]} for each in samples]
    for each, dense in zip(samples, dense_logprobs(models, others), strict=True):
        ends = np.cumsum([len(part) for part in cut(each["response_ids"])])
        np.testing.assert_allclose(said_of(each), np.diff(np.cumsum(dense)[ends - 1], prepend=0), atol=1e-3)


async def test_a_changed_aligner_asks_for_nothing_that_a_run_has_kept(
    models, tmp_path, monkeypatch, servers_on_threads, trainer_on_thread
):
    kept = {"model": models["teacher"], "tokenizer": "own", "cache": str(tmp_path / "scores")}
    first = await trained(tmp_path / "first", models, "training.iterations=1", teacher=kept)
    read = OwnTokens.read

    def read_in_pairs(self: OwnTokens, *given: Any) -> Reading:
        reading = read(self, *given)
        return dataclasses.replace(reading, ours=reading.ours // 2, theirs=reading.theirs // 2)

    monkeypatch.setattr(OwnTokens, "read", read_in_pairs)
    # A replay asks nobody, and ends at the first question that is not kept.
    again = await trained(tmp_path / "again", models, "training.iterations=1", teacher=kept | {"replay": True})
    for one, other in zip(first, again, strict=True):
        assert other["response_ids"] == one["response_ids"]
        assert other["teacher_chunks"] == [chunk // 2 for chunk in one["teacher_chunks"]]
        assert np.nansum(said_of(other)) == pytest.approx(np.nansum(said_of(one)), abs=1e-3)


@pytest.mark.long
async def test_beside_one_with_the_students_tokens_a_chunks_sum_is_what_its_model_says(
    models, tmp_path, servers_on_threads, trainer_on_thread
):
    teachers = {"same": {"model": models["teacher"]}, "other": joined(models)}
    samples = await trained(tmp_path / "run", models, "training.iterations=1", teachers=teachers)
    assert len(samples) == 8
    for each in samples:
        same, other = (each["teachers"][name] for name in ("same", "other"))
        assert "teacher_chunks" not in same
        chunks = np.array(other["teacher_chunks"])
        assert (chunks[:-2] >= 0).all()
        assert max(Counter(chunks.tolist()).values()) == 2
        for chunk in range(chunks.max() + 1):
            assert said_of(other)[chunks == chunk].sum() == pytest.approx(
                said_of(same)[chunks == chunk].sum(), abs=4e-4
            )
    row = rows(tmp_path / "run" / "metrics.jsonl")[0]
    assert row["teacher/other/masked"] < 0.1
    assert 0.5 < row["teacher/other/chunked"] < 1
    assert not {"teacher/same/chunked", "teacher/other/entropy_nats"} & {*row}
    route = {"kind": "opd", "route": {"by": "tier", "to": {"easy": "other"}, "default": "same"}}
    routed = await trained(tmp_path / "routed", models, "training.iterations=1", teachers=teachers, policy=route)
    assert {each["teacher"] for each in routed} == {"same", "other"}
    for each, one in zip(routed, samples, strict=True):
        assert each["response_ids"] == one["response_ids"]
        both = one["teachers"][each["teacher"]]
        assert each.get("teacher_chunks") == both.get("teacher_chunks")
        np.testing.assert_allclose(said_of(each), said_of(both), atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("staleness", [0, 2])
async def test_advantages_are_nearly_those_of_a_teacher_with_the_students_tokens(
    models, tmp_path, servers_on_threads, trainer_on_thread, staleness
):
    whole = ["iterations=14", "batch_size=32", "mini_batch_size=8", "learning_rate=3e-4"]
    samples = await trained(
        tmp_path / "run",
        models,
        *(f"training.{each}" for each in whole),
        f"data.train={EXAMPLE / 'data' / 'train.jsonl'}",
        f"max_staleness={staleness}",
        teacher=joined(models),
    )
    found, right = [], []
    for each, dense in zip(samples, dense_logprobs(models, samples), strict=True):
        said, student = said_of(each), np.array(each["behavior_logprobs"])
        chunks = np.array(each["teacher_chunks"])
        teacher, own = chunk_sums(np.nan_to_num(said), chunks), chunk_sums(student, chunks)
        found.append(np.where(np.isnan(said) | (own == 0), 0, (teacher - own) * student / np.where(own == 0, 1, own)))
        right.append(np.where(np.isnan(said), 0, dense - student))
    assert np.corrcoef(np.concatenate(found), np.concatenate(right))[0, 1] > 0.9


async def trained_by(
    directory: Path, policy: str, *overrides: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train the example by a policy, and return the metrics and the samples."""
    small = [f"run.directory={directory}", f"policy={policy}", "evaluation=null", "training.warmup_iterations=0"]
    await spot_async.run_async(ROOT / "examples/own_tokenizer/own.yaml", [*small, *overrides])
    return rows(directory / "metrics.jsonl"), rows(directory / "samples.jsonl")


FEW = ["training.iterations=3", "training.batch_size=8", "training.mini_batch_size=8"]


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


async def test_what_a_teacher_with_other_tokens_writes_is_trained_on_as_the_student_would_write_it(
    tmp_path, monkeypatch, servers_on_threads, trainer_on_thread
):
    monkeypatch.chdir(ROOT)
    metrics, samples = await trained_by(tmp_path / "run", "{kind: kd, forward_kl_weight: 0}", *FEW)
    tokenizer = spot_async.Vocabulary.load(ROOT / "examples/own_tokenizer/student").tokenizer
    for ids in (sample["response_ids"] for sample in samples):
        assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids
    assert metrics[0]["teacher/accuracy"] > 0.5


def dense_logprobs(models: dict[str, str], samples: list[dict[str, Any]]) -> Iterator[np.ndarray[Any, Any]]:
    """Yield what the teacher's model says, in float64, of each sample's tokens."""
    model = AutoModelForCausalLM.from_pretrained(models["teacher"], dtype=torch.float64)
    tokenizer = spot_async.Vocabulary.load(Path(models["student"])).tokenizer
    for each in samples:
        chat = [{"role": "user", "content": each["problem"]}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        ids = torch.tensor(each["response_ids"])
        with torch.inference_mode():
            found = model(torch.tensor([prompt + ids.tolist()])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        yield found.gather(-1, ids[:, None])[:, 0].numpy()


def said_of(sample: dict[str, Any]) -> np.ndarray[Any, Any]:
    return np.array([np.nan if value is None else value for value in sample["teacher_logprobs"]])
