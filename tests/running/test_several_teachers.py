"""A run of the program with two teachers: both are started, checked, asked, billed and shown under their own names."""

from __future__ import annotations

import pytest
from sleepy_local import SleepyLocal
from small_runs import EXAMPLE, example_run, rows

import spot_async
from spot_async.checks.plan import plan_training
from spot_async.config.loading import config_from
from spot_async.errors import ConfigError


def tree(folder, **changes):
    given = example_run(
        run={"directory": str(folder / "run")},
        teachers={"math": {"model": str(EXAMPLE / "teacher")}, "code": {"model": str(EXAMPLE / "student")}},
        sampling={"max_prompt_tokens": 64, "max_response_tokens": 48},
        policy={"kind": "several_teachers:AsksAll"},
        training={"iterations": 2, "batch_size": 8, "mini_batch_size": 4, "learning_rate": 1e-3},
    )
    return given | changes


def keeping(folder):
    """A run that keeps what its teachers answer."""
    given = tree(folder)
    for teacher in given["teachers"].values():
        teacher["cache"] = str(folder / "answers")
    return given


@pytest.fixture(scope="module")
def first(tmp_path_factory, servers_on_threads, trainer_on_thread):
    """The folder of the first run of `keeping`."""
    folder = tmp_path_factory.mktemp("first")
    spot_async.run(keeping(folder))
    return folder


def weights_of(run):
    return (run / "student" / "model.safetensors").read_bytes()


def test_each_has_its_servers_its_stage_and_its_cache(first, tmp_path):
    row = rows(first / "run" / "metrics.jsonl")[0]
    for name in ("math", "code"):
        assert row[f"stage/score.{name}/requests"] == 8
        assert row[f"score_cache/{name}/misses"] == 8
        assert any(key.startswith(f"replica/teachers.{name}/") for key in row)
    given = keeping(first)
    again = spot_async.run(given | {"run": {"directory": str(tmp_path / "again")}})
    assert all(row["score_cache/code/hits"] == 8 for row in rows(again.directory / "metrics.jsonl"))
    for teacher in given["teachers"].values():
        teacher["replay"] = True
    replayed = spot_async.run(given | {"run": {"directory": str(tmp_path / "replayed")}})
    assert weights_of(first / "run") == weights_of(again.directory) == weights_of(replayed.directory)


def shares_time(folder, name, max_staleness, **keys):
    """Run with two teachers whose backends have these keys; return the run's directory."""
    given = tree(folder, run={"directory": str(folder / name)}, max_staleness=max_staleness)
    for teacher in given["teachers"].values():
        teacher["backend"] = keys
    return spot_async.run(given).directory


@pytest.mark.long
def test_two_that_share_a_gpu_beside_the_trainer_change_nothing_but_time(first, tmp_path):
    SleepyLocal.woken.clear()
    sleeps = {"sleep_while_others_answer": True, "sleep_while_training": True}
    run = shares_time(tmp_path, "time sharing", 0, kind="sleepy_local:SleepyLocal", **sleeps)
    # For the checks of the start, and for each batch. A rollout that comes late begins another time slice.
    batches = len(rows(run / "metrics.jsonl"))
    assert min(SleepyLocal.woken.count(name) for name in ("teachers.math", "teachers.code")) > batches > 0
    assert weights_of(run) == weights_of(first / "run")


@pytest.mark.nightly
def test_two_share_a_gpu_while_the_trainer_trains_on_devices_of_its_own(
    tmp_path, servers_on_threads, trainer_on_thread
):
    SleepyLocal.woken.clear()
    run = shares_time(tmp_path, "run", 1, kind="sleepy_local:SleepyLocal", sleep_while_others_answer=True)
    assert {*SleepyLocal.woken} == {"teachers.math", "teachers.code"}
    metrics = rows(run / "metrics.jsonl")
    assert [sum(row[f"stage/score.{name}/requests"] for row in metrics) for name in ("math", "code")] == [16, 16]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"teacher": {"model": str(EXAMPLE / "teacher")}}, "teachers: teacher is given too"),
        ({"policy": {"kind": "several_teachers:AsksAll", "names": ["math", "physics"]}},
         "asks for physics, and given is only math and code: name a model in teachers.physics.model"),
        ({"teachers": {"Math": {"model": str(EXAMPLE / "teacher")}}}, "give a name of small letters"),
        ({"prompt": {"template": "teachers.physics"}}, "prompt.template=teachers.physics: the run has teachers.math"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(tmp_path, changes, line):
    with pytest.raises(ConfigError, match=line) as refused:
        plan_training(config_from(tree(tmp_path, **changes)))
    assert len(str(refused.value).splitlines()) == 1


def test_equal_models_and_backends_share_their_servers(tmp_path, servers_on_threads, trainer_on_thread):
    model = {"model": str(EXAMPLE / "teacher")}
    teachers = {"math": model, "code": model | {"temperature": 0.5}, "other": {"model": str(EXAMPLE / "student")}}
    plan = plan_training(config_from(tree(tmp_path, teachers=teachers)))
    assert [*plan.served] == ["student", "teachers.math", "teachers.other"]
    outcome = spot_async.run(tree(tmp_path, teachers=teachers))
    row = rows(outcome.directory / "metrics.jsonl")[0]
    assert row["stage/score.math/requests"] == row["stage/score.code/requests"] == 8
    assert {key.split("/")[1] for key in row if key.startswith("replica/")} == {*plan.served}


def test_each_reads_its_own_prompt_at_its_own_temperature(tmp_path):
    teachers = {
        "math": {
            "model": str(EXAMPLE / "teacher"),
            "prompt": {"text": "{problem} {answer}", "max_tokens": 256},
            "temperature": 0.5,
        },
        "code": {"model": str(EXAMPLE / "teacher")},
    }
    config = config_from(tree(tmp_path, teachers=teachers))
    plan = plan_training(config)
    prompt = next(iter(plan.schedule))
    assert len(prompt.read_by("math")) > len(prompt.token_ids)
    assert prompt.read_by("code") is prompt.token_ids
    assert (config.temperature("teachers.math"), config.temperature("teachers.code")) == (0.5, 1.0)
    alone = config.with_teacher("math", "tune")
    assert (alone.teacher.prompt, alone.prompt.teacher.text) == (None, "{problem} {answer}")
    with pytest.raises(ConfigError, match=r"teachers: tune is about one teacher: give --teacher math or"):
        config.with_teacher(None, "tune")
    with pytest.raises(ConfigError, match=r"teachers\.math\.prompt\.text names \{category\}"):
        plan_training(config.model_copy(update={"teachers": categorised(config)}))


def categorised(config):
    own = config.teachers["math"]
    text = own.prompt.model_copy(update={"text": "{problem} {category}"})
    return {**config.teachers, "math": own.model_copy(update={"prompt": text})}


def test_teachers_on_one_server_have_one_budget(tmp_path):
    backend = {"kind": "vllm", "url": "http://127.0.0.1:9", "prices": {"prompt": 1.0, "completion": 1.0}}
    teachers = {
        "math": {"model": str(EXAMPLE / "teacher"), "backend": backend},
        "code": {"model": str(EXAMPLE / "teacher"), "backend": backend | {"budget": 5.0}},
    }
    with pytest.raises(ConfigError, match=r"teachers\.code\.backend\.budget=5\.0: the servers of teachers\.math"):
        plan_training(config_from(tree(tmp_path, teachers=teachers)))
    for teacher in teachers.values():
        teacher["backend"] = backend | {"budget": 5.0}
    plan = plan_training(config_from(tree(tmp_path, teachers=teachers)))
    assert plan.answering == {"teachers.math": "teachers.math", "teachers.code": "teachers.math"}
    for number, teacher in enumerate(teachers.values()):
        teacher["backend"] = backend | {"budget": 5.0 + number, "url": f"http://127.0.0.1:{9 + number}"}
    plan = plan_training(config_from(tree(tmp_path, teachers=teachers)))
    assert plan.answering["teachers.code"] == "teachers.code"
