"""`spot-async tune`: a run's own requests, what is recommended from them, and the files that say so."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from joined_policy import Reads
from small_runs import NAMED
from typer.testing import CliRunner

from spot_async.base.files import as_json
from spot_async.cli import app
from spot_async.config import SamplingConfig, StageConfig, StagesConfig
from spot_async.config.loading import config_from, load_config
from spot_async.errors import ConfigError, DataError, ThrottledError
from spot_async.policies.distill import DistillPolicy
from spot_async.spending.account import Spending
from spot_async.stages.services import StagesSettings
from spot_async.stages.stages import Stages
from spot_async.testing.services import END_TOKEN, SimulatedStudent
from spot_async.testing.simulation import make_policy, simulated_prompts, simulated_services
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.tools.simulate.lengths import RecordedPrompt
from spot_async.tools.simulate.measured import Level, Ramp, Recommendation, StageLoad, Tuning, read_tuning
from spot_async.tools.tune import tune_command
from spot_async.tools.tune.choice import choose
from spot_async.tools.tune.mix import Template, by_server, endless, note_requests, recorded_prompts
from spot_async.tools.tune.ramp import RampLimits, without_limits
from spot_async.tools.tune.results import as_yaml, check_output, tuning_section
from spot_async.tools.tune.tune_command import (
    TuneOptions,
    announcement,
    check_options,
    most_in_flight,
)
from spot_async.types import PolicyNeeds, Problem, Prompt

ROOT = Path(__file__).parents[2]
RUN: dict[str, Any] = {**NAMED, "policy": "spot", "training": {"iterations": 1, "batch_size": 64}}


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


def stages_over(student: SimulatedStudent, config: StagesConfig | None = None) -> Stages:
    needs = PolicyNeeds(teacher_top_k=1, probes_per_prompt=2)
    settings = StagesSettings(
        limits=config or StagesConfig(), sampling=SamplingConfig(max_response_tokens=64), max_prompts=8
    )
    return Stages(simulated_services(needs, student=student), settings, needs)


def ramped_over(student: SimulatedStudent) -> Stages:
    limits = StageConfig(concurrency=1)
    config = StagesConfig(rollout=limits, candidates=limits, probe=limits)
    return stages_over(student, without_limits(config))


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


BATCH: dict[str, Any] = {"iterations": 1, "batch_size": 16, "mini_batch_size": 16}
LENGTHS = [RecordedPrompt((40, 60), (20,), 10.0), RecordedPrompt((50,), (25, 30), 10.0)]


def level(concurrency: int, throughput: float, *stages: str) -> Level:
    """Ten seconds of requests with 50 tokens each."""
    load = {stage: StageLoad(requests=1, busy_s=1.0) for stage in stages}
    requests, latency_s = round(10 * throughput), concurrency / throughput
    return Level(concurrency=concurrency, seconds=10.0, requests=requests, tokens=50 * requests, p50_s=latency_s,
                 p95_s=latency_s, stages=load)  # fmt: skip


def student_ramp(slots: int = 4, most: int = 16, **changes: Any) -> Ramp:
    """A ramp of a server that gets no faster beyond its slots."""
    doublings = [1 << power for power in range(most.bit_length())]
    levels = [level(n, 2.0 * min(n, slots), "rollout") for n in doublings]
    return Ramp(**{"server": "student", "levels": levels, "ended": "flat"} | changes)


def teacher_ramp(**changes: Any) -> Ramp:
    levels = [level(n, 40.0, "score") for n in (1, 2, 4)]
    return Ramp(**{"server": "teacher", "levels": levels, "ended": "flat"} | changes)


def chosen(*ramps: Ramp, **changes: Any) -> Any:
    """What is chosen of a run of plain on-policy distillation, without an earlier run."""
    run = {**RUN, "policy": "opd", "training": BATCH, **changes}
    return choose(config_from(run), PolicyNeeds(teacher_top_k=16), tuning(ramps=[*ramps]), LENGTHS, None)


def limits(*ramps: Ramp, **changes: Any) -> dict[str, int]:
    return {each.key: each.recommended for each in chosen(*ramps, **changes).recommendations}


def test_the_limit_is_the_smallest_measured_one_that_keeps_the_server_busy():
    found = limits(student_ramp(), teacher_ramp())
    assert found["stages.rollout.concurrency"] in (4, 8), "of 1 to 16, where it has 4 slots"
    assert found["stages.score.concurrency"] == 1


def test_the_verifier_has_a_limit_too():
    levels = [level(n, 5.0 * min(n, 2), "verify") for n in (1, 2, 4, 8)]
    ramp = Ramp(server="verifier", levels=levels, ended="flat")
    run = {"policy": {"kind": "grpo", "samples": 2}, "teacher": None, "training": {**BATCH, "reference_kl": 0.0}}
    found = choose(config_from({**RUN, **run}), PolicyNeeds(samples_per_prompt=2), tuning(ramps=[ramp]), LENGTHS, None)
    assert {each.key: each.recommended for each in found.recommendations} == {"stages.verify.concurrency": 2}


def test_a_server_that_gets_slower_with_more_in_flight_gets_fewer():
    speeds = {1: 2.0, 2: 4.0, 4: 8.0, 8: 8.0, 16: 5.0, 32: 3.0, 64: 2.0}
    thrashing = [level(n, speed, "rollout") for n, speed in speeds.items()]
    assert limits(student_ramp(levels=thrashing))["stages.rollout.concurrency"] in (4, 8)


def test_several_servers_of_a_role_take_as_much_each():
    student = {"model": "s", "backend": {"kind": "local", "replicas": 2}}
    assert limits(student_ramp(), student=student)["stages.rollout.concurrency"] in (2 * 4, 2 * 8)


def test_what_binds_is_said_as_simulate_says_it_and_what_was_not_measured_is_named():
    found = chosen(student_ramp())
    assert found.advice[0].startswith("Student bound: the trainer waited 100 % of the time")
    assert found.advice[-1].endswith("since nobody has measured it: teacher, trainer")


def test_a_small_batch_is_warned_of():
    found = chosen(student_ramp(1000, ended="demand"))
    (warning,) = found.warnings
    assert chosen(student_ramp(most=1, ended="demand")).warnings == []
    assert warning.startswith("training.batch_size=16: 16 requests at a time, the most that it has, do not fill the s")


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        ("time", "--seconds ran out with 8 in flight: give more"),
        pytest.param("requests", "--limit-requests ran out with 8 in flight: give more", marks=pytest.mark.long),
        ("throttled", "asked to be left alone above 8 in flight"),
        ("failed", "requests failed above 8 in flight"),
        pytest.param("budget", "requests failed above 8 in flight", marks=pytest.mark.long),
    ],
)
def test_a_ramp_that_was_cut_short_changes_no_limit(ended, said):
    found = chosen(student_ramp(most=8, ended=ended, failure="why"), teacher_ramp())
    assert [each.key for each in found.recommendations] == ["stages.score.concurrency"]
    assert [ramp.knee for ramp in found.ramps] == [None, 1]
    assert said in found.warnings[0]
    assert found.warnings[0].endswith("its throughput still rose, so its limits stay as configured")


def test_a_server_of_which_nothing_was_measured_is_told():
    found = chosen(student_ramp(levels=[], ended="time"))
    assert found.recommendations == []
    assert "not one level was measured in time: give more --seconds" in found.warnings[0]


def test_a_ramp_has_as_many_in_flight_as_all_running_prompts_can_ask_for():
    needs = PolicyNeeds(samples_per_prompt=4, probes_per_prompt=2)

    def most(*stages: str, needs: PolicyNeeds = needs) -> int:
        templates = [Template(stage, next(prompts()), lambda stages: stages.rollout(), 1) for stage in stages]
        return most_in_flight(config_from(RUN), needs, templates)

    assert [most("rollout"), most("probe"), most("verify"), most("teacher_response")] == [256, 128, 384, 0]
    assert most("rollout", "rollout", "probe") == 384
    assert most("teacher_response", needs=PolicyNeeds(teacher_responses=2)) == 128


def test_what_the_teacher_reads_is_counted_where_that_is_not_the_students_prompt():
    prompt = next(prompts())
    own = msgspec.structs.replace(prompt, teacher_ids=np.tile(prompt.token_ids, 3))

    async def noted(each: Prompt) -> list[Template]:
        return await note_requests(TwoProbes(), stages_over(SimulatedStudent()), [each])

    for each, read in ((prompt, 3), (own, 9)):
        templates = run_on_virtual_time(noted(each))
        rollout, score = (next(one for one in templates if one.stage == stage) for stage in ("rollout", "score"))
        assert score.tokens == rollout.tokens + read
        (recorded,) = recorded_prompts(templates)
        assert (recorded.responses, recorded.tokens) == ([rollout.tokens], read)


def test_written_responses_are_as_long_as_what_is_scored_and_who_asks_nobody_is_told() -> None:
    policy = make_policy(DistillPolicy, divergence="forward_kl", top_k=2, student_share=0.0, written_by="data")
    stages = Stages(simulated_services(policy.needs), StagesSettings(), policy.needs)
    some = list(simulated_prompts(3))
    templates = run_on_virtual_time(note_requests(policy, stages, some))
    lengths = [[len(prompt.problem.response.split()) + 1] for prompt in some]
    assert [[*each.responses] for each in recorded_prompts(templates)] == lengths
    with pytest.raises(ConfigError, match="policy Reads asks no server for these prompts, so there is none to tune"):
        run_on_virtual_time(note_requests(Reads(), stages, some))


def tuning(**changes: Any) -> Tuning:
    reason = "the student answers 32 requests a second with 16 in flight"
    found = [Recommendation(key="stages.probe.concurrency", configured=256, recommended=16, reason=reason)]
    fields = {"measured": "2026-11-20T12:00+00:00", "seconds": 20.0, "prompts": 16, "advice": [], "warnings": []}
    measured = {"ramps": [student_ramp(knee=16)], "requests_per_prompt": {"student": 10.0}, "recommendations": found}
    return Tuning(**{**fields, **measured, **changes})


def test_what_is_written_is_a_configuration_over_the_tuned_one_whatever_servers_said(tmp_path):
    (tmp_path / "configs").mkdir()
    source, output = tmp_path / "configs" / "my run.yaml", tmp_path / "tuned.yaml"
    source.write_text("student: {model: s}\nteacher: {model: t}\ndata: {train: d}\npolicy: spot\n"
                      "training: {iterations: 1}\nstages: {timeout_s: 7.0}\n")  # fmt: skip
    hostile = "teacher: 429 \x1b[31m\nstages: {probe: {concurrency: 1}}\u2028student: null\x85data: null"
    output.write_text(as_yaml(tuning(warnings=[hostile]), source, output, ["run.seed=1"]))
    loaded = load_config(output)
    assert loaded.stages.probe.concurrency == 16
    assert loaded.stages.timeout_s == 7.0
    assert loaded.student.model == "s"
    text = output.read_text()
    assert "# Measured with run.seed=1: give these again." in text
    assert "256 as configured; the student answers 32 requests a second with 16 in" in " ".join(text.split())


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
    assert "The knee, 16, is marked." in page
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


def options(**changes: Any) -> TuneOptions:
    return TuneOptions(Path("c.yaml"), (), Path("c.tuned.yaml"), 1.0, **changes)


PAID = {
    "kind": "openai",
    "url": "http://127.0.0.1:1",
    "prices": {"prompt": 1.0, "completion": 2.0},
}


def test_a_paid_endpoint_is_ramped_only_within_a_limit_and_says_what_that_costs():
    config = config_from({**RUN, "teacher": {"model": "t", "backend": PAID}})
    with pytest.raises(ConfigError, match=r"--paid: teacher\.backend\.prices is set, so give --limit-requests"):
        check_options(config, options(is_paid=True))
    check_options(config, options(limit_requests=10, is_paid=True))
    account = config.teacher.backend.open_account("teacher")  # type: ignore[union-attr]
    assert account is not None
    account.spending["teacher"] = Spending(requests=4, money=0.5)
    template = Template("score", next(prompts()), lambda stages: stages.rollout(), tokens=40)
    said = announcement("teacher", [template], RampLimits(20.0, 64, requests=1000), account)
    assert said == (
        "teacher: score requests of 40 tokens on average, 1 to 64 at a time, 20 s at most, "
        f"1000 requests in all at most, about 125 {account.currency}"
    )


def test_what_was_measured_is_kept_of_a_run_that_cannot_be_simulated(tmp_path):
    found = tuning(recommendations=[])
    choice = tune_command.chosen(config_from(RUN), PolicyNeeds(), found, [], tmp_path / "no run")
    assert (choice.ramps, choice.recommendations) == (found.ramps, [])
    assert "the run cannot be simulated, so its limits stay as configured: " in choice.warnings[0]


def test_a_replay_has_no_teacher_to_tune():
    config = config_from({**RUN, "teacher": {"model": "t", "cache": "scores.sqlite", "replay": True}})
    with pytest.raises(ConfigError, match=r"set teacher\.replay=false"):
        check_options(config, options())


@pytest.mark.long
def test_tune_measures_real_servers_and_its_limits_train(tmp_path, monkeypatch):
    """Without a teacher, whose server would take as long to start again."""
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
    assert tuning_section(found).plots[0].title == "student: throughput"
