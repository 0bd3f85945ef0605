"""What a run with a teacher of other tokens is refused or warned for before anything starts."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from joined_teacher import EXAMPLE, with_bytes, with_joined_tokens
from problem_files import write
from small_runs import example_run

from spot_async.checks import own_tokenizers
from spot_async.checks.capabilities import check_capabilities, sums_ends
from spot_async.checks.diagnosis import _of_role
from spot_async.checks.own_tokenizers import read_own_tokens
from spot_async.checks.plan import plan_training, plan_warnings
from spot_async.checks.questions import Asked
from spot_async.config.loading import config_from
from spot_async.errors import SpotError
from spot_async.models.files import read_model
from spot_async.running.rehearsal import rehearse
from spot_async.testing.services import capabilities
from spot_async.types import PolicyNeeds, Problem

REPLACE = {"type": "Replace", "pattern": {"String": "="}, "content": "-"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {role: with_bytes(role, folder / role) for role in ("student", "teacher")}
    found["joined"] = with_joined_tokens(folder / "joined")
    found["rewriting"] = with_joined_tokens(folder / "rewriting")
    path = found["rewriting"] / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": REPLACE}))
    return found


def tree(models: dict[str, Path], name: str, policy: Any = "opd", read: Any = None, **teacher: Any) -> dict[str, Any]:
    return example_run(
        student={"model": str(models["student"])},
        teacher={"model": str(models.get(name, EXAMPLE / name)), "tokenizer": "own", **teacher},
        prompt={"instruction": ""} | ({} if read is None else {"teacher": {"max_tokens": 64, **read}}),
        policy=policy,
        training={"iterations": 1, "batch_size": 4, "mini_batch_size": 4},
    )


DISTILL = {"kind": "distill", "divergence": "jsd"}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("joined", {"tokenizer": "student"}, "different vocabularies .*; set teacher.tokenizer=own if it is to read"),
        ("joined", {"policy": "eopd"}, "teacher.tokenizer=own: policy eopd asks it for a distribution without a tail"),
        ("joined", {"policy": "kd"}, "policy kd asks it for a distribution without a tail.*kd with policy.forward_kl"),
        ("joined", {"policy": {**DISTILL, "tail": False}}, "policy distill asks it for a distribution without a tail"),
        ("joined", {"policy": {**DISTILL, "tail": "conditional"}}, "policy distill asks it for a distribution without"),
        ("joined", {"policy": {**DISTILL, "support": "student"}}, "policy distill asks it about tokens that it"),
        ("joined", {"policy": {**DISTILL, "support": "whole"}}, "policy distill asks it for its whole distribution"),
        ("splitting", {"policy": DISTILL}, "policy distill needs its distribution, and .*% of the places .*: use opd"),
        ("joined", {"follows": {"every": 1}}, "tokenizer=own beside follows: the student has its own tokenizer"),
        ("joined", {"served_by": "student"}, "tokenizer=own beside served_by=student: the student has its own"),
        ("teacher", {"tokenizer": "student", "special_tokens": {"a": "b"}}, "special_tokens: only tokenizer=own needs"),
        ("joined", {"special_tokens": {"<think>": "<|unk|>"}}, "special_tokens: '<think>' is no token of the student"),
        ("teacher/../teacher", {}, "teacher.tokenizer=own: .*only byte-level and SentencePiece tokenizers say which"),
        ("rewriting", {}, "teacher.tokenizer=own: it reads only .*% .*'=.*: it rewrites text"),
        ("joined", {"read": {"template": "student"}}, "prompt.teacher.template=student: teacher reads in tokens of"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_with_its_key(models, tmp_path, name, changes, words):
    given = tree(models, name, **changes)
    if name == "splitting":
        given["student"]["model"], given["teacher"]["model"] = str(models["joined"]), str(models["teacher"])
    if (text := {"rewriting": "a=1", "splitting": "+1-2+3"}.get(name)) is not None:
        problems = [{"id": f"p{n}", "problem": f"{text}{n}", "answer": "1"} for n in range(8)]
        given["data"] = {"train": write(tmp_path, problems)}
    with pytest.raises(SpotError, match=words) as found:
        plan_training(config_from(given), starts=False)
    assert len(str(found.value).splitlines()) == 1


@pytest.mark.parametrize("read", [None, {"text": "{problem}", "template": "plain"}])
def test_each_reads_the_same_problem_by_its_own_tokenizer_and_template(models, read):
    plan = plan_training(config_from(tree(models, "joined", read=read)), starts=False)
    prompt, (student, teacher) = next(iter(plan.schedule)), (plan.student, plan.teachers["teacher"])
    text = student.vocabulary.whole_text(prompt.token_ids) if read is None else prompt.problem.text
    assert teacher.vocabulary.whole_text(prompt.read_by("")).startswith(text)
    assert len(prompt.read_by("")) < len(prompt.token_ids)
    assert plan.stop_token_ids == student.vocabulary.end_token_ids
    assert plan.common.limit is None
    assert plan.of_policy is student


def test_one_of_several_is_judged_by_the_prompts_that_it_reads(models):
    """Ids of the student, which joins, may be none of the teacher's."""
    given = tree(models, "teacher", {"kind": "opd", "route": {"by": "tier", "to": {"hard": "a"}, "default": "b"}})
    given["student"]["model"] = str(models["joined"])
    given["teachers"] = {"a": given["student"], "b": given.pop("teacher")}
    plan = plan_training(config_from(given), starts=False)
    prompts = [*islice(plan.schedule, 3)]
    assert not all(prompt.problem.asks("b") for prompt in prompts)
    first = [prompt.token_ids for prompt in prompts]
    asked = _of_role(Asked(prompts=first, responses=first, stop_token_ids=()), plan, "teachers.b")
    limit = plan.teachers["teachers.b"].vocab_size
    assert max(ids.max() for ids in (*asked.prompts, *asked.responses)) < limit <= max(ids.max() for ids in first)


def test_its_server_must_have_the_vocabulary_of_its_files(models):
    config = config_from(tree(models, "joined"))
    plan = plan_training(config, starts=False)
    student, teacher = (capabilities(48, vocab_fingerprint=each) for each in ("ours", "theirs"))
    found = {"student": student, "teacher": teacher}
    check_capabilities(config, plan.policy.needs, found, own_fingerprints={"teacher": "theirs"})
    with pytest.raises(SpotError, match=r"teacher\.model: teacher\.backend serves another vocabulary"):
        check_capabilities(config, plan.policy.needs, found, own_fingerprints={"teacher": "another"})


def test_its_further_ends_are_asked_for_where_ends_are_summed(models, tmp_path):
    several = shutil.copytree(models["joined"], tmp_path / "several")
    path = several / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [1, 2]}))
    for directory in (models["joined"], several):
        config = config_from(tree({**models, "x": directory}, "x") | {"stages": {"score": {"end_token": "sum"}}})
        plan = plan_training(config, starts=False)
        found = sums_ends(config, plan.policy.needs, plan.student, plan.teachers["teacher"])
        assert found == (directory == several)


POLICY = """
from spot_async.errors import ContractError
from spot_async.policies.opd import OpdPolicy

class Asking(OpdPolicy):
    async def supervise(self, prompt, stages):
        scores = await stages.score((await stages.rollout()).token_ids, top_k=0)
        raise ContractError(f"chunks of {scores.chunks.dtype}, rows {scores.known_rows.any()}")
"""


def test_a_policy_is_rehearsed_with_chunks_before_anything_starts(models, tmp_path, monkeypatch):
    (tmp_path / "asking_policy.py").write_text(POLICY)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = config_from(tree(models, "joined", {"kind": "asking_policy:Asking"}))
    with pytest.raises(SpotError, match="chunks of int32, rows False"):
        rehearse(config, plan_training(config, starts=False))
    config = config_from(tree(models, "joined", DISTILL))
    assert rehearse(config, plan_training(config, starts=False)) == []


def test_the_key_beside_equal_tokenizers_is_a_warning(models):
    config = config_from(tree(models, "teacher"))
    lines = plan_warnings(config, plan_training(config, starts=False))
    assert [line for line in lines if "tokenizer=own" in line] == [
        "teacher.tokenizer=own: its tokenizer is the student's, so this changes nothing: leave it out"
    ]


def test_special_tokens_without_a_counterpart_are_named_with_the_key_that_gives_one(models, tmp_path):
    more = shutil.copytree(models["student"], tmp_path / "more")
    files = json.loads((more / "tokenizer.json").read_text())
    reserved = [{**files["added_tokens"][0], "id": 43 + n, "content": f"<|reserved_{n}|>"} for n in range(4)]
    (more / "tokenizer.json").write_text(json.dumps({**files, "added_tokens": files["added_tokens"] + reserved}))
    config = config_from(tree({**models, "student": more}, "joined"))
    (line,) = [each for each in plan_warnings(config, plan_training(config, starts=False)) if "special_tokens" in each]
    named = "<|reserved_0|>, <|reserved_1|>, <|reserved_2|> and others"
    assert line.startswith(f"teacher.special_tokens: no counterpart of {named}, and all behind one is unknown")


def test_the_digit_trap_is_seen_wherever_the_numbers_stand_in_the_data(models, monkeypatch):
    """A student that joins under a teacher that splits: texts are read from all of the data, not from its start."""
    student, teacher = (
        read_model(role, str(models[name])) for role, name in (("student", "joined"), ("teacher", "teacher"))
    )
    ends = student.vocabulary.end_token_ids
    own = read_own_tokens(config_from(tree(models, "joined")), "teacher", student, teacher, ends)
    texts = [f"a{n}" for n in range(1, 10)] * 20 + ["abcdefgh"] * 400
    monkeypatch.setattr(own_tokenizers, "MOST_BYTES_READ", 500)
    for ordered in (texts, texts[::-1]):
        problems = [Problem(id=str(n), text=text, answer="1") for n, text in enumerate(ordered)]
        found = own_tokenizers.read_texts(own, student, problems, PolicyNeeds(teacher_top_k=1))
        (a,) = teacher.vocabulary.encode("a").tolist()
        assert 0.02 < found.longer_share[a] < 0.5
