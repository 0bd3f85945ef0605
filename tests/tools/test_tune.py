"""`spot-async tune`: a run's own requests, what is recommended from them, and the files that say so."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from spot_async.cli import app
from spot_async.config import Config, SamplingConfig, StageConfig, StagesConfig
from spot_async.config.loading import config_from, load_config
from spot_async.errors import ConfigError, DataError, ThrottledError
from spot_async.spending.account import Spending
from spot_async.stages.services import Services
from spot_async.stages.stages import Stages
from spot_async.testing.services import END_TOKEN, SimulatedStudent, SimulatedTeacher, SimulatedVerifier
from spot_async.testing.simulation import simulated_vocabulary
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.tools.tune.measurement import Level, Ramp, StageLoad
from spot_async.tools.tune.mix import Template, by_server, endless, note_requests
from spot_async.tools.tune.ramp import NoRetries, RampLimits, without_limits
from spot_async.tools.tune.recommendation import conclude, demands, stage_limit
from spot_async.tools.tune.results import Tuning, as_json, as_yaml, check_output, read_tuning
from spot_async.tools.tune.running import TuneOptions, announcement, check_options, without_files
from spot_async.types import PolicyNeeds, Problem, Prompt

ROOT = Path(__file__).parents[2]
RUN: dict[str, Any] = {
    "student": {"model": "s"},
    "teacher": {"model": "t"},
    "data": {"train": "d"},
    "policy": "spot",
    "training": {"iterations": 1, "batch_size": 64},
}
NEEDS = PolicyNeeds(teacher_top_k=16, probes_per_prompt=8)


class TwoProbes:
    """A rollout, its score, candidates, two probes of which one has nothing left to sample, and their verdicts."""

    needs = PolicyNeeds(teacher_top_k=2, probes_per_prompt=2)

    async def supervise(self, prompt: Prompt, stages: Any) -> list[Any]:
        rollout = await stages.rollout()
        scores = await stages.score(rollout.token_ids, top_k=2)
        positions = np.zeros(1, np.int32)
        version = rollout.version_spans[0].version
        await stages.candidate_logprobs(rollout.token_ids, positions, scores.topk_ids[:1], version=version)
        for candidate in (5, END_TOKEN):
            await stages.probe(rollout.token_ids, 0, candidate, n=0)
        await stages.verify(rollout.token_ids)
        return []


def prompts() -> Any:
    for ordinal in itertools.count():
        problem = Problem(id=f"p{ordinal}", text="", answer="1")
        yield Prompt(ordinal=ordinal, problem=problem, token_ids=np.array([2, 3, 4 + ordinal], np.int32))


class Overheard(SimulatedStudent):
    """Remembers what it was asked."""

    async def generate(self, prompt_ids: Any, sampling: Any, **more: Any) -> Any:
        self.asked = [*getattr(self, "asked", []), (tuple(prompt_ids.tolist()), sampling.seed, more["session"])]
        return await super().generate(prompt_ids, sampling, **more)


def stages_over(student: SimulatedStudent, config: StagesConfig | None = None, **more: Any) -> Stages:
    vocabulary = simulated_vocabulary()
    return Stages(
        Services(student, SimulatedTeacher(), student, SimulatedVerifier()),
        config or StagesConfig(),
        SamplingConfig(max_response_tokens=64),
        student=vocabulary,
        teacher=vocabulary,
        run_seed=0,
        max_running_prompts=8,
        max_probes_per_prompt=2,
        **more,
    )


def ramped_over(student: SimulatedStudent) -> Stages:
    limits = StageConfig(concurrency=1)
    config = StagesConfig(rollout=limits, candidates=limits, probe=limits)
    return stages_over(student, without_limits(config), retry=NoRetries)


def test_what_a_ramp_sends_waits_for_no_limit_and_is_sent_once():
    class Refusing(SimulatedStudent):
        asked = 0

        async def generate(self, *request: Any, **more: Any) -> Any:
            self.asked += 1
            await asyncio.sleep(1.0)
            raise ThrottledError("slow down")

    async def main() -> tuple[int, float, Any]:
        student = Refusing()
        stages = ramped_over(student)
        sent = (stages.for_prompt(prompt).rollout() for prompt in itertools.islice(prompts(), 20))
        refusals = await asyncio.gather(*sent, return_exceptions=True)
        return student.asked, asyncio.get_running_loop().time(), refusals

    asked, seconds, refusals = run_on_virtual_time(main())
    assert (asked, seconds) == (20, 1.0)
    assert all(isinstance(refusal, ThrottledError) for refusal in refusals)


def test_requests_are_those_of_the_policy_in_its_proportions_and_none_is_sent_twice():
    async def main() -> tuple[list[Any], Counter[str], dict[str, float]]:
        student = Overheard()
        stages, ramped = stages_over(student), ramped_over(student)
        schedule = prompts()
        noted = by_server(await note_requests(TwoProbes(), stages, [next(schedule) for _ in range(4)]))
        student.asked.clear()
        sent: Counter[str] = Counter()
        for request in itertools.islice(endless(noted["student"], ramped, schedule, seed=1), 120):
            await request.send()
            sent[request.stage] += 1
        return student.asked, sent, {server: len(own) / 4 for server, own in noted.items()}

    asked, sent, per_prompt = run_on_virtual_time(main())
    assert per_prompt == {"student": 3.0, "teacher": 1.0, "verifier": 1.0}  # the other probe was never sent
    assert sent == {"rollout": 40, "candidates": 40, "probe": 40}
    assert len({(prompt, seed) for prompt, seed, _ in asked}) == 80, "a repeated request is answered from a cache"
    rollouts = [prompt for prompt, _, _ in asked if len(prompt) == 3]
    assert len(set(rollouts)) == 40
    assert (2, 3, 4) not in rollouts, "its prompt was asked about while requests were noted"
    assert len({session for _, _, session in asked}) == 40, "requests of one prompt share a session"


def level(concurrency: int, throughput: float, **in_flight: float) -> Level:
    """One second; each stage's mean requests in flight."""
    stages = {stage: StageLoad(requests=1, busy_s=mean) for stage, mean in in_flight.items()}
    latency_s = concurrency / throughput
    return Level(concurrency=concurrency, seconds=1.0, requests=round(throughput), tokens=0, p50_s=latency_s,
                 p95_s=latency_s, stages=stages)  # fmt: skip


def student_ramp(slots: int = 32, **changes: Any) -> Ramp:
    levels = [
        level(n, 10.0 * min(n, slots), rollout=n / 4, candidates=n / 32, probe=23 * n / 32)
        for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    ]
    return Ramp(**{"server": "student", "levels": levels, "knee": slots, "ended": "flat"} | changes)


def limits(config: Config, *ramps: Ramp) -> dict[str, int]:
    found = conclude(config, NEEDS, ramps, {ramp.server: 10.0 for ramp in ramps})
    return {each.key: each.recommended for each in found.recommendations}


def test_in_a_strict_run_each_stage_may_fill_its_server():
    assert limits(config_from(RUN), student_ramp()) == {
        "stages.rollout.concurrency": 32,
        "stages.candidates.concurrency": 32,
        "stages.probe.concurrency": 32,
    }


def test_no_stage_gets_more_than_a_batch_can_ask_for_and_a_small_batch_is_warned_of():
    config = config_from(RUN, ["training.batch_size=8", "training.mini_batch_size=8"])
    found = conclude(config, NEEDS, [student_ramp(128)], {"student": 10.0})
    assert [each.recommended for each in found.recommendations] == [8, 8, 64]
    (warning,) = found.warnings
    assert warning.startswith("training.batch_size=8: 8 rollout requests at a time cannot fill the student")
    assert "16 times as large" in warning


def test_several_servers_of_a_role_take_as_much_each():
    config = config_from({**RUN, "student": {"model": "s", "backend": {"kind": "local", "replicas": 2}}})
    assert set(limits(config, student_ramp()).values()) == {64}


@given(
    st.integers(1, 1000),
    st.dictionaries(st.sampled_from(["rollout", "candidates", "probe"]), st.floats(1e-3, 1e3), min_size=1),
    st.integers(1, 1000),
)
def test_stages_that_run_beside_each_other_share_the_knee_by_their_work(knee, busy, demand):
    of_all = {stage: each / sum(busy.values()) for stage, each in busy.items()}
    given_to = {stage: stage_limit(knee, share, demand, is_strict=False) for stage, share in of_all.items()}
    assert all(1 <= limit <= demand for limit in given_to.values())
    assert sum(given_to.values()) <= knee + len(busy)  # each is rounded up
    assert all(given_to[some] <= given_to[other] for some in busy for other in busy if busy[some] <= busy[other]), (
        "more work, a smaller share"
    )


def test_the_slowest_server_is_named_and_what_would_help():
    teacher = Ramp(server="teacher", levels=[level(n, 1000.0, score=n) for n in (1, 2, 4)], knee=1, ended="flat")
    config = config_from({**RUN, "student": {"model": "s", "backend": {"kind": "local", "slots": 32}}})
    found = conclude(config, NEEDS, [student_ramp(), teacher], {"student": 10.0, "teacher": 1.0})
    bound, slots, replicas = found.advice
    assert "student 31 ms, teacher 1 ms: so the student needs 2.0 s for a batch of 64" in bound
    assert "student.backend.slots=64" in slots
    assert "up to 512 requests for the student at a time, and 32 keep it busy: another replica" in replicas


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ended": "throttled", "failure": "429 slow down"}, "asked to be left alone above 256 in flight: 429 slow"),
        ({"levels": [], "knee": None, "ended": "time"}, "not one level was measured in time: give more --seconds"),
    ],
)
def test_a_ramp_that_was_cut_short_is_told(changes, said):
    found = conclude(config_from(RUN), NEEDS, [student_ramp(**changes)], {"student": 10.0})
    assert said in found.warnings[0]


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        ("time", "--seconds ran out with 8 in flight: give more"),
        ("requests", "--limit-requests ran out with 8 in flight: give more"),
        ("throttled", "asked to be left alone above 8 in flight"),
        ("failed", "requests failed above 8 in flight"),
        ("budget", "requests failed above 8 in flight"),
    ],
)
def test_a_server_whose_throughput_still_rose_gets_no_limit(ended, said):
    rising = student_ramp(levels=student_ramp().levels[:4], knee=None, ended=ended, failure="why")
    teacher = Ramp(server="teacher", levels=[level(n, 1000.0, score=n) for n in (1, 2, 4)], knee=1, ended="flat")
    found = conclude(config_from(RUN), NEEDS, [rising, teacher], {"student": 10.0, "teacher": 1.0})
    assert [each.key for each in found.recommendations] == ["stages.score.concurrency"]
    assert said in found.warnings[0]
    assert found.warnings[0].endswith("its throughput still rose, so its limits stay as configured")
    assert found.advice == [], "the student may be faster than it was measured"


def test_demand_is_what_all_running_prompts_can_ask_for():
    asked = demands(config_from(RUN), PolicyNeeds(samples_per_prompt=4, probes_per_prompt=2))
    assert (asked["rollout"], asked["probe"], asked["verify"], asked["teacher_response"]) == (256, 128, 384, 64)


def tuning(**changes: Any) -> Tuning:
    ramps = [student_ramp()]
    found = conclude(config_from(RUN), NEEDS, ramps, {"student": 10.0})
    fields = {"measured": "2026-11-20T12:00+00:00", "seconds": 20.0, "prompts": 16, "ramps": ramps,
              "requests_per_prompt": {"student": 10.0}, "recommendations": found.recommendations,
              "advice": found.advice, "warnings": found.warnings}  # fmt: skip
    return Tuning(**{**fields, **changes})


def test_what_is_written_is_a_configuration_over_the_tuned_one_whatever_servers_said(tmp_path):
    (tmp_path / "configs").mkdir()
    source, output = tmp_path / "configs" / "my run.yaml", tmp_path / "tuned.yaml"
    source.write_text("student: {model: s}\nteacher: {model: t}\ndata: {train: d}\npolicy: spot\n"
                      "training: {iterations: 1}\nstages: {probe: {timeout_s: 7.0}}\n")  # fmt: skip
    hostile = "teacher: 429 \x1b[31m\nstages: {probe: {concurrency: 1}}\u2028student: null\x85data: null"
    output.write_text(as_yaml(tuning(warnings=[hostile]), source, output, ["run.seed=1"]))
    loaded = load_config(output)
    assert loaded.stages.probe.concurrency == 32
    assert loaded.stages.probe.timeout_s == 7.0
    assert loaded.student.model == "s"
    text = output.read_text()
    assert "# Measured with run.seed=1: give these again." in text
    assert "256 as configured; the student gives 100% of its best throughput (320 requests a second)" in " ".join(
        text.replace("#", "").split()
    )


def test_a_row_above_the_best_throughput_is_explained_where_it_would_contradict_it():
    calm = student_ramp()
    lucky = level(128, 355.0, rollout=32.0, candidates=4.0, probe=92.0)
    outlier = student_ramp(levels=[*calm.levels[:-2], lucky, calm.levels[-1]])
    for ramp, said in ((calm, False), (outlier, True)):
        reason = conclude(config_from(RUN), NEEDS, [ramp], {"student": 10.0}).recommendations[0].reason
        assert "(320 requests a second" in reason
        assert ("; 355 requests a second was a single row, running medians of three decide" in reason) == said


def test_results_are_read_back_and_others_are_refused(tmp_path):
    path = tmp_path / "tuned.json"
    path.write_bytes(as_json(tuning()))
    assert read_tuning(path) == tuning()
    path.write_bytes(as_json(tuning(format=2)))
    with pytest.raises(DataError, match="has format 2, newer than this spot-async can read"):
        read_tuning(path)
    path.write_bytes(b'{"format": "\xff"}')
    with pytest.raises(DataError, match=r"tuned\.json: is no file of spot-async tune"):
        read_tuning(path)


def test_a_report_shows_a_tuning(tmp_path):
    (tmp_path / "run.json").write_text('{"format": 1, "command": "train"}')
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "tuned.json").write_bytes(as_json(tuning()))
    arguments = ["report", str(tmp_path), "--tuning", str(tmp_path / "tuned.json")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    page = (tmp_path / "report.html").read_text()
    assert "student: throughput" in page
    assert "320" in page
    assert CliRunner().invoke(app, [*arguments[:-1], str(tmp_path / "config.yaml")]).exit_code == 2


def test_no_file_of_someone_else_is_written_over(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("{}")
    other = tmp_path / "other.yaml"
    other.write_text("{}")
    refused = {
        config: "is the configuration itself",
        other: "tune did not write it",
        tmp_path / "run.json": "name a .yaml file",
        tmp_path / "no" / "run.yaml": "no directory",
    }
    for output, said in refused.items():
        with pytest.raises(ConfigError, match=said):
            check_output(config, output)
    other.write_text(as_yaml(tuning(), config, other, []))
    check_output(config, other)


PAID = {
    "kind": "openai",
    "url": "http://127.0.0.1:1",
    "prices": {"prompt": 1.0, "completion": 2.0},
}


def test_a_paid_endpoint_is_ramped_only_within_a_limit_and_says_what_that_costs():
    config = config_from({**RUN, "teacher": {"model": "t", "backend": PAID}})
    with pytest.raises(ConfigError, match=r"--paid: teacher\.backend\.prices is set, so give --limit-requests"):
        check_options(config, TuneOptions(1.0, is_paid=True))
    check_options(config, TuneOptions(1.0, limit_requests=10, is_paid=True))
    account = config.teacher.backend.open_account("teacher")  # type: ignore[union-attr]
    assert account is not None
    account.spending["teacher"] = Spending(requests=4, money=0.5)
    template = Template("score", next(prompts()), lambda stages: stages.rollout(), tokens=40)
    said = announcement("teacher", [template], RampLimits(20.0, 64, requests=1000), account)
    assert said == (
        "teacher: score requests of 40 tokens on average, 1 to 64 at a time, 20 s at most, "
        f"1000 requests in all at most, about 125 {account.currency}"
    )


def test_a_replay_has_no_teacher_to_tune():
    config = config_from({**RUN, "teacher": {"model": "t", "cache": "scores.sqlite", "replay": True}})
    with pytest.raises(ConfigError, match=r"set teacher\.replay=false"):
        check_options(config, TuneOptions(1.0))


def test_responses_of_a_tuning_are_not_saved_as_the_runs():
    config = config_from({**RUN, "policy": {"kind": "kd", "save": "responses.bin"}})
    assert without_files(config).policy.save is None  # type: ignore[attr-defined]


def test_tune_measures_real_servers_and_its_limits_train(tmp_path, monkeypatch):
    """Without a teacher, whose server would take as long to start again: `benchmarks/tune.py` has one."""
    monkeypatch.chdir(ROOT)
    output = tmp_path / "tuned.yaml"
    overrides = ["policy={kind: grpo, samples: 2}", "training.batch_size=16"]
    bounds = ["--seconds", "60", "--limit-requests", "250"]  # the second, on any machine
    outcome = CliRunner().invoke(app, ["tune", "configs/quickstart.yaml", *overrides, *bounds, "-o", str(output)])
    assert outcome.exit_code == 0, outcome.output
    found = read_tuning(output.with_suffix(".json"))
    assert [ramp.server for ramp in found.ramps] == ["student", "verifier"]
    assert len(found.ramps[0].levels) > 2
    assert found.ramps[0].sent <= 250
    assert found.requests_per_prompt == {"student": 2.0, "verifier": 2.0}
    assert "student: rollout requests of" in outcome.output
    assert "knee" in outcome.output
    tuned = load_config(output, overrides)
    assert found.recommendations
    for each in found.recommendations:
        assert getattr(tuned.stages, each.key.split(".")[1]).concurrency == each.recommended
    assert "student: throughput" in output.with_suffix(".html").read_text()
