"""Attempts that failed and were made again: what console, log, verdict, trace and report say of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from iterations import finished_iteration
from limits import same_limits
from only_teacher import only
from run_files import make_run as run_files
from run_files import metrics_row

from spot_async.base.retry import RetryPolicy
from spot_async.config import EvaluationConfig
from spot_async.errors import (
    DeadlineExceededError,
    Exchange,
    FailureClass,
    PoisonedReplyError,
    RequestError,
    ThrottledError,
    TransientError,
)
from spot_async.evaluation.runner import ResponseSampler
from spot_async.policies.opd import OpdPolicy
from spot_async.replicas.leasing import OneService
from spot_async.stages.events import AttemptFailed, RequestEnded
from spot_async.stages.plugin_contract import ask_judgement
from spot_async.stages.stage import Stage, StageLimits
from spot_async.telemetry.bottleneck import RunTimes, StageUse, judge
from spot_async.telemetry.failures import FailureLog, kinds_words
from spot_async.telemetry.live_bottleneck import LiveBottleneck
from spot_async.telemetry.run_log import log_events_to
from spot_async.telemetry.totals import run_times
from spot_async.telemetry.trace import trace_to
from spot_async.testing.services import SimulatedTeacher, generation
from spot_async.testing.simulation import make_policy, make_run, simulated_vocabulary
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.tools.inspect.report import read_report, report_page
from spot_async.types import Problem, Verdict


def refused(status):
    error = TransientError(f"teacher/score: HTTP {status}: <b>no</b>\x1b[31m")
    error.exchange = Exchange("http://teacher", "POST", "/score", 0, {}, status)
    return error


class Failing(SimulatedTeacher):
    """It fails 41 % of the requests, at once."""

    def __init__(self):
        super().__init__()
        self.draw = random.Random(0)

    async def score(self, *args, **settings):
        if self.draw.random() < 0.41:
            raise self.draw.choice([refused(500), refused(502), TransientError("connection reset")])
        return await super().score(*args, **settings)


class Kept:
    def __init__(self):
        self.events = []

    def on(self, event):
        self.events.append(event)

    def of(self, kind):
        return [each for each in self.events if isinstance(each, kind)]


def asking(request, **more):
    """Ask a stage once; return what it published of failures, and the stage."""
    kept = Kept()

    async def scenario():
        stage = Stage(
            "score",
            OneService(None),
            StageLimits(concurrency=1, timeout_s=10.0, retry=RetryPolicy(3), waiting_capacity=9, **more),
            jitter=lambda: 1.0,
        )
        stage.events.subscribe(kept)
        with contextlib.suppress(RequestError):
            await stage.ask((0,), request)
        return stage

    return kept, run_on_virtual_time(scenario())


def test_a_stage_publishes_each_attempt_that_failed_with_its_time_and_the_pause_after_it():
    left = iter([refused(503), DeadlineExceededError("late"), None])

    async def request(_, deadline):
        await asyncio.sleep(1.0)
        if error := next(left):
            raise error

    kept, stage = asking(request, attempt_timeout_s=5.0)
    first, second = kept.of(AttemptFailed)
    assert (first.brief, first.failure, first.sent_s, first.failed_s) == ("HTTP 503", FailureClass.TRANSIENT, 0.0, 1.0)
    assert (second.brief, second.sent_s, second.failed_s) == ("no answer in time", 1.0 + first.delay_s, 2.25)
    (ended,) = kept.of(RequestEnded)
    assert ended.failed == (first, second)
    assert stage.counters.lost_s == first.lost_s + second.lost_s
    assert stage.counters.busy_s == pytest.approx(stage.counters.lost_s + 1.0)


@pytest.mark.parametrize(
    ("error", "brief"),
    [
        (TransientError("reset by peer"), "reset"),
        (PoisonedReplyError("NaN"), "bad reply"),
        (ThrottledError("busy"), "asked to wait"),
        (refused(504), "HTTP 504"),
    ],
)
def test_failures_have_a_word_each(error, brief):
    assert error.brief == brief


def test_a_verdict_that_is_missing_is_a_failed_attempt():
    kept = Kept()

    class Verifier:
        async def verify(self, problem, text, *, deadline):
            return Verdict.ERROR  # its worker was killed

    async def scenario():
        stage = Stage(
            "verify",
            OneService(Verifier()),
            StageLimits(concurrency=1, timeout_s=9.0, retry=RetryPolicy(3), waiting_capacity=9),
            jitter=lambda: 0.0,
        )
        stage.events.subscribe(kept)
        return await ask_judgement(stage, (0,), Problem(id="p", text="1 + 0", answer="1"), "1")

    assert run_on_virtual_time(scenario()).verdict is Verdict.ERROR
    assert [each.brief for each in kept.of(AttemptFailed)] == ["verdict error"] * 2


def failed(at_s, brief="HTTP 500", stage="score", failure=FailureClass.TRANSIENT, reason="no\x1b[31m"):
    return AttemptFailed(stage, at_s, at_s, 0.5, failure, brief, reason)


def done(stage="score"):
    return RequestEnded(stage, (0,), 0.0, 0.0, 1.0, "done")


def test_people_get_a_line_a_minute_and_one_at_the_end_and_the_log_has_each_iteration(tmp_path):
    lines = []
    log = FailureLog(lines.append)
    with log_events_to(tmp_path / "run.jsonl"):
        for at_s in (0.0, 10.0, 20.0, 70.0):
            log.on(done())
            log.on(failed(at_s, "HTTP 502" if at_s == 10.0 else "HTTP 500"))
        log.on(finished_iteration(1))
        log.on(failed(75.0, "reset", "rollout"))
        log.close()
    assert lines == [
        "attempts that failed lately: score 2 of 4 (50 %: HTTP 500, 502); the newest: no␛[31m",
        "attempts that failed lately: score 2 of 4 (50 %: HTTP 500); the newest: no␛[31m",
        "attempts that failed in all: score 4 of 8 (50 %: HTTP 500, 502), rollout 1 of 1 (100 %: reset)",
    ]
    said = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    counts = Counter()
    for each in said:
        counts[each["iteration"], each["stage"], each["brief"]] += each["count"]
    assert counts == {(1, "score", "HTTP 500"): 3, (1, "score", "HTTP 502"): 1, (2, "rollout", "reset"): 1}


def test_of_many_kinds_the_most_frequent_are_named():
    kinds = Counter({"HTTP 500": 9, "reset": 8, "HTTP 502": 7, "bad reply": 6, "no answer in time": 5, "HTTP 503": 1})
    assert kinds_words(kinds) == "HTTP 500, 502, reset, bad reply, no answer in time and others"


def times(use, **more):
    return RunTimes(9.0, 1.0, 0.0, {"score": 8.0, "rollout": 1.0}, {"score": use}, 16, **more)


def test_failed_attempts_come_first_in_the_verdict_and_nothing_else_is_advised():
    use = StageUse(1.0, 0.0, 64, failed_share=0.41, lost_share=0.8, failures="HTTP 500, 502, reset")
    verdict = judge(times(use))
    assert verdict.sentence == (
        "41 % of the score attempts failed (HTTP 500, 502, reset): retries hold the run up. "
        "The trainer waited 90 % of the time."
    )
    assert verdict.brief.startswith("41 % of the score attempts failed (HTTP 500, 502, reset): retries hold the run up")
    assert not [line for line in verdict.advice if "batch_size" in line or "smaller teacher" in line]
    late = judge(times(StageUse(1.0, 0.0, 64, failed_share=0.1, lost_share=0.8, failures="no answer in time")))
    assert "stages.attempt_timeout_s" in late.advice[-1]


def test_failures_that_cost_little_are_named_and_do_not_hide_what_holds_the_run_up():
    use = StageUse(60.0, 9.0, 64, failed_share=0.2, lost_share=0.01, failures="HTTP 500")
    verdict = judge(times(use))
    assert verdict.sentence.startswith("Teacher bound")
    assert "20 % of the attempts failed (HTTP 500), which took 1 % of the requests' time" in verdict.advice[0]
    assert "concurrency" in " ".join(verdict.advice)


def test_refusals_come_first_in_the_report_too_and_say_nothing_of_what_staleness_would_bring():
    row = metrics_row(1) | {"wait/score_s": 9.0, "stage/score/requests": 59.0, "stage/score/throttled": 41.0,
                            "stage/score/mean_in_flight": 1.0, "stage/score/lost_s": 0.0}  # fmt: skip
    row = {name: value for name, value in row.items() if name not in ("wait/probe_s", "wait/rollout_s")}
    verdict = judge(run_times([row], {"stages": {"score": {"concurrency": 64}}}, cores=64))
    assert verdict.advice[0].startswith("throttled by the endpoint (41 % of what is sent is refused for now)")
    assert verdict.staleness == ""


def test_failures_of_evaluations_are_told_too_and_a_lost_reply_is_asked_for_again():
    kept, left = Kept(), iter([refused(500), None])

    class Student:
        async def generate(self, prompt_ids, sampling, *, deadline, **settings):
            error = next(left, False)
            if error:
                raise error
            if error is None:
                await asyncio.Event().wait()
            return generation([5, 1])

    async def scenario():
        config = EvaluationConfig(
            problems={"path": "x.jsonl"}, timeout_s=60.0, attempt_timeout_s=2.0, verifier={"kind": "boxed_match"}
        )
        problem = SimpleNamespace(problem=Problem(id="p", text="1 + 0", answer="1"), token_ids=[1])
        benchmark = SimpleNamespace(name="b", sources=[problem], max_response_tokens=4, vocab_limit=None, verifier=None)
        sampler = ResponseSampler(
            [benchmark], config, generator=Student(), verifiers={}, vocabulary=simulated_vocabulary(), events=kept
        )
        return await sampler.sample((0, 0, 0))

    kept.publish = kept.on
    assert run_on_virtual_time(scenario()).tokens == 2
    assert [(each.stage, each.brief) for each in kept.of(AttemptFailed)] == [
        ("evaluation", "HTTP 500"),
        ("evaluation", "no answer in time"),
    ]


def test_a_teacher_that_fails_two_in_five_is_what_console_and_report_blame(tmp_path):
    said, lines = [], []
    run = make_run(make_policy(OpdPolicy), teachers=only(Failing()), limits=same_limits(), iterations=30, batch_size=16)
    log = FailureLog(lines.append)
    run.stages.events.subscribe(log)

    async def main():
        config = {"training": {"batch_size": 16}, "stages": same_limits().model_dump()}
        verdict = LiveBottleneck(run.orchestrator, said.append, config, every_s=5.0)
        async with asyncio.TaskGroup() as group:
            speaking = group.create_task(verdict.speak())
            await run.orchestrator.run()
            speaking.cancel()

    with trace_to(tmp_path / "trace.json") as follow:
        follow(run.orchestrator)
        run_on_virtual_time(main())
    log.close()
    assert all("of the score attempts failed (" in line for line in said)
    assert len(said) > 3
    assert len(lines) >= 2
    events = json.loads((tmp_path / "trace.json").read_bytes())
    attempts = [each for each in events if each["name"].startswith("failed: ")]
    pauses = [each for each in events if each["name"] == "back-off"]
    assert len(attempts) == len(pauses) > 30
    spans = [each for each in events if each["name"] == "score" and each["ph"] == "X"]
    for each in [*attempts, *pauses]:
        assert any(
            span["pid"] == each["pid"]
            and span["tid"] == each["tid"]
            and span["ts"] <= each["ts"]
            and each["ts"] + each["dur"] <= span["ts"] + span["dur"]
            for span in spans
        )


def logged(path, rows, *events):
    """The files of a run that had these events."""
    files = run_files(path, [], rows)
    (path / "logs").mkdir()
    with log_events_to(path / "logs" / "run.jsonl"):
        log = FailureLog(lambda line: None)
        for event in events:
            log.on(event)
        log.close()
    return files


def test_a_report_names_failures_by_stage_class_and_iteration_with_their_reasons_escaped(tmp_path):
    row = metrics_row(1) | {"wait/score_s": 9.0, "stage/score/requests": 59.0, "stage/score/transient": 41.0,
                            "stage/score/mean_in_flight": 1.0, "stage/score/lost_s": 8.0}  # fmt: skip
    row = {name: value for name, value in row.items() if name not in ("wait/probe_s", "wait/rollout_s")}
    hostile = failed(0.0, reason="<script>alert(1)</script>\u202e" + "x" * 999)
    late = failed(0.0, "no answer in time", "evaluation")
    report = read_report(logged(tmp_path / "run", [row], *[hostile] * 41, finished_iteration(1), late))
    assert "41 % of the score attempts failed (HTTP 500)" in report.bottleneck.sentence
    page = report_page(report)
    assert "score 41 of 100 (41 %: HTTP 500), evaluation 1 (no answer in time)" in page
    assert report.failures == ("score: 41 of 100 (41 %: HTTP 500)", "evaluation: 1 (no answer in time)")
    assert "<td>transient</td><td>HTTP 500</td><td>41</td><td>1</td>" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;�xxx" in page
    assert "<script>alert" not in page
    assert "x" * 250 not in page


def test_a_run_that_ended_before_its_first_iteration_reports_its_failures(tmp_path):
    files = logged(tmp_path / "run", [], failed(0.0))
    assert "Failures" in [section.title for section in read_report(files).sections]
    assert [each.count for each in files.failed_attempts()] == [1]
