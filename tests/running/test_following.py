"""Runs whose teacher is the student itself: lagged, live or averaged, on servers of its own or the student's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from engine_requests import dense_logprobs
from kill_drill import ROOT, command, kill_when, weights
from problem_files import FEW
from small_runs import EXAMPLE, example_run, rows

import spot_async
from spot_async.checks.plan import plan_training, plan_warnings
from spot_async.config.loading import config_from
from spot_async.errors import ConfigError
from spot_async.models.vocabulary import Vocabulary
from spot_async.run_directory.manifest import committed

STUDENT = EXAMPLE / "student"
LORA = {"rank": 4, "alpha": 8.0}
BY_ADAPTER = {"kind": "local", "weights": {"transport": "adapter"}}


def tree(folder, teacher, **changes):
    training = {"iterations": 4, "batch_size": 8, "mini_batch_size": 4, "learning_rate": 1e-3, "keep_weights": 8}
    own = {
        "run": {"directory": str(folder / "run")},
        "teacher": {"model": str(STUDENT), **teacher},
        "prompt": {"instruction": "", "template": "student"},
        "sampling": {"max_prompt_tokens": 64, "max_response_tokens": 32},
        "training": {**training, **changes.pop("training", {})},
    }
    return example_run(**{**own, **changes})


@pytest.mark.parametrize(
    ("teacher", "changes", "line"),
    [
        ({"follows": {}}, {}, "teacher.follows: give exactly one of every"),
        ({"follows": {"every": 2, "decay": 0.9}}, {}, "teacher.follows: give exactly one of every"),
        ({"follows": {"decay": 1.0}}, {}, "teacher.follows.decay: input should be less than 1"),
        ({"follows": {"every": 1}, "cache": "kept"}, {}, "cache=kept beside follows: the cache keeps answers"),
        ({"served_by": "student", "cache": "kept"}, {}, "cache=kept beside served_by=student"),
        ({"follows": {"decay": 0.9}, "served_by": "student"}, {}, "served_by=student: those servers have the live"),
        ({"follows": {"every": 1}, "served_by": "student", "backend": {"slots": 3}}, {},
         r"backend: the student's servers answer \(served_by=student\), on its account: remove backend"),
        ({"served_by": "student"}, {}, "teacher.served_by=student: without follows it is the frozen student"),
        ({"served_by": "student"},
         {"student": {"model": str(STUDENT), "backend": BY_ADAPTER}, "training": {"lora": LORA}, "policy": "kd"},
         "teacher.backend writes no responses"),
        ({"follows": {"every": 1}, "model": str(EXAMPLE / "teacher")}, {},
         "teacher.model=.*teacher: it is to be the student, and so begins with its weights: set it to student.model="),
        ({"follows": {"every": 2}, "backend": {"kind": "openai", "url": "http://localhost:1"}}, {},
         "teacher.backend.kind=openai: policy opd needs a teacher that can `update_weights`"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(tmp_path, servers_on_threads, trainer_on_thread, teacher, changes, line):
    with pytest.raises(ConfigError, match=line) as refused:
        spot_async.run(tree(tmp_path, teacher, **changes))
    assert len(str(refused.value).splitlines()) == 1


def test_a_self_without_a_context_of_its_own_is_warned_of_and_one_with_it_is_not(tmp_path):
    def warnings(teacher, **changes):
        config = config_from(tree(tmp_path, teacher, **changes))
        return [line for line in plan_warnings(config, plan_training(config)) if "teaches nothing" in line]

    own = {"prompt": {"instruction": "", "teacher": {"text": "{problem} {answer}", "max_tokens": 96}}}
    (live,) = warnings({"follows": {"every": 1}, "served_by": "student"})
    assert "its KL to the student is 0" in live
    assert warnings({"follows": {"every": 1}}, **own) == []


@pytest.mark.parametrize(
    ("lora", "max_staleness"),
    [
        pytest.param(None, 0, marks=pytest.mark.long),
        (LORA, 2),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((None, 2), (LORA, 0))),
    ],
)
def test_the_pull_of_the_live_self_on_the_students_own_servers_is_nothing(
    tmp_path, servers_on_threads, trainer_on_thread, max_staleness, lora
):
    backend = BY_ADAPTER if lora else {"kind": "local"}
    given = tree(
        tmp_path,
        {"follows": {"every": 1}, "served_by": "student"},
        student={"model": str(STUDENT), "backend": backend},
        training={"lora": lora},
        max_staleness=max_staleness,
    )
    outcome = spot_async.run(given)
    metrics = rows(outcome.directory / "metrics.jsonl")
    assert {row["iteration"] for row in metrics} == {1, 2, 3, 4}
    assert not any(key.startswith("replica/teacher") for row in metrics for key in row)
    assert all(row["stage/score/requests"] == 8 for row in metrics if not max_staleness)
    served = [
        np.subtract(sample["teacher_logprobs"], sample["behavior_logprobs"])
        for sample in rows(outcome.directory / "samples.jsonl")
        if len({*map(str, sample.get("writers", [sample["version"]]))}) == 1
    ]
    if not max_staleness:
        assert all(abs(row["train/pull_mean"]) < 1e-5 for row in metrics)
        assert max(np.abs(each).max() for each in served) < 1e-4


@pytest.mark.parametrize(
    ("follows", "lora"),
    [({"decay": 0.5}, None), pytest.param({"decay": 0.5}, LORA, marks=pytest.mark.long)]
    + [pytest.param({"every": each}, None, marks=pytest.mark.long) for each in (1, 2)],
)
def test_a_teacher_says_what_its_published_weights_say(tmp_path, servers_on_threads, trainer_on_thread, follows, lora):
    backend = BY_ADAPTER if lora else {"kind": "local"}
    given = tree(
        tmp_path,
        {"follows": follows, "backend": backend},
        student={"model": str(STUDENT), "backend": backend},
        training={"lora": lora},
    )
    run = spot_async.run(given).directory
    pulls = [abs(row["train/pull_mean"]) for row in rows(run / "metrics.jsonl")]
    if follows == {"every": 1}:
        assert max(pulls) < 1e-5
        return
    assert pulls[0] < 1e-5 < max(pulls[1:])
    if lora:  # those who read adapters alone are compared in tests/trainer
        assert sorted(each.name for each in (run / "weights/teacher/step-000003/adapter").iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        return
    samples = {row["iteration"]: row for row in rows(run / "samples.jsonl")}
    for iteration, sample in samples.items():
        had = iteration - 1 if "decay" in follows else (iteration - 1) // 2 * 2
        model = run / f"weights/teacher/step-{had:06d}" if had else STUDENT
        np.testing.assert_allclose(sample["teacher_logprobs"], said_by(model, sample), atol=1e-4)


def said_by(model, sample):
    """The log-probabilities (T,) of a sample's tokens under a model's weights."""
    chat = f"<|user|>{sample['problem']}<|assistant|>"
    read = Vocabulary.load(STUDENT).tokenizer(chat, add_special_tokens=False).input_ids
    response = np.array(sample["response_ids"])
    return dense_logprobs(model, np.array(read), response)[np.arange(len(response)), response]


@pytest.mark.long
def test_of_several_teachers_each_follows_in_its_own_way(tmp_path, servers_on_threads, trainer_on_thread):
    given = tree(tmp_path, {}, policy={"kind": "several_teachers:AsksAll"}, training={"iterations": 2})
    del given["teacher"]
    given["teachers"] = {
        "math": {"model": str(EXAMPLE / "teacher")},
        "average": {"model": str(STUDENT), "follows": {"decay": 0.5}},
        "live": {"model": str(STUDENT), "follows": {"every": 1}, "served_by": "student"},
    }
    run = spot_async.run(given).directory
    assert sorted(each.name for each in (run / "weights").iterdir() if each.name.startswith("teacher")) == [
        "teachers.average"
    ]
    assert len(rows(run / "metrics.jsonl")) == 2
    assert spot_async.resume(run, ["training.iterations=3", "training.schedule_iterations=null"]).iterations == 3


def test_the_frozen_self_is_the_base_of_the_students_servers(tmp_path, servers_on_threads, trainer_on_thread):
    given = tree(
        tmp_path,
        {"served_by": "student"},
        student={"model": str(STUDENT), "backend": BY_ADAPTER},
        training={"lora": LORA, "learning_rate": 1e-2},
    )
    run = spot_async.run(given).directory
    sample = rows(run / "samples.jsonl")[-1]
    expected = said_by(STUDENT, sample)
    np.testing.assert_allclose(sample["teacher_logprobs"], expected, atol=1e-4)
    assert np.abs(np.subtract(sample["behavior_logprobs"], expected)).max() > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("follows", ["{decay: 0.7}", pytest.param("{every: 3}", marks=pytest.mark.nightly)])
def test_real_processes_continue_after_a_kill_to_the_same_bits_the_teachers_weights_included(
    tmp_path, monkeypatch, servers_on_threads, trainer_on_thread, follows
):
    monkeypatch.chdir(ROOT)
    whole, run = tmp_path / "whole", tmp_path / "run"
    keys = [
        FEW,
        f"teacher={{model: {STUDENT}, follows: {follows}}}",
        *("training.iterations=7", "training.checkpoint_every=2", "training.batch_size=8"),
        *("training.mini_batch_size=4", "training.keep_weights=8", "evaluation=null", "policy=opd"),
    ]

    spot_async.run("configs/quickstart.yaml", [f"run.directory={whole}", *keys])  # on threads, undisturbed
    again = command("train", "--resume", str(run))
    kill_when(Path.exists, run, command("train", "configs/quickstart.yaml", f"run.directory={run}", *keys))
    kill_when(lambda run: len(committed(run)) > 1, run, again)
    subprocess.run(again, check=True, cwd=ROOT)

    assert weights(run) == weights(whole)
    step = "step-000007" if "decay" in follows else "step-000006"
    for name in (f"weights/teacher/{step}/model.safetensors", "samples.jsonl"):
        assert (run / name).stat().st_size == (whole / name).stat().st_size > 0
    taught = [(path / f"weights/teacher/{step}/model.safetensors").read_bytes() for path in (run, whole)]
    assert taught[0] == taught[1]
    said = [[row["teacher_logprobs"] for row in rows(path / "samples.jsonl")] for path in (run, whole)]
    assert said[0] == said[1]
