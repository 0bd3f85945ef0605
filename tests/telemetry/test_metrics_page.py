"""docs/metrics.md names exactly what a run writes, and every sink gets just that."""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from joined_policy import TakesTurns
from metrics_page import of_area, rows
from only_teacher import only

from spot_async.errors import PermanentError, TransientError
from spot_async.evaluation.response_log import JudgedResponse
from spot_async.evaluation.results import BenchmarkResult, EvaluationResult
from spot_async.loop.publishing import LiveEvaluation
from spot_async.policies.distill import DistillPolicy
from spot_async.policies.eopd import EopdPolicy
from spot_async.policies.grpo import GrpoPolicy
from spot_async.policies.kd import KdPolicy
from spot_async.policies.opd import OpdPolicy
from spot_async.policies.spot import SpotPolicy
from spot_async.replicas.life_cycle import State
from spot_async.replicas.replica import ReplicaStatus
from spot_async.run_directory.layout import RunDirectory
from spot_async.spending.account import Account
from spot_async.spending.prices import Prices
from spot_async.spending.run_spending import RunSpendingMetrics
from spot_async.spending.score_cache import CacheCounters
from spot_async.telemetry.meters import LoopLag, RunMeters
from spot_async.telemetry.run_log import RunLog
from spot_async.testing.services import (
    VOCAB_SIZE,
    SimulatedStudent,
    SimulatedTeacher,
    SimulatedTrainer,
    SimulatedVerifier,
    capabilities,
)
from spot_async.testing.simulation import make_policy, make_run, policy_context, simulated_prompts
from spot_async.types import Traffic, Verdict

PLACEHOLDERS = {"<stage>": r"[\w.]+", "<replica>": r"[\w.-]+", "<role>": r"[\w.]+", "<tier>": r"\w+", "<k>": r"\d+",
                "<category>": r"\w+", "<domain>": r"\w+", "<name>": r"\w+", "<figure>": r"\w+",
                "<verdict>": "(right|wrong)"}  # fmt: skip


TRUNCATED = {
    "student": capabilities(VOCAB_SIZE, candidate_logprobs="none"),
    "teacher": capabilities(VOCAB_SIZE),
}


def documented():
    """Regular expressions by the name as the page writes it."""
    names, patterns = rows(), {}
    for name in names:
        pattern = re.escape(name)
        for placeholder, expression in PLACEHOLDERS.items():
            pattern = pattern.replace(re.escape(placeholder), expression)
        patterns[name] = re.compile(pattern)
    assert len(patterns) == len(names), "a metric has two rows"
    return patterns


class Trainer(SimulatedTrainer):
    """Reports what the real one does; tests/trainer compares that with the page."""

    async def train(self, iteration, batch):
        report = await super().train(iteration, batch)
        return msgspec.structs.replace(
            report, metrics=dict.fromkeys(of_area("train"), 1.0), performance=dict.fromkeys(of_area("perf"), 1.0)
        )

    async def published(self, step):
        await asyncio.sleep(0.1)
        return ()


async def evaluate(iteration):
    response = JudgedResponse(
        problem_id="p", sample=0, verdict=Verdict.CORRECT, tokens=1, finish_reason="stop", response=""
    )
    tiers = ("easy", "easy", "hard", "hard")
    return EvaluationResult((BenchmarkResult(tiers=tiers, responses=((response, response),) * 4),))


class CountedStudent(SimulatedStudent):
    """Behind a connection on which a request takes 100 bytes and a reply 1,000."""

    def __init__(self):
        super().__init__()
        self.traffic = Traffic()

    async def generate(self, *args, **rest):
        self.traffic.requests += 1
        self.traffic.sent_bytes += 100
        self.traffic.received_bytes += 1000
        return await super().generate(*args, **rest)


class CountedServer:
    """One replica that has half of every prompt in its cache."""

    def __init__(self, traffic):
        self.traffic = traffic

    @property
    def replicas(self):
        counted = msgspec.structs.replace(
            self.traffic, prompt_tokens=8 * self.traffic.requests, cached_tokens=4 * self.traffic.requests
        )
        return [
            ReplicaStatus(
                name="student-1",
                state=State.SERVING,
                in_flight=0,
                limit=512,
                decreases=0,
                restarts=0,
                requests=counted.requests,
                busy_s=0.1 * counted.requests,
                away_s=0.0,
                version=None,
                traffic=counted,
            )
        ]


class ReadingTeacher(SimulatedTeacher):
    """One that reads text, the first token of every response otherwise, and some in tokens of its own."""

    async def score(self, *args, **rest):
        scores = await super().score(*args, **rest)
        places = np.arange(len(scores.entropy), dtype=np.int32)
        chunks = np.where(places > 0, places // 2, -1).astype(np.int32)
        return msgspec.structs.replace(scores, valid=places > 0, chunks=chunks)


def with_category(prompt):
    category = ("algebra", "logic")[prompt.ordinal % 2]
    return msgspec.structs.replace(prompt, problem=msgspec.structs.replace(prompt.problem, category=category))


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """A simulated SPOT run: the rows of its metrics.jsonl, and what a sink was given."""
    return simulate(SpotPolicy, tmp_path_factory.mktemp("run"), probes=2, baseline=0.5)


def simulate(policy, folder, verifier=None, capabilities=None, teacher=None, max_staleness=0, teachers=(), **settings):
    directory, student, given = RunDirectory(folder), CountedStudent(), []

    run = make_run(
        policy()
        if policy is TakesTurns
        else make_policy(policy, policy_context(reference_kl=True, teachers=teachers), **settings),
        student=student,
        teachers=teacher and only(teacher),
        verifier=verifier,
        trainer=Trainer(),
        evaluation=LiveEvaluation(lambda iteration: iteration % 2 == 0, evaluate),
        prompts=map(with_category, simulated_prompts(problems=1000)),
        capabilities=capabilities,
        iterations=4,
        max_staleness=max_staleness,
    )
    log = RunLog(
        directory,
        run.stages,
        [SimpleNamespace(write=lambda iteration, metrics, texts: given.append((iteration, metrics, texts)))],
        RunMeters(
            {"student": CountedServer(student.traffic), "teacher": SimpleNamespace()},
            LoopLag(),
            RunSpendingMetrics(
                {"teacher": Account("teacher", prices=Prices()), "student": Account("student")},
                {"teacher": SimpleNamespace(counters=CacheCounters(), size_bytes=0)},
            ),
        ),
        is_strict=max_staleness == 0,
    )
    run.stages.events.subscribe(log)
    run.finish()
    return [json.loads(line) for line in (directory.path / "metrics.jsonl").read_text().splitlines()], given


def test_every_metric_of_every_method_has_its_row_and_every_row_its_metric(simulated, tmp_path_factory):
    rows, _ = simulated
    rows = rows + simulate(SpotPolicy, tmp_path_factory.mktemp("truncated"), capabilities=TRUNCATED)[0]
    rows = rows + simulate(OpdPolicy, tmp_path_factory.mktemp("masked"), teacher=ReadingTeacher())[0]
    rows = rows + simulate(OpdPolicy, tmp_path_factory.mktemp("asynchronous"), max_staleness=1)[0]
    rows = rows + simulate(OpdPolicy, tmp_path_factory.mktemp("several"), teachers=("math", "code"))[0]
    others = (OpdPolicy, EopdPolicy, GrpoPolicy, KdPolicy, TakesTurns)
    rows = rows + [row for each in others for row in simulate(each, tmp_path_factory.mktemp(each.__name__))[0]]
    written = {name for row in rows for name in row} - {"iteration", "time"}
    patterns = documented()
    assert {name for name in written if not any(p.fullmatch(name) for p in patterns.values())} == set()
    assert {row for row, p in patterns.items() if not any(p.fullmatch(name) for name in written)} == set()


def test_only_an_asynchronous_run_says_how_old_its_tokens_are_and_what_publishing_did(simulated, tmp_path):
    rows, _ = simulate(OpdPolicy, tmp_path, max_staleness=1)
    lags = [{int(name[4:]): tokens for name, tokens in row.items() if name.startswith("lag/")} for row in rows]
    assert lags[0].keys() == {0}  # sampled before anything was trained
    assert all(lag.keys() == {1} for lag in lags[1:])  # the servers are quick: each batch is sampled one update early
    assert [row["weights/served"] for row in rows] == [0.0, 1.0, 2.0, 4.0]
    assert all(sum(seconds for name, seconds in row.items() if name.startswith("publish/")) > 0 for row in rows)
    words = ("lag/", "weights/", "publish/")
    assert not any(name.startswith(words) for row in simulated[0] for name in row)


def test_traffic_is_that_of_the_iteration_by_the_role_of_the_server(simulated):
    rows, _ = simulated
    for row in rows:
        requests = row["stage/rollout/requests"] + row["stage/probe/requests"]
        assert row["traffic/student/requests"] == requests
        assert row["traffic/student/sent_bytes"] == 100 * requests
        assert row["traffic/student/received_bytes"] == 1000 * requests
        assert not any(name.startswith("traffic/teacher/") for name in row)  # it counts none


def test_a_replicas_figures_are_those_of_the_iteration(simulated):
    rows, _ = simulated
    for row in rows:
        assert row["replica/student-1/requests"] == row["traffic/student/requests"]
        busy_s = row["replica/student-1/mean_in_flight"] * row["time/iteration_s"]
        assert busy_s == pytest.approx(0.1 * row["replica/student-1/requests"])
        assert row["replica/student-1/cached_share"] == 0.5
        assert row["replica/student-1/limit"] == 512


def test_kds_throughput_counts_what_the_teacher_writes_and_nothing_is_said_where_nobody_writes(tmp_path):
    (tmp_path / "kd").mkdir()
    rows, _ = simulate(KdPolicy, tmp_path / "kd")
    for row in rows:  # every prompt is another problem
        written = row["teacher/tokens"] * 16
        assert row["throughput/generated_tokens_per_s"] == pytest.approx(written / row["time/iteration_s"])
    (tmp_path / "again").mkdir()
    rows, _ = simulate(DistillPolicy, tmp_path / "again", divergence="forward_kl", student_share=0.0, written_by="data")
    assert not any("throughput/generated_tokens_per_s" in row for row in rows)


def test_retries_and_failures_are_those_of_the_iteration(tmp_path):
    class Flaky(SimulatedVerifier):
        def __init__(self):
            super().__init__()
            self.asked = 0

        async def verify(self, problem, response_text, *, deadline):
            self.asked += 1
            if self.asked <= 3:
                raise TransientError("connection refused")
            if problem.id == "p20":  # of the second batch; another prompt takes its place
                raise PermanentError("400: not understood")
            return await super().verify(problem, response_text, deadline=deadline)

    rows, _ = simulate(OpdPolicy, tmp_path, verifier=Flaky())
    assert [row["stage/verify/retried"] for row in rows] == [3.0, 0.0, 0.0, 0.0]
    assert [row["stage/verify/failed"] for row in rows] == [0.0, 1.0, 0.0, 0.0]
    assert {row["stage/score/failed"] for row in rows} == {0.0}


def test_sinks_get_what_the_file_gets_but_for_zeros_that_never_change(simulated):
    rows, given = simulated
    eventful = set()
    for row, (iteration, metrics, _) in zip(rows, given, strict=True):
        eventful |= {name for name, value in row.items() if value}
        assert metrics == {name: row[name] for name in row if name in eventful - {"iteration", "time"}}
        assert row["iteration"] == iteration
    assert len(given[-1][1]) < len(rows[-1]) - 2


def test_sinks_get_a_few_responses_of_an_evaluation_as_text(simulated):
    rows, given = simulated
    for row, (_, _, texts) in zip(rows, given, strict=True):
        assert bool(texts) == any(name.startswith("evaluation/") for name in row)
    assert all(name.startswith("evaluation/sample_") for name in given[1][2])


def test_an_iteration_without_evaluation_has_none_of_its_figures(simulated):
    rows, _ = simulated
    with_figures = [row["iteration"] for row in rows if any(name.startswith("evaluation/") for name in row)]
    assert with_figures == [2, 4]
    assert rows[1]["evaluation/hard/avg@2"] == 1.0
    assert ["time/evaluate_s" in row for row in rows] == [False, True, False, True]
