"""spot-async from a program: what the library page shows is run as it stands there."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from evaluation_files import written
from problem_files import FEW
from run_files import make_run, metrics_row, spot_sample
from small_runs import EXAMPLE, example_run, rows
from typer.testing import CliRunner

import spot_async
from spot_async.cli import app
from spot_async.evaluation.results import BenchmarkResult, EvaluationResult
from spot_async.run_directory.layout import RunDirectory
from spot_async.running import library, measuring, resuming
from spot_async.running.summary import TrainOutcome
from spot_async.types import ScoreRequest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "library.md"
QUICK = example_run(teacher={"model": str(EXAMPLE / "teacher")})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with the files of the page, and the repository's own beside them."""
    path = tmp_path_factory.mktemp("library")
    for name in ("examples", "configs"):
        (path / name).symlink_to(ROOT / name)
    blocks = re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    for name, text in blocks:
        (path / name).write_text(text, encoding="utf-8")
    return path


def python(folder, *arguments):
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.long
@pytest.mark.nightly
def test_a_whole_run_from_a_program_says_only_what_the_program_says(folder):
    first, second, third = python(folder, "whole_run.py").splitlines()
    assert first.startswith("2 iterations; the student is ")
    assert (Path(first.rpartition(" is ")[2]) / "model.safetensors").exists()
    assert second == "3 iterations"
    assert third == "training.batchsize: unknown key; did you mean `batch_size`?"


@pytest.mark.long
def test_a_program_goes_on_with_a_run(folder, monkeypatch, capsys, servers_on_threads, trainer_on_thread):
    monkeypatch.chdir(folder)
    made = runpy.run_path("whole_run.py")
    assert capsys.readouterr().out.splitlines()[1] == "3 iterations"
    assert [row["iteration"] for row in rows(made["outcome"].directory / "metrics.jsonl")] == [1, 2, 3]
    with pytest.raises(spot_async.DataError, match=r"all 3 iterations are trained"):
        spot_async.resume(made["outcome"].directory, ["training.iterations=3"])


def test_one_prompt_through_a_policy_against_given_backends(folder, monkeypatch, capsys, servers_on_threads):
    monkeypatch.chdir(folder)
    runpy.run_path("one_prompt.py", run_name="__main__")
    assert (folder / "runs" / "one_prompt").is_dir()  # server processes need it for their logs, threads do not
    response, *branches = capsys.readouterr().out.splitlines()
    assert response
    assert len(branches) == 8  # two positions, four candidates each
    targets = np.array([float(line.split()[-1]) for line in branches]).reshape(2, 4)
    assert targets.sum(axis=1) == pytest.approx(1, abs=1e-4)


def test_a_second_word_on_simulated_services(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    runpy.run_path("second_word.py", run_name="__main__")
    taught, words = capsys.readouterr().out.split(maxsplit=1)
    assert int(taught) > 0
    assert words == "samples teach something\n"


def test_the_pages_policy_backend_and_verifier_train(folder, monkeypatch, servers_on_threads, trainer_on_thread):
    run = folder / "own_run"
    monkeypatch.chdir(folder)
    for each in (ROOT / "examples" / "custom_backend", ROOT / "examples" / "custom_method", folder):
        monkeypatch.syspath_prepend(str(each))
    done = CliRunner().invoke(app, ["train", "my_run.yaml", f"run.directory={run}"])
    assert done.exit_code == 0, done.output
    metrics = rows(run / "metrics.jsonl")
    assert [row["iteration"] for row in metrics] == [1, 2]
    assert all(0 < row["confident_opd/sure"] < 1 for row in metrics)
    samples = rows(run / "samples.jsonl")
    assert {sample["verdict"] for sample in samples} <= {"correct", "wrong", "no_answer"}
    shown = CliRunner().invoke(app, ["inspect", str(run), "0"])
    assert samples[0]["problem_id"] in shown.output
    assert CliRunner().invoke(app, ["report", str(run)]).exit_code == 0
    assert (run / "report.html").exists()
    assert not (run / "logs" / "teacher.log").exists()  # no local server was started in its place


async def test_the_pages_teacher_scores_as_the_local_server_does(folder, monkeypatch, servers_on_threads):
    from spot_async.backends.local.backend import LocalBackend

    monkeypatch.syspath_prepend(str(ROOT / "examples" / "custom_backend"))
    from inline_teacher import InlineTeacher

    model = str(ROOT / "examples" / "running_sum" / "teacher")
    ours = InlineTeacher(InlineTeacher.Settings(kind="x"), role="teacher", model=model, run_directory=folder)
    theirs = LocalBackend(LocalBackend.Settings(), role="teacher", model=model, run_directory=folder)
    prompt_ids, response_ids = np.arange(5, 12, dtype=np.int32), np.arange(6, 20, dtype=np.int32)
    async with ours, theirs:
        deadline = asyncio.get_running_loop().time() + 60
        request = ScoreRequest(prompt_ids, response_ids, 0.7, deadline)
        scores = [await each.score(request, top_k=3) for each in (ours, theirs)]
        found = [await each.capabilities(deadline=deadline) for each in (ours, theirs)]
    for name in ("logprobs", "topk_logprobs", "entropy"):
        np.testing.assert_allclose(getattr(scores[0], name), getattr(scores[1], name), atol=1e-4)
    assert (found[0].vocab_size, found[0].vocab_fingerprint) == (found[1].vocab_size, found[1].vocab_fingerprint)


def test_the_pages_verifier_judges_numbers(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    from near_enough import NearEnough

    verifier = NearEnough(NearEnough.Settings(kind="x", tolerance=1))
    problem = spot_async.Problem(id="p", text="", answer="16")
    judged = [
        asyncio.run(verifier.verify(problem, text, deadline=0.0))
        for text in (r"\boxed{17}", r"\boxed{18}", r"\boxed{many}", "16")
    ]
    assert judged == ["correct", "wrong", "wrong", "no_answer"]


async def test_a_failure_is_the_error_itself_nothing_is_printed_and_the_mapping_stays_as_it_is(
    tmp_path, monkeypatch, capfd, servers_on_threads, trainer_on_thread
):
    monkeypatch.chdir(ROOT)
    tree = json.loads(json.dumps(QUICK))
    overrides = [f"run.directory={tmp_path / 'run'}", "training.step_timeout_s=0.001"]
    with pytest.raises(spot_async.TrainerError, match=r"training\.step_timeout_s"):
        await spot_async.run_async(tree, overrides)
    assert tree == QUICK
    assert "".join(capfd.readouterr()) == ""


async def test_what_takes_long_is_done_beside_the_loop_of_the_program(
    tmp_path, monkeypatch, servers_on_threads, trainer_on_thread
):
    """As a notebook's, which shows nothing and answers nobody while W&B is imported or prompts are read."""
    calls = Counter()

    def beside(name, function):
        def called(*given, **named):
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
            calls[name] += 1
            return function(*given, **named)

        return called

    @contextmanager
    def sink(directory):
        beside("entering a sink", bool)()
        yield Mock()
        beside("leaving a sink", bool)()

    for owner, name in (
        *((library, name) for name in ("_resolve", "plan_training", "check_room")),
        (resuming, "digest_of_prompts"),
        (measuring, "write_files"),
        *((RunDirectory, name) for name in ("create", "write_summary")),
    ):
        monkeypatch.setattr(owner, name, beside(name, getattr(owner, name)))
    monkeypatch.setattr("spot_async.telemetry.sinks.tensorboard_files", sink)
    monkeypatch.chdir(ROOT)
    held_out = {"problems": QUICK["data"]["train"], "samples": 1, "max_response_tokens": 8, "verifier": "boxed_match"}
    await spot_async.run_async(
        {**QUICK, "evaluation": held_out, "telemetry": {"tensorboard": True}}, [f"run.directory={tmp_path / 'run'}"]
    )
    assert set(calls.values()) <= {1, 2}
    assert len(calls) == 9


def test_an_outcome_shows_where_the_student_is_and_not_every_response(tmp_path):
    before = EvaluationResult((BenchmarkResult(("easy",), (("a response",),), name="sums"),))
    outcome = TrainOutcome(tmp_path, 3, before, None, None, {"trained": 12})
    assert f"student={tmp_path / 'student'!r}, iterations=3, before=" in repr(outcome)
    assert "'sums'" in repr(outcome)
    assert "a response" not in repr(outcome)


def test_importing_the_package_loads_neither_torch_nor_transformers():
    code = (
        "import sys, spot_async\n"
        "spot_async.Config, spot_async.SpotError, spot_async.load_config, spot_async.stages_for\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'slow imports'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=300)


NO_TORCH = """
import json, sys
from pathlib import Path
from unittest import mock

from typer.testing import CliRunner

from spot_async.checks.plan import plan_training
from spot_async.cli import app
from spot_async.config.loading import load_config

def look(after):
    found = {"torch", "sympy", "pandas", "datasets", "pyarrow"} & set(sys.modules)
    assert not found, f"{after} imported {sorted(found)}"

models, few, commands = map(json.loads, sys.argv[1:])
plan_training(load_config(Path("configs/quickstart.yaml")))
look("the quickstart's plan")
for model in models:
    given = [f"student.model={model}", f"teacher.model={model}", *few]
    plan_training(load_config(Path("configs/quickstart.yaml"), given))
    look(model)
with mock.patch("spot_async.tools.tune.tune_command.run"):  # asks servers, which are processes of their own
    for words in commands:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, (words, done.output)
        look(words)
"""


@pytest.mark.long
def test_neither_a_plan_nor_a_command_imports_torch(tmp_path, random_architecture):
    models = []
    for kind in ("plain_llama", "mistral", "qwen2", "qwen3"):
        models.append(str(shutil.copytree(random_architecture(kind), tmp_path / kind)))
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(ROOT / QUICK["student"]["model"] / name, models[-1])
    make_run(tmp_path / "run", [spot_sample()], [metrics_row(1)])
    evaluated = [str(written(tmp_path / name, {"sums": [1, 8]})) for name in ("one", "other")]
    config, few = "configs/quickstart.yaml", FEW
    rates = ("student.tokens_per_s=900", "teacher.tokens_per_s=900", "student.tokens_per_s_each=90",
             "trainer.tokens_per_s=900", "lengths.median=50")  # fmt: skip
    commands = [
        ["train", config, few, "--dry-run"],
        ["eval", config, "--dry-run"],
        ["check", config, few, "--no-servers"],
        ["tune", config, "-o", str(tmp_path / "tuned.yaml"), few],
        ["simulate", config, "--max-staleness", "0", "--iterations", "1", *(f"--rate={each}" for each in rates), few],
        ["inspect", str(tmp_path / "run"), "0"],
        ["report", str(tmp_path / "run")],
        ["compare", *evaluated],
    ]
    short = [few, "sampling.max_response_tokens=64", "evaluation.max_response_tokens=64"]
    python(ROOT, "-c", NO_TORCH, *map(json.dumps, (models, short, commands)))


def test_every_public_name_is_there_and_type_checkers_see_the_same_ones():
    seen = {
        alias.asname
        for node in ast.walk(ast.parse((ROOT / "spot_async" / "public.py").read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spot_async.")
        for alias in node.names
    }
    assert seen == set(spot_async.__all__)
    assert all(getattr(spot_async, name) is not None for name in spot_async.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = spot_async.nothing


async def test_a_second_run_in_the_same_process_is_refused_and_the_first_goes_on(monkeypatch):
    started, end = asyncio.Event(), asyncio.Event()

    async def long_run(*arguments):
        started.set()
        await end.wait()
        return "outcome"

    monkeypatch.setattr("spot_async.running.library._run", long_run)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(spot_async.run_async(QUICK))
        await started.wait()
        with pytest.raises(spot_async.SpotError, match="a run is under way in this process"):
            await spot_async.run_async(QUICK)
        end.set()
    assert first.result() == "outcome"
    assert await spot_async.run_async(QUICK) == "outcome"


@pytest.mark.parametrize(
    ("overrides", "meant"),
    [
        ("training.iterations=2", "['training.iterations=2']"),
        ({"training.iterations": 2, "policy": "opd"}, "['training.iterations=2', 'policy=\"opd\"']"),
        ([("training.iterations", 2)], "['section.key=value']"),
        (None, "['section.key=value']"),
    ],
)
def test_overrides_that_are_no_strings_are_refused_in_words_that_help(overrides, meant):
    with pytest.raises(spot_async.ConfigError, match=re.escape(f"overrides is a list of strings: give {meant} in ")):
        spot_async.run(QUICK, overrides)


async def test_run_in_a_notebook_names_what_to_await():
    with pytest.raises(spot_async.SpotError, match=r"await spot_async\.run_async"):
        spot_async.run(QUICK)
