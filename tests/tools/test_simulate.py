"""`spot-async simulate`: no bound is beaten, a run's own rates give its own times, and bad input gets one line."""

from __future__ import annotations

import asyncio
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from faults.servers import Rates, SimulatedReplica, SimulatedServer
from joined_policy import Revises
from limits import same_limits
from msgspec.structs import replace
from only_teacher import only
from typer.testing import CliRunner

from spot_async.cli import app
from spot_async.config import Config
from spot_async.config.loading import config_from
from spot_async.errors import ConfigError, DataError
from spot_async.loop.events import IterationFinished
from spot_async.models.responses import counted_tokens
from spot_async.policies.opd import OpdPolicy
from spot_async.policies.spot import SpotPolicy
from spot_async.run_directory.reading import RunFiles
from spot_async.telemetry.bottleneck import judge
from spot_async.telemetry.run_log import iteration_metrics, sample_line
from spot_async.telemetry.totals import run_times
from spot_async.telemetry.trace import trace_to
from spot_async.testing.services import Latency, SimulatedTeacher
from spot_async.testing.simulation import make_policy as make_simulated_policy
from spot_async.testing.simulation import make_run
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.tools.simulate.fit import Timed, speed
from spot_async.tools.simulate.lengths import Asked, EnvironmentRates, LogNormal, Workload
from spot_async.tools.simulate.measured import Level, Ramp, StageLoad, Tuning
from spot_async.tools.simulate.rates import ClusterRates, TrainerRates, cluster_rates
from spot_async.tools.simulate.reading import read_run
from spot_async.tools.simulate.services import RatedStudent, RatedTrainer, prompts, rated_environment
from spot_async.tools.simulate.simulate_command import SimulateOptions, gathered
from spot_async.tools.simulate.simulation import Outcome, simulate, sufficient
from spot_async.tools.simulate.view import binding, own_words, staleness_words
from spot_async.tools.tune.choice import check_run, choose
from spot_async.types import PolicyNeeds, ScoreRequest, TokenScores

BATCH = 8
RATES: dict[str, Any] = {
    "student": {"tokens_per_s": 4000, "tokens_per_s_each": 200},
    "teacher": {"tokens_per_s": 4000},
    "trainer": {"tokens_per_s": 4000, "fixed_s": 0.2},
    "update_s": 0.3,
    "lengths": {"median": 300, "sigma": 0.8},
}


TRAINING: dict[str, Any] = {"iterations": 4, "batch_size": BATCH, "mini_batch_size": BATCH}


def configuration(policy: Any = "opd", **changes: Any) -> Config:
    servers = {"kind": "vllm", "url": "http://localhost:8000"}
    return config_from(
        {
            "student": {"model": "a/student", "backend": servers},
            "teacher": {"model": "a/teacher", "backend": servers},
            "data": {"train": "problems.jsonl"},
            "policy": policy,
            "sampling": {"max_response_tokens": 2000},
            "training": TRAINING,
            **changes,
        }
    )


def outcomes(
    config: Config,
    tmp_path: Path,
    *stated: str,
    max_staleness: int = 2,
    run: Path | None = None,
    rates: Any = RATES,
    iterations: int = 3,
) -> list[Outcome]:
    file = tmp_path / "rates.yaml"
    file.write_text(yaml.safe_dump(rates))
    options = SimulateOptions(run, rates=None if run else file, stated=stated)
    found, lengths, _ = gathered(tmp_path / "run.yaml", config, options)
    workload = Workload.of(lengths, config.sampling.max_response_tokens, found.environment)
    return simulate(config, found, workload, most_staleness=max_staleness, iterations=iterations)


@pytest.mark.parametrize(
    ("policy", "stated", "by"),
    [
        ("opd", ["student.tokens_per_s=1500"], "student"),
        ("opd", ["teacher.tokens_per_s=1000"], "teacher"),
        ("opd", ["trainer.tokens_per_s=1000"], "trainer"),
        ("opd", ["update_s=3"], "one batch's way"),
        ("spot", [], "student"),
    ],
)
def test_no_bound_is_beaten_and_no_token_is_older_than_allowed(policy, stated, by, tmp_path):
    # Responses of equal length make all batches alike, so that the bound holds of any few of them.
    equal = [*stated, "lengths.sigma=0"] if policy == "opd" else stated
    strict, one, two = found = outcomes(configuration(policy), tmp_path, *equal)
    noise = 1e-9 if policy == "opd" else 0.05
    assert all(each.iteration_s >= (1 - noise) * each.bound.seconds for each in found)
    assert [each.lag_max <= each.max_staleness for each in found] == [True] * 3
    assert strict.bound.by.startswith(by) or by in (one.bound.by, two.bound.by)
    assert two.iteration_s <= (1 + noise) * one.iteration_s <= (1 + noise) ** 2 * strict.iteration_s


def test_responses_are_of_whoever_writes_them_and_only_the_student_s_tokens_have_a_lag(tmp_path):
    both = {"kind": "distill", "divergence": "jsd", "student_share": 0.5}
    shared = outcomes(configuration(both), tmp_path)[-1]
    assert min(shared.busy["student"], shared.busy["teacher"]) > 0
    taught = outcomes(configuration("kd"), tmp_path)[-1]
    assert (taught.busy["student"], taught.lags) == (0, {})
    alone = outcomes(configuration(), tmp_path)[-1]
    assert 0 < sum(shared.lags.values()) < 0.8 * sum(alone.lags.values())
    for each in (shared, taught):
        assert each.response_tokens == pytest.approx(alone.response_tokens, rel=0.25)


def test_a_run_on_written_responses_takes_the_time_of_its_trainer(tmp_path):
    config = configuration({"kind": "joined_policy:Reads"}, teacher=None, prompt={"template": "student"})
    for each in outcomes(config, tmp_path, rates={"trainer": RATES["trainer"], "lengths": RATES["lengths"]}):
        assert (each.bound.by, each.busy, each.lags) == ("trainer", {}, {})
        assert each.iteration_s == pytest.approx(each.bound.seconds, rel=0.05)


def test_a_teacher_may_read_a_prompt_that_the_policy_makes(tmp_path):
    hinted, plain = (
        outcomes(configuration(kind), tmp_path, max_staleness=0)[0] for kind in ({"kind": "joined_policy:Hints"}, "opd")
    )
    assert hinted.iteration_s == pytest.approx(plain.iteration_s, rel=0.05)


def test_with_a_route_each_prompt_asks_one_teacher_and_without_one_all_of_them(tmp_path):
    def scored_s(policy: Any) -> list[float]:
        url = "http://localhost:800"
        teachers = {
            name: {"model": f"a/{name}", "backend": {"kind": "vllm", "url": f"{url}{n}"}}
            for n, name in enumerate(("math", "code"), 1)
        }
        found = outcomes(configuration(policy, teacher=None, teachers=teachers), tmp_path, max_staleness=0)[0]
        return [found.bound.parts[f"teachers.{name}"] for name in teachers]

    each = scored_s("opd")
    routed = scored_s({"kind": "opd", "route": {"to": {"sums": "math"}, "default": "code"}})
    assert sum(routed) == pytest.approx(sum(each) / 2)
    assert min(routed) > 0.3 * each[0]


def test_the_trainer_of_a_policy_that_revises_looks_at_each_batch_for_a_third_of_its_step(tmp_path):
    config = configuration({"kind": "joined_policy:Revises"})
    revised, plain = (
        outcomes(each, tmp_path, "trainer.fixed_s=0", max_staleness=0)[0] for each in (config, configuration())
    )
    assert revised.bound.parts["trainer"] == pytest.approx(plain.bound.parts["trainer"] * 4 / 3)
    recorded_run(tmp_path / "run", config, policy=Revises)  # whose looks are no time besides its tokens
    found = read_run(tmp_path / "run", config).rates["trainer"]
    assert found == pytest.approx({"tokens_per_s": 200.0, "fixed_s": 0.1})


def test_more_servers_make_no_run_slower(tmp_path):
    slow = "student.tokens_per_s=500"
    times = [outcomes(configuration(), tmp_path, slow, f"student.replicas={number}") for number in (1, 2, 4)]
    for fewer, more in pairwise(times):
        for before, after in zip(fewer, more, strict=True):
            assert after.iteration_s <= 1.03 * before.iteration_s
    assert times[2][0].iteration_s < 0.7 * times[0][0].iteration_s


def test_a_reference_that_is_the_student_s_base_takes_the_time_of_the_student_s_servers(tmp_path):
    servers = {"kind": "vllm", "url": "http://localhost:8000"}
    whole = {
        "policy": {"kind": "grpo", "samples": 2},
        "teacher": None,
        "training": {**TRAINING, "reference_kl": 1e-3},
        "reference": {"model": "a/student", "backend": {**servers, "url": "http://localhost:8001"}},
    }
    adapters = {
        **whole,
        "training": {**whole["training"], "lora": {"rank": 8}},
        "student": {"model": "a/student", "backend": {**servers, "weights": {"transport": "adapter"}}},
        "reference": None,
    }
    rates = {**RATES, "reference": {"tokens_per_s": 8000}}
    (beside,) = outcomes(configuration(**whole), tmp_path, rates=rates, max_staleness=0)
    (base,) = outcomes(configuration(**adapters), tmp_path, rates=rates, max_staleness=0)
    assert set(beside.bound.parts) == {"student", "reference", "trainer"}
    assert set(base.bound.parts) == {"student", "trainer"}
    extra_s = base.bound.parts["student"] - beside.bound.parts["student"]
    assert extra_s == pytest.approx(beside.bound.parts["reference"], rel=1e-3)
    assert base.iteration_s > beside.iteration_s


def test_a_student_that_must_be_drained_gains_less(tmp_path):
    in_flight = outcomes(configuration("opd"), tmp_path, max_staleness=1)[1]
    drained = outcomes(configuration("opd"), tmp_path, "in_flight_updates=false", max_staleness=1)[1]
    assert in_flight.iteration_s < 0.97 * drained.iteration_s


def recorded_run(
    path: Path, config: Config, *, policy: Any = SpotPolicy, student: Any = None, teacher: Any = None, **settings: Any
) -> float:
    """Leave the files of a run over simulated servers at `path`; return its seconds of an iteration.

    By default it is strict, and over servers that share their speed among requests.
    """
    path.mkdir()
    (path / "run.json").write_text('{"format": 1, "command": "train"}')
    (path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    finished: list[IterationFinished] = []

    class Listener:
        def on(self, event: Any) -> None:
            if isinstance(event, IterationFinished):
                finished.append(event)

    async def run() -> None:
        server = SimulatedServer("student", Rates(tokens_per_s=2000.0, tokens_per_s_each=100.0, update_s=0.5))
        async with student() if student else SimulatedReplica(server) as replica:
            run = make_run(
                make_simulated_policy(policy),
                student=replica,
                teachers=only(teacher() if teacher else SimulatedTeacher(Latency(0.5, 0.002, 0.1))),
                trainer=RatedTrainer(TrainerRates(tokens_per_s=200.0, fixed_s=0.1), grain=1),
                limits=same_limits(concurrency=512),
                batch_size=BATCH,
                **{"iterations": 4, **settings},
            )
            run.stages.events.subscribe(Listener())
            with trace_to(path / "trace.json") as follow:
                follow(run.orchestrator)
                await run.orchestrator.run()

    run_on_virtual_time(run())
    rows, lines = [], []
    for each in finished:
        times = each.times_s
        elapsed_s = times.wait_for_batch + times.train + times.update_weights
        trained = {
            "train/tokens": sum(int(counted_tokens(s.supervision).sum()) for s in each.samples),
            "train/trajectories": len(each.samples),
            "train/train_s": times.train - times.look - 0.1,
        }
        rows.append({"iteration": each.iteration, **iteration_metrics(each, elapsed_s), **trained})
        lines += [sample_line(each.iteration, sample) for sample in each.samples]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = json.JSONEncoder(default=lambda array: array.tolist())
    (path / "samples.jsonl").write_text("".join(plain.encode(line).replace("NaN", "null") + "\n" for line in lines))
    return sum(row["time/iteration_s"] for row in rows[1:]) / len(rows[1:])


def test_a_run_s_own_rates_and_lengths_give_its_own_time(tmp_path):
    config = configuration(
        "spot",
        sampling={"max_response_tokens": 64},
        stages={"probe": {"concurrency": 512}, "score": {"concurrency": 512}},
    )
    recorded_s = recorded_run(tmp_path / "run", config)
    (strict,) = outcomes(config, tmp_path, run=tmp_path / "run", max_staleness=0)
    assert strict.iteration_s == pytest.approx(recorded_s, rel=0.05)
    (said,) = own_words(tmp_path / "run", [strict])
    own = rf"that run itself took {recorded_s:.3g} ±\S+ s an iteration with max_staleness=0: simulated is [+-]\d%"
    assert re.fullmatch(own, said)


SHOP = {"object": "shop:Shop", "workers": 2}
PLAYED: dict[str, Any] = {"answer_s": 0.5, "answer_tokens": 30, "turns": 2.5}


def test_turns_are_as_long_together_as_a_response_and_the_environment_s_workers_are_named(tmp_path):
    config = configuration(environment=SHOP)
    plain = outcomes(configuration(), tmp_path, max_staleness=0)[0]
    found = {
        workers: outcomes(config, tmp_path, rates={**RATES, "environment": {**PLAYED, "workers": workers}})
        for workers in (None, 1, 100)
    }
    strict = found[None][0]
    assert strict.lags[0] == pytest.approx(plain.lags[0], rel=0.03)  # the student's tokens
    assert strict.response_tokens == pytest.approx(plain.response_tokens + 1.5 * PLAYED["answer_tokens"], rel=0.03)
    assert [each.lag_max <= each.max_staleness for each in found[None]] == [True] * 3
    times_s = [found[workers][-1].iteration_s for workers in (1, None, 100)]
    # A turn each of a batch's episodes, by so many workers.
    assert times_s[:2] == pytest.approx([BATCH * 2.5 * 0.5, BATCH * 2.5 * 0.5 / 2], rel=0.1)
    assert times_s[1] > 1.5 * times_s[2]
    for workers, named in ((None, 2), (1, 1)):
        assert found[workers][-1].bottleneck.startswith("Environment bound")
        assert f"the environment's {named} workers were" in found[workers][-1].advice[0]
    assert "environment" not in found[100][-1].bottleneck.lower()


def test_a_probe_s_later_turns_are_as_long_as_its_first_and_no_response_s(tmp_path):
    workload = Workload(LogNormal(median=60.0, sigma=1.0), 1, 1000, EnvironmentRates(turns=3))
    asked, sessions = Asked(), ("prompt-0-0", "prompt-0-1", "prompt-0-probe-9-5-0")
    most = dict(zip(sessions, (1000, 1000, 900), strict=True))
    turns = [[workload.turn(0, n, most[each], asked, each) for n, each in enumerate(sessions)] for _ in range(3)]
    assert turns[0] == turns[1] == turns[2]
    assert len({*turns[0]}) == 3
    assert workload.turn(0, 0, 2, asked, sessions[0]) == 2, "there is no room for more"


def test_a_strict_run_s_files_give_back_its_environment_and_its_time(tmp_path):
    config = configuration(environment=SHOP, sampling={"max_response_tokens": 400})
    truth = ClusterRates.model_validate({"student": {"tokens_per_s": 2000, "tokens_per_s_each": 100, "slots": 64}})
    workload = Workload(LogNormal(median=60.0, sigma=0.6), 1, 400, EnvironmentRates(workers=2, **PLAYED))
    recorded_s = recorded_run(
        tmp_path / "run",
        config,
        policy=OpdPolicy,
        student=lambda: RatedStudent("student", truth, workload, Asked()),
        environments={"": rated_environment(workload.environment, workload)},
        prompts=prompts(),
        sampling=config.sampling,
        iterations=12,
    )
    found = read_run(tmp_path / "run", config)
    assert found.rates["environment"] == pytest.approx(PLAYED, rel=0.25)  # tokens follow from a mean of shares
    assert found.lengths.mean == pytest.approx(workload.lengths.mean, rel=0.15)
    beside = [each.tokens + 1.5 * found.rates["environment"]["answer_tokens"] for each in found.lengths.prompts]
    assert np.mean(beside) == pytest.approx(8 + 1.5 * PLAYED["answer_tokens"], rel=0.2)  # what a teacher reads too
    (strict,) = outcomes(config, tmp_path, run=tmp_path / "run", max_staleness=0)
    assert strict.iteration_s == pytest.approx(recorded_s, rel=0.1)


class SerialTeacher(SimulatedTeacher):
    """An endpoint that scores one request after the other, prompts too, and answers some time later."""

    def __init__(self, tokens_per_s: float, latency_s: float) -> None:
        super().__init__(Latency(0.0, 0.0, 0.0))
        self._tokens_per_s = tokens_per_s
        self._latency_s = latency_s
        self._free_s = 0.0

    async def score(self, request: ScoreRequest, *, top_k: int) -> TokenScores:
        now_s = asyncio.get_running_loop().time()
        self._free_s = max(self._free_s, now_s) + len(request.token_ids) / self._tokens_per_s
        await asyncio.sleep(self._free_s + self._latency_s - now_s)
        return await super().score(request, top_k=top_k)


@pytest.mark.parametrize(
    ("policy", "student", "teacher", "iterations"),
    [
        pytest.param(
            SpotPolicy, {"tokens_per_s": 600.0, "slots": 64, "request_s": 0.05}, 150.0, 12, marks=pytest.mark.long
        ),
        # On virtual time, requests that have been on their way for equally long arrive in any order.
        pytest.param(
            OpdPolicy, {"tokens_per_s": 250.0, "slots": 4, "request_s": 0.0}, 400.0, 48, marks=pytest.mark.long
        ),
    ],
)
def test_a_strict_run_s_files_give_back_its_servers_and_foretell_an_asynchronous_one(
    policy, student, teacher, iterations, tmp_path
):
    truth = {**student, "tokens_per_s_each": 100.0}
    cluster = ClusterRates.model_validate({"student": truth, "update_s": 0.3})
    workload = Workload(LogNormal(median=30.0, sigma=0.6), grain=1, most=200)
    config = configuration(
        policy.__name__.removesuffix("Policy").lower(),
        student={"model": "a/student", "backend": {"kind": "local", "slots": student["slots"]}},
        sampling={"max_response_tokens": 200},
        stages={name: {"concurrency": 512} for name in ("rollout", "score", "candidates", "probe", "verify")},
    )
    parts: dict[str, Any] = {
        "policy": policy,
        "student": lambda: RatedStudent("student", cluster, workload, Asked()),
        "teacher": lambda: SerialTeacher(teacher, 0.5),
        "sampling": config.sampling,
    }
    recorded_run(tmp_path / "strict", config, **parts, iterations=iterations)
    found = read_run(tmp_path / "strict", config).rates
    assert found["student"] == pytest.approx(truth, rel=0.03, abs=0.01)
    serial = {"tokens_per_s": teacher, "tokens_per_s_each": teacher, "request_s": 0.5, "slots": 1}
    assert found["teacher"] == pytest.approx(serial, rel=0.03)
    then_s = recorded_run(tmp_path / "asynchronous", config, **parts, max_staleness=1, iterations=iterations)
    one = outcomes(config, tmp_path, run=tmp_path / "strict", max_staleness=1, iterations=iterations)[1]
    assert one.iteration_s == pytest.approx(then_s, rel=0.1)


def test_levels_stand_for_both_rates_and_another_speed_for_levels(tmp_path):
    levels = ["student.levels={4: 600, 1: 200, 8: 400}"]
    rates = {**RATES, "student": {"replicas": 1}}
    (strict,) = outcomes(configuration(), tmp_path, *levels, rates=rates, max_staleness=0)
    slower = ["student.levels={1: 100, 4: 300, 8: 200}"]
    (half,) = outcomes(configuration(), tmp_path, *slower, rates=rates, max_staleness=0)
    assert half.bound.parts["student"] == pytest.approx(2 * strict.bound.parts["student"], rel=1e-6)
    assert half.iteration_s > 1.3 * strict.iteration_s
    limited = configuration(stages={"rollout": {"concurrency": 4}})
    (fewer,) = outcomes(limited, tmp_path, *levels, rates=rates, max_staleness=0)
    assert fewer.iteration_s < strict.iteration_s, "8 at a time make this server slower than 4"
    sources = [{"student": {"levels": {1: 5.0}}}, RATES]
    found = cluster_rates(sources, configuration(), PolicyNeeds(teacher_top_k=16), knows_lengths=True)
    assert (found.student.levels, found.student.tokens_per_s) == (None, 4000)


def test_rates_that_nobody_knows_are_one_line(tmp_path):
    with pytest.raises(ConfigError) as refused:
        outcomes(configuration(), tmp_path, rates={"student": {"tokens_per_s": 100, "tokens_per_s_each": 10}})
    assert str(refused.value).count("\n") == 0
    assert str(refused.value).startswith("teacher.tokens_per_s, trainer.tokens_per_s, lengths.median: not known: ")
    assert all(words in str(refused.value) for words in ("--from RUN", "--rate teacher.tokens_per_s=", "tune"))
    with pytest.raises(ConfigError, match=r"^environment\.answer_s, environment\.turns: not known: "):
        outcomes(configuration(environment=SHOP), tmp_path)


@pytest.mark.parametrize("seed", [338, 2313, 2333, 3584])
def test_seconds_that_say_nothing_of_tokens_give_rates_all_the_same(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 12))
    starts_s = np.sort(rng.random(count) * 10 ** rng.uniform(-2, 1))
    ends_s, tokens = starts_s + 10 ** rng.uniform(-4, 1, count), rng.integers(1, 100, count)
    found = speed([Timed("a", *map(float, each)) for each in zip(starts_s, ends_s, tokens, strict=True)], None)
    assert found is None or (0 < found.tokens_per_s_each < np.inf and 0 < found.tokens_per_s < np.inf)


def test_a_run_of_another_model_or_without_a_trace_is_refused(tmp_path):
    config = configuration()
    recorded_run(tmp_path / "run", config)
    other = configuration(student={"model": "b/student"})
    with pytest.raises(DataError, match=r"^--from .*: that run trained a/student, .* b/student: give a run of this"):
        outcomes(other, tmp_path, run=tmp_path / "run")
    (tmp_path / "run" / "trace.json").unlink()
    with pytest.raises(DataError, match=r"^--from .*run: has no trace\.json \(run\.trace=false\)"):
        outcomes(config, tmp_path, run=tmp_path / "run")


def ramp(server: str, stage: str, tokens_per_s: float) -> Ramp:
    """Return a ramp of a server that gets no faster with more than 4 in flight."""

    def level(in_flight: int) -> Level:
        done = min(in_flight, 4)
        load = {stage: StageLoad(requests=done, busy_s=10.0 * in_flight)}
        tokens = int(10 * done / 4 * tokens_per_s)
        return Level(
            concurrency=in_flight, seconds=10.0, requests=done, tokens=tokens, p50_s=1.0, p95_s=1.0, stages=load
        )

    return Ramp(server=server, levels=[level(in_flight) for in_flight in (1, 2, 4, 8)], ended="flat")


def measured(ramps: list[Ramp]) -> Tuning:
    return Tuning(measured="", seconds=1.0, prompts=1, requests_per_prompt={}, ramps=ramps)


def test_tune_simulate_and_the_verdict_say_the_same_of_the_same_run(tmp_path):
    config = configuration(sampling={"max_response_tokens": 64})
    recorded_run(tmp_path / "run", config, policy=OpdPolicy, iterations=8)
    check_run(tmp_path / "run", config)
    cut_short = ramp("student", "rollout", 1000.0)
    ramps = [replace(cut_short, levels=cut_short.levels[:2], ended="time"), ramp("teacher", "score", 1000.0)]
    tuned = choose(config, PolicyNeeds(teacher_top_k=16), measured(ramps), [], tmp_path / "run")
    limits = {each.key: each.recommended for each in tuned.recommendations}
    assert "stages.rollout.concurrency" not in limits, "nobody knows how fast the student is with more in flight"
    assert limits["max_staleness"] > 0
    assert limits["stages.score.concurrency"] in (1, 2, 4, 8)
    score = config.stages.score.model_copy(update={"concurrency": limits["stages.score.concurrency"]})
    config = config.model_copy(update={"stages": config.stages.model_copy(update={"score": score})})
    found = outcomes(config, tmp_path, run=tmp_path / "run", iterations=6)
    assert tuned.advice[0] == staleness_words(found)
    assert tuned.advice[1:] == binding(sufficient(found))
    files = RunFiles(tmp_path / "run")
    verdict = judge(run_times(files.metrics(), files.config()))
    assert verdict.sentence.split(":")[0] == found[0].bottleneck.split(":")[0]
    (taken_s,) = re.findall(r"^an iteration takes ([\d.]+) s: spot-async simulate", verdict.staleness)
    assert found[0].iteration_s == pytest.approx(float(taken_s), rel=0.15)


def test_tune_leaves_the_staleness_alone_where_trainer_and_servers_share_cores(tmp_path):
    student = {"model": "a/student", "backend": {"kind": "local"}}
    config = configuration(student=student, sampling={"max_response_tokens": 64})
    recorded_run(tmp_path / "run", config, policy=OpdPolicy)
    tuned = choose(config, PolicyNeeds(teacher_top_k=16), measured([]), [], tmp_path / "run")
    assert tuned.recommendations == []
    assert "they slow each other down, which is not simulated" in tuned.advice[-1]


def test_the_command_prints_json(tmp_path):
    stated = ["--rate", "teacher.replicas=3", "--max-staleness", "1", "--iterations", "2", "--json"]
    done = CliRunner().invoke(app, [*files(tmp_path, configuration()), *stated])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["rates"]["teacher"]["replicas"] == 3
    assert [each["max_staleness"] for each in found["outcomes"]] == [0, 1]


def test_a_student_that_sleeps_is_simulated_as_it_can_be_trained(tmp_path: Path) -> None:
    sleeping = configuration().student.backend.model_copy(update={"sleep_while_training": True})
    config = configuration()
    config = config.model_copy(update={"student": config.student.model_copy(update={"backend": sleeping})})
    assert [each.max_staleness for each in outcomes(config, tmp_path)] == [0]


def files(tmp_path: Path, config: Config) -> list[str]:
    """Write a configuration and rates, and return the arguments of a short simulation of them."""
    config_file, rates = tmp_path / "c.yaml", tmp_path / "rates.yaml"
    config_file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    rates.write_text(yaml.safe_dump(RATES))
    return ["simulate", str(config_file), "--rates", str(rates), "--max-staleness", "0", "--iterations", "1"]


def test_people_are_told_how_long_the_whole_run_takes_and_how_far_one_orchestrator_goes(tmp_path):
    done = CliRunner().invoke(app, files(tmp_path, configuration()))
    assert done.exit_code == 0, done.output
    assert "training.iterations=4 take about" in done.output
    refills = CliRunner().invoke(app, [*files(tmp_path, configuration()), "training.refill=true"])
    assert "training.iterations=4 take at least" in refills.output
    assert re.search(r"one orchestrator, .*, leads about [\d,]+ times as many such servers", done.output)


@pytest.mark.parametrize("selection", ["earliest", "mine:by"])
def test_a_run_by_another_rule_that_skips_answers_is_simulated(tmp_path, monkeypatch, selection):
    (tmp_path / "mine.py").write_text("def by(predictors):\n    return predictors['gap']\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = configuration({"kind": "spot", "selection": selection, "skip_answer": True})
    done = CliRunner().invoke(app, files(tmp_path, config))
    assert done.exit_code == 0, done.output


def test_without_any_source_of_rates_one_line_says_what_to_give(tmp_path):
    with pytest.raises(ConfigError, match="not known: give --from RUN"):
        gathered(tmp_path / "run.yaml", configuration(), SimulateOptions())
