"""A run directory: which weights it keeps, and which directories it refuses to read."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest
import structlog
from small_runs import NAMED

from spot_async.config.loading import validate
from spot_async.errors import ConfigError, DataError, StorageError
from spot_async.evaluation.response_log import JudgedResponse
from spot_async.evaluation.results import BenchmarkResult, EvaluationResult
from spot_async.loop.events import Evaluated
from spot_async.models.weight_files import delete_weights, in_use
from spot_async.run_directory.layout import RunDirectory, name_of, name_of_run
from spot_async.run_directory.run_weights import RunWeights
from spot_async.telemetry.evaluations import BestCheckpoint, EvaluationHistory
from spot_async.types import Verdict, WeightSnapshot, WeightVersion


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "run", validate(NAMED))


def publish(run, step):
    """What the trainer leaves of one step, and prunes of others."""
    directory = run.path / "weights" / f"step-{step:06d}"
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_text(f"weights of {step}")
    run.weights.advance_student_to(directory)
    for old in sorted(directory.parent.glob("step-*"))[:-2]:
        shutil.rmtree(old)
    return directory


def test_student_advances_to_whole_weights_and_never_back(run):
    first, second, alone = (run.path / "weights" / f"step-{step:06d}" for step in (1, 2, 3))
    for directory, file in ((first, "model.safetensors"), (second, "model.safetensors.index.json"), (alone, "a.json")):
        directory.mkdir(parents=True)
        (directory / file).write_text("")
    for directory, now in ((alone, None), (first, first), (second, second), (first, second), (alone, second)):
        run.weights.advance_student_to(directory)
        assert not (run.path / "student").exists() if now is None else (run.path / "student").resolve() == now
    shutil.rmtree(second)  # the link leads nowhere
    run.weights.advance_student_to(first)
    assert (run.path / "student").resolve() == first


def evaluation(*rows):
    """From rows of 1 (correct) and 0, one per problem."""

    def response(j, i, cell):
        verdict = Verdict.CORRECT if cell else Verdict.WRONG
        return JudgedResponse(problem_id=str(j), sample=i, verdict=verdict, tokens=1, finish_reason="stop", response="")

    responses = tuple(tuple(response(j, i, cell) for i, cell in enumerate(row)) for j, row in enumerate(rows))
    return EvaluationResult((BenchmarkResult(tiers=(None,) * len(rows), responses=responses),))


def evaluated(run, step, result):
    return Evaluated(
        step, result, WeightSnapshot(directory=str(publish(run, step)), version=WeightVersion(0, step)), seconds=1.0
    )


@pytest.mark.parametrize("hard_links", [True, False])
def test_the_best_weights_outlive_the_trainers_pruning_and_the_earlier_of_equals_stays(run, monkeypatch, hard_links):
    if not hard_links:

        def refuse(source, destination, **rest):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refuse)
    history = EvaluationHistory(run)
    results = [evaluation([0, 0], [1, 0]), None, evaluation([1, 0], [1, 0]), None, evaluation([1, 1], [0, 0]), None]
    for step, result in enumerate(results, start=1):
        if result is None:
            publish(run, step)
        else:
            history.on(evaluated(run, step, result))
    assert (run.path / "best" / "model.safetensors").read_text() == "weights of 3"
    assert (run.path / "student" / "model.safetensors").read_text() == "weights of 6"
    assert sorted(each.name for each in (run.path / "weights").iterdir()) == [
        "best-000003",
        "step-000005",
        "step-000006",
    ]
    assert (history.best.iteration, history.best.value) == (3, 0.5)
    assert history.result_after(5) is results[4]
    assert history.result_after(6) is None


def test_a_history_that_goes_back_keeps_the_best_of_the_weights_that_are_there(run):
    history = EvaluationHistory(run)
    results = {1: evaluation([0, 0], [1, 0]), 2: evaluation([1, 1], [1, 0]), 3: evaluation([1, 1], [1, 1])}
    history.on(evaluated(run, 1, results[1]))
    publish(run, 2)  # evaluated, and a kill came before these were kept
    history.go_back(results)  # the third ones are gone
    assert (history.best.iteration, history.result_after(3)) == (2, results[3])
    assert (run.path / "best" / "model.safetensors").read_text() == "weights of 2"
    history.go_back({1: results[1]})
    assert (history.best.iteration, history.result_after(3)) == (1, None)
    assert (run.path / "best" / "model.safetensors").read_text() == "weights of 1"
    history.go_back({})
    assert history.best is None


def test_earlier_best_weights_that_cannot_be_deleted_end_nothing(run, monkeypatch):
    def refuse(path):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    kept = [publish(run, step) for step in (1, 2)]
    run.weights.keep_best(kept[0])
    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(shutil, "rmtree", refuse)
        run.weights.keep_best(kept[1])
    assert "best-000001" in logs[0]["directory"]
    assert (run.path / "best" / "model.safetensors").read_text() == "weights of 2"


def test_the_best_weights_have_their_name_once_they_are_complete_and_the_last_best_stays_until_then(run, monkeypatch):
    first, second = (publish(run, step) for step in (1, 2))
    (second / "tokenizer.json").write_text("words")
    run.weights.keep_best(first)
    kept = run.path / "weights" / "best-000002"
    linked, link = [], os.link

    def full_disk(source, destination):
        assert not kept.exists()  # a reader, or a kill now, would find half of it
        if linked:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        linked.append(source)
        link(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full_disk)
        patch.setattr(shutil, "copy2", full_disk)
        with pytest.raises(StorageError, match="No space left"):
            run.weights.keep_best(second)
    assert (run.path / "best" / "model.safetensors").read_text() == "weights of 1"
    assert sorted(each.name for each in kept.parent.iterdir()) == ["best-000001", "step-000001", "step-000002"]
    for _ in range(2):  # once more is harmless
        run.weights.keep_best(second)
        assert (run.path / "best" / "model.safetensors").read_text() == "weights of 2"
        assert sorted(each.name for each in kept.parent.iterdir()) == ["best-000002", "step-000001", "step-000002"]


def test_weights_in_use_are_not_deleted(tmp_path):
    directory = tmp_path / "step-000001"
    directory.mkdir()
    with in_use(directory), in_use(directory):
        delete_weights(directory)
        assert directory.is_dir()
    delete_weights(directory)
    assert not directory.exists()
    with in_use(directory):  # gone, or never there: who wants it will say so
        pass


def test_the_best_average_decides_what_is_best(run):
    history = EvaluationHistory(run)
    history.on(evaluated(run, 1, evaluation([1, 1, 1], [0, 0, 0])))
    history.on(evaluated(run, 2, evaluation([1, 0, 0], [1, 0, 0])))
    assert history.best == BestCheckpoint(1, 3, 0.5, 0.5)


def test_a_run_directory_is_recognised_and_a_newer_or_foreign_one_refused_in_one_line(run, tmp_path):
    assert RunDirectory.open(run.path).path == run.path
    (run.path / "run.json").write_text(json.dumps({"format": 5, "new": "things"}))
    with pytest.raises(DataError, match=r"has format 5, newer than this spot-async can read \(4\)"):
        RunDirectory.open(run.path)
    for text in (b"[1]", b"{}", b"no json", b'{"format":1,"command":"\xff"}'):
        (run.path / "run.json").write_bytes(text)
        with pytest.raises(DataError, match="no run directory"):
            RunDirectory.open(run.path)
    with pytest.raises(DataError, match="no run directory"):
        RunDirectory.open(tmp_path)


def contents(directory):
    return {each: each.read_bytes() if each.is_file() else None for each in directory.rglob("*")}


def refusal(run, purpose="train"):
    """Why `run`'s directory is not used for another, which leaves everything in it as it was."""
    before = contents(run.path)
    with pytest.raises(ConfigError) as refused:
        RunDirectory.create(run.path, validate(NAMED), purpose)
    assert contents(run.path) == before
    return str(refused.value)


@pytest.mark.parametrize("purpose", ["train", "eval"])
def test_a_start_that_came_to_nothing_is_refused_with_what_can_be_deleted(run, purpose):
    (run.path / "trainer.json").write_text("{}")
    (run.path / "weights").mkdir()
    assert "nothing was trained in it: delete it if that run is over, give another" in refusal(run, purpose)
    (run.path / "weights" / "step-000000").mkdir()  # what training begins with
    assert "nothing was trained in it: delete it if that run is over, give another" in refusal(run, purpose)
    (run.path / ".lock").write_text("process 12 on another.machine\n")  # whose lock nobody sees from here
    assert "delete it if process 12 on another.machine is over, give another" in refusal(run, purpose)


def test_a_second_start_takes_nothing_from_a_run_that_goes_on_and_names_its_process(run):
    with run.locked():
        for name in ("notes.txt", "samples.jsonl"):
            line = refusal(run)
            assert f"is in use by process {os.getpid()} on " in line
            assert "delete" not in line
            (run.path / name).touch()


def test_the_later_of_two_starts_that_both_saw_an_empty_directory_is_refused(run, monkeypatch):
    monkeypatch.setattr(RunDirectory, "check_unused", lambda *_: None)
    assert "cannot use" in refusal(run, "eval")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("file", "File exists"),
        ("file/run", "Not a directory"),
        ("/proc/nowhere/run", "No such file or directory"),
        ("n" * 300, "File name too long"),
        ("zero\0byte", "embedded null (byte|character in path)"),  # before Python 3.13, and since
    ],
)
def test_a_directory_that_cannot_be_made_is_found_before_anything_else_is_done(tmp_path, name, why):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"^run.directory: cannot use .*{why}$"):
        RunDirectory.check_usable(tmp_path / name)


def test_looking_whether_a_directory_can_be_made_leaves_nothing_behind(tmp_path):
    (tmp_path / "empty").mkdir()
    RunDirectory.check_usable(tmp_path / "empty")
    RunDirectory.check_usable(tmp_path / "runs" / "mine" / "1")
    assert [each.name for each in tmp_path.rglob("*")] == ["empty"]


@pytest.mark.parametrize(
    "name",
    [
        "samples.jsonl",
        "evaluation-before.jsonl.partial",
        "spending.jsonl",
        "weights/step-000001",
        "notes.txt",
        "run.json",
    ],
)
def test_nobody_is_told_to_delete_anything_of_value(run, name):
    (run.path / name).parent.mkdir(exist_ok=True)
    (run.path / name).write_text('{"format": 1, "command": "eval"}' if name == "run.json" else "something")
    why = "" if name == "run.json" else f"continue the run in it by --resume {run.path}, "
    assert refusal(run).endswith(f"is not empty; {why}give another, or null for a new one")


def test_fewer_weights_than_the_student_link_needs_are_refused():
    with pytest.raises(ConfigError, match="keep_weights: input should be greater than or equal to 2"):
        validate({**NAMED, "training": {**NAMED["training"], "keep_weights": 1}})


def test_a_run_repeated_from_its_own_configuration_keeps_its_name(tmp_path):
    for directory, name in (("runs/my/20261120-201500", "my"), ("elsewhere", "elsewhere")):
        run = tmp_path / directory
        run.mkdir(parents=True)
        assert name_of(run / "config.yaml") == "config"  # a file like any other
        (run / "run.json").write_text('{"format": 1}')
        assert name_of(run / "config.yaml") == name_of_run(run) == name


def test_weights_published_elsewhere_are_copied_when_a_checkpoint_needs_them(run, tmp_path):
    elsewhere = tmp_path / "memory"
    run.weights = RunWeights(run.path, elsewhere)
    for step in (1, 2, 3):
        directory = elsewhere / f"step-{step:06d}"
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_text(f"weights of {step}")
        run.weights.advance_student_to(directory)
    assert not (run.path / "student").is_symlink(), "it would lead nowhere once the run is over"
    for step in (1, 2):
        run.weights.keep(step)
    kept = run.path / "weights" / "step-000002"
    assert (run.path / "student").resolve() == kept == run.weights.after(2)
    assert list(kept.parent.iterdir()) == [kept]
    # A lost trainer goes back: the next one publishes iteration 3 again.
    run.weights.forget_after(2)
    assert sorted(each.name for each in elsewhere.iterdir()) == ["step-000001", "step-000002"]
    shutil.rmtree(elsewhere)
    assert (run.path / "student" / "model.safetensors").read_text() == "weights of 2"
