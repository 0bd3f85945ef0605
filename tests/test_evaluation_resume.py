"""An evaluation that is killed and continued ends in the same file as one that is not; other settings are refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_async.config import EvaluationConfig
from spot_async.errors import DataError
from spot_async.evaluation.benchmarks import Benchmark
from spot_async.evaluation.response_log import Identity, JudgedResponse, ResponseLog, check_same, read_partial
from spot_async.evaluation.runner import evaluate
from spot_async.prompts import PromptSource
from spot_async.run_directory import RunDirectory
from spot_async.simulation.services import SimulatedStudent
from spot_async.simulation.virtual_time import run_on_virtual_time
from spot_async.types import Problem, Verdict
from spot_async.verification import BoxedMatch

IDENTITY = Identity(model="f00d", backend="local", settings={"evaluation.temperature": 1.0, "evaluation.seed": 42})
NAME = "evaluation.jsonl"
CONFIG = EvaluationConfig(problems={"path": ""}, concurrency=4, verifier={"kind": "boxed_match"})

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


@settings(max_examples=60, deadline=None)
@given(judged=st.lists(responses, max_size=5), cut=st.floats(0, 1))
def test_any_beginning_of_the_file_gives_the_responses_that_are_whole_in_it(judged, cut):
    lines = [msgspec.json.encode(each) + b"\n" for each in (IDENTITY, *judged)]
    data = b"".join(lines)[: round(cut * sum(map(len, lines)))]
    found = read_partial(data)
    whole = [line for i, line in enumerate(lines) if sum(map(len, lines[: i + 1])) <= len(data)]
    assert found.identity == (IDENTITY if whole else None)
    assert found.responses == judged[: max(0, len(whole) - 1)]
    assert data[: found.whole_bytes] == b"".join(whole)


def test_a_damaged_line_that_was_not_the_last_is_named():
    with pytest.raises(DataError, match=r"x:2: cannot continue"):
        read_partial(msgspec.json.encode(IDENTITY) + b"\n{broken\n{}\n", "x")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"settings": {"evaluation.temperature": 0.5, "evaluation.seed": 42}},
            "evaluation.temperature was 1.0 and is 0.5",
        ),
        ({"settings": {"evaluation.seed": 42}}, "evaluation.temperature was 1.0 and is None"),
        ({"model": "beef"}, "student.model"),
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


def benchmarks():
    def sources(count, prefix):
        return [
            PromptSource(problem=Problem(id=f"{prefix}{j}", text="", answer="7"), token_ids=np.array([j + 2], np.int32))
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
        benchmarks(),
        CONFIG,
        generator=student,
        verifiers={"first": BoxedMatch(BoxedMatch.Settings())},
        vocabulary=SimpleNamespace(end_token_ids=(1,), decode=lambda ids: f"\\boxed{{{ids[0]}}}"),
        on_progress=lambda done, total: None,
        known=known,
        keep=keep,
    )
    log.complete(found.responses)
    log.discard_partial()


@settings(max_examples=15, deadline=None)
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
        assert student.requests <= 17 + len(kills) * (CONFIG.concurrency + 1)  # all of them, and those under way
