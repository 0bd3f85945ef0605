"""An evaluation that is killed and continued ends in the same file as one that is not; other settings are refused."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from spot_async.base.seeds import derive_seed
from spot_async.checks.plan import plan_evaluation
from spot_async.cli import app
from spot_async.config import EvaluationConfig
from spot_async.config.loading import load_config
from spot_async.errors import DataError
from spot_async.evaluation.benchmarks import Benchmark
from spot_async.evaluation.response_log import (
    Identity,
    JudgedResponse,
    ResponseLog,
    check_same,
    count_kept,
    identity_of,
    model_fingerprint,
    read_partial,
)
from spot_async.evaluation.runner import ResponseSampler, collected, evaluate
from spot_async.models.files import read_model
from spot_async.run_directory.layout import RunDirectory
from spot_async.running.measuring import Occasion, write_files
from spot_async.testing.services import SimulatedStudent
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.types import Problem, PromptSource, Verdict
from spot_async.verification import BoxedMatch

ROOT = Path(__file__).parents[2]
SETTINGS = {"evaluation.temperature": 1.0, "evaluation.seed": 42, "evaluation.prompts": "a"}
IDENTITY = Identity(model="f00d", backend="local", settings=SETTINGS)
NAME = "evaluation.jsonl"
CONFIG = EvaluationConfig(
    problems={"path": ""}, concurrency=4, verifier={"kind": "boxed_match"}, stop=["!"], top_k=20, min_p=0.1,
    presence_penalty=1.5, frequency_penalty=0.1, repetition_penalty=1.1,
)  # fmt: skip

responses = st.builds(
    JudgedResponse,
    benchmark=st.sampled_from(["a", "b"]),
    problem_id=st.text(max_size=3),
    sample=st.integers(0, 7),
    verdict=st.sampled_from([*Verdict, None]),
    tokens=st.integers(0, 9),
    finish_reason=st.sampled_from(["stop", "length"]),
    response=st.text(max_size=8),  # line breaks of every kind included
)


def test_a_model_directory_may_hold_names_that_are_no_utf_8(tmp_path):
    before = model_fingerprint(tmp_path)
    (tmp_path / os.fsdecode(b"notes \xff.txt")).write_text("someone's")
    assert model_fingerprint(tmp_path) != before


@settings(max_examples=60)
@given(judged=st.lists(responses, max_size=5), cut=st.floats(0, 1))
def test_any_beginning_of_the_file_gives_the_responses_that_are_whole_in_it(judged, cut):
    lines = [msgspec.json.encode(each) + b"\n" for each in (IDENTITY, *judged)]
    data = b"".join(lines)[: round(cut * sum(map(len, lines)))]
    with TemporaryDirectory() as directory:
        path = Path(directory) / NAME
        path.write_bytes(data)
        found = read_partial(path)
    whole = [line for i, line in enumerate(lines) if sum(map(len, lines[: i + 1])) <= len(data)]
    assert found.identity == (IDENTITY if whole else None)
    assert found.responses == judged[: max(0, len(whole) - 1)]
    assert data[: found.whole_bytes] == b"".join(whole)


def test_a_damaged_line_that_was_not_the_last_is_named(tmp_path):
    (tmp_path / "x").write_bytes(msgspec.json.encode(IDENTITY) + b"\n{broken\n{}\n")
    with pytest.raises(DataError, match=r"x:2: cannot continue"):
        read_partial(tmp_path / "x")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"settings": SETTINGS | {"evaluation.temperature": 0.5}},
            "evaluation.temperature was 1.0 and is 0.5",
        ),
        ({"settings": {"evaluation.seed": 42}}, "evaluation.temperature was 1.0 and is not set now"),
        ({"settings": IDENTITY.settings | {"evaluation.benchmarks.A.samples": 8}}, "benchmarks.A was not part of it:"),
        ({"settings": SETTINGS | {"evaluation.top_k": 20}}, "evaluation.top_k was not set and is 20 now"),
        ({"settings": IDENTITY.settings | {"evaluation.prompts": "b"}}, "evaluation has other problems, answers"),
        ({"model": "beef"}, "the files of student.model are not those it was begun with"),
        ({"backend": "vllm"}, "student.backend.kind was 'local' and is 'vllm'"),
    ],
)
def test_responses_of_another_model_or_of_other_settings_are_refused_by_the_key(tmp_path, changed, message):
    directory = RunDirectory(tmp_path)
    ResponseLog(directory, NAME, IDENTITY).open()
    with pytest.raises(DataError) as refused:
        ResponseLog(directory, NAME, msgspec.structs.replace(IDENTITY, **changed)).open()
    assert message in str(refused.value)
    check_same(IDENTITY, IDENTITY, "x")


@pytest.fixture
def resumed(monkeypatch, tmp_path):
    """What `eval --resume` is refused with, in a directory that `command` made."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "400")

    def refusal(command="eval", overrides=(), within=lambda directory: nullcontext()):
        directory = RunDirectory.create(tmp_path / command, load_config(Path("configs/quickstart.yaml")), command)
        words = ["eval", "configs/quickstart.yaml", *overrides, "--resume", str(directory.path)]
        with within(directory):
            result = CliRunner().invoke(app, words)
        assert result.exit_code == 2, result.output
        (line,) = result.stderr.splitlines()
        return line

    return refusal


def test_a_directory_that_another_process_evaluates_into_is_refused_with_the_process(resumed, tmp_path):
    line = resumed(within=lambda directory: directory.locked())
    assert re.search(rf"eval is in use by process {os.getpid()} on \S+: wait for its end, or stop it first$", line)
    with RunDirectory.open(tmp_path / "eval").locked():  # and free once that has left
        pass


def test_two_directories_are_refused_and_a_used_one_names_the_option(resumed, tmp_path):
    line = resumed(overrides=[f"run.directory={tmp_path / 'other'}"])
    assert re.search(r"run\.directory=\S+/other: --resume continues in \S+/eval; name one", line)
    again = CliRunner().invoke(app, ["eval", "configs/quickstart.yaml", f"run.directory={tmp_path / 'eval'}"])
    assert f"is not empty; continue the evaluation in it by --resume {tmp_path / 'eval'}, give another" in again.stderr


def test_a_training_run_is_no_evaluation_to_go_on_with(resumed):
    assert "train is the directory of a training run: give that of an evaluation, or begin one with" in resumed("train")


def test_other_settings_and_damaged_lines_are_refused_before_a_server_is_started(resumed, tmp_path):
    def begun(directory, *lines):
        config = load_config(Path("configs/quickstart.yaml"))
        student = read_model("student", config.student.model)
        identity = identity_of(config, plan_evaluation(config, student), student.directory)
        ResponseLog(directory, NAME, identity).open()
        directory.append(f"{NAME}.partial", list(lines))
        return nullcontext()

    line = resumed(overrides=["evaluation.temperature=0.5"], within=begun)
    assert "cannot be continued, evaluation.temperature was 1.0 and is 0.5 now" in line
    shutil.rmtree(tmp_path / "eval")
    line = resumed(within=lambda directory: begun(directory, {"problem_id": "1"}))  # one line: no advice to resume
    assert "partial:2: cannot continue this evaluation: Object missing required field" in line
    assert line.endswith("remove the line, and that response is asked for again")


def test_a_complete_evaluation_shows_its_table_and_starts_nothing(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    config = load_config(Path("configs/quickstart.yaml"), ["evaluation.samples=4"])
    student = read_model("student", config.student.model)
    planned = plan_evaluation(config, student)
    directory = RunDirectory.create(tmp_path / "eval", config, "eval")
    judged = [
        JudgedResponse(
            problem_id=source.problem.id, sample=i, verdict=verdict, tokens=1, finish_reason="stop", response=""
        )
        for source in planned[0].sources
        for i, verdict in enumerate((Verdict.CORRECT, *3 * [Verdict.WRONG]))
    ]
    result = collected(planned, {each.key: each for each in judged}, ())
    identity = identity_of(config, planned, student.directory)
    log = ResponseLog(directory, NAME, identity)
    write_files(Occasion(directory, student.directory), result, log, planned, seconds=2.5)
    words = ["eval", "configs/quickstart.yaml", "evaluation.samples=4", "--resume", str(directory.path)]
    shown = " ".join(CliRunner().invoke(app, words).output.split())
    assert "this evaluation is complete; for another pass_k or verifier judge it again: --judge RUN" in shown
    assert re.search(r"all \d+ 25.0 ±0.0 100.0 ±0.0", shown)

    assert count_kept(directory.path / NAME) == len(judged)  # which is what a failure after all that would name
    (directory.path / NAME).unlink()  # large, and not needed for what the figures hold

    def no_locks(*args):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    again = CliRunner().invoke(app, words)
    assert (again.exit_code, "±0.0" in again.output) == (0, True)
    assert "Function not implemented; nothing keeps other processes from evaluating into it" in again.output


def benchmarks():
    def sources(count, prefix):
        return [
            PromptSource(
                problem=Problem(id=f"{prefix}{j}", text=f"of {prefix}{j}", answer="7"),
                token_ids=np.array([j + 2], np.int32),
            )
            for j in range(count)
        ]

    settings = BoxedMatch.Settings()
    first = Benchmark("first", sources(5, "p"), samples=3, max_response_tokens=30, verifier=settings)
    return [first, replace(first, name="second", sources=sources(2, "q"), verifier=None, samples=1)]


class Killed(Exception):
    pass


async def run_until(directory, student, kill_after):
    """One evaluation into `directory`, killed once so many responses are kept."""
    log = ResponseLog(directory, NAME, IDENTITY)
    known, kept = log.open(), []

    async def keep(response):
        if len(kept) == kill_after:
            raise Killed
        await log.append(response)
        kept.append(response)

    found = await evaluate(
        ResponseSampler(
            benchmarks(),
            CONFIG,
            generator=student,
            verifiers={"first": BoxedMatch(BoxedMatch.Settings())},
            vocabulary=SimpleNamespace(end_token_ids=(1,), decode=lambda ids: f"\\boxed{{{ids[0]}}}"),
        ),
        known=known,
        keep=keep,
    )
    log.complete(found.responses)
    log.discard_partial()


@settings(max_examples=15)
@given(kills=st.lists(st.integers(0, 9), max_size=3), seed=st.integers(0, 99))
def test_killed_and_continued_it_writes_the_same_bytes_and_asks_for_nothing_twice(kills, seed):
    with TemporaryDirectory() as whole, TemporaryDirectory() as parts:
        run_on_virtual_time(run_until(RunDirectory(Path(whole)), SimulatedStudent(), None))
        student, draw, directory = SimulatedStudent(), random.Random(seed), RunDirectory(Path(parts))
        for kill_after in (*kills, None):
            try:
                run_on_virtual_time(run_until(directory, student, kill_after))
            except* Killed:
                with (directory.path / f"{NAME}.partial").open("ab") as file:
                    file.write(b'{"benchmark":"first","prob'[: draw.randrange(20)])
            else:
                break
        assert (directory.path / NAME).read_bytes() == (Path(whole) / NAME).read_bytes()
        assert [each.name for each in directory.path.iterdir()] == [NAME]
        row = msgspec.json.decode((directory.path / NAME).read_bytes().splitlines()[4])  # problem p1, sample 1
        said = {name: row[name] for name in ("problem", "gold", "extracted", "seed")}
        assert said == {
            "problem": "of p1",
            "gold": "7",
            "extracted": row["response"][7:-1],
            "seed": derive_seed(42, 1, 1),
        }
        assert student.requests <= 17 + len(kills) * (CONFIG.concurrency + 1)  # all of them, and those under way
