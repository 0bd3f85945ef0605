"""What the report and the console say holds a run up."""

from __future__ import annotations

import asyncio
import itertools
import re
from types import SimpleNamespace
from typing import Any

import pytest

from spot_async.base import registry
from spot_async.base.events import Channel
from spot_async.base.retry import RetryPolicy
from spot_async.config import Config
from spot_async.errors import ThrottledError
from spot_async.loop.events import PhaseBegan, PhaseEnded
from spot_async.replicas.leasing import pool_of
from spot_async.replicas.life_cycle import State
from spot_async.replicas.replica import ReplicaStatus
from spot_async.stages.events import WaitClock
from spot_async.stages.services import STAGE_SERVERS
from spot_async.stages.stage import Stage, StageLimits
from spot_async.telemetry.bottleneck import PUBLISHES, RunTimes, ServerUse, StageUse, judge
from spot_async.telemetry.live_bottleneck import LiveBottleneck, replica_lines
from spot_async.telemetry.totals import may_be_asynchronous, roles_with_room, run_times
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.types import Traffic


def test_the_sentence_names_server_share_and_stages():
    times = RunTimes(
        wait_s=84.0,
        train_s=15.0,
        update_s=1.0,
        waited_for_s={"rollout": 21.0, "probe": 58.8, "score": 4.2},
        stages={"probe": StageUse(in_flight=200.0, queued=50.0, limit=256)},
        batch_size=64,
    )
    verdict = judge(times)
    assert verdict.sentence == (
        "Student bound: the trainer waited 84 % of the time, 70 % of that for probe and 25 % of that for rollout."
    )
    assert "the limit of 256 requests was mostly in use" in verdict.advice[0]
    assert "raise stages.probe.concurrency" in verdict.advice[1]


PROBE = {"probe": 9.0, "verify": 1.0}


@pytest.mark.parametrize(
    ("times", "sentence", "advice"),
    [
        (RunTimes(0.0, 0.0, 0.0), "No times were recorded", ""),
        (RunTimes(4.0, 6.0, 0.1), "Trainer bound: optimisation took 59 %", "training.ranks"),
        (RunTimes(3.0, 3.0, 4.0), "Weight-update bound", "disk"),
        (RunTimes(9.0, 1.0, 0.0), "The trainer waited 90 % of the time. What it waited for was not recorded.", ""),
        (RunTimes(9.0, 1.0, 0.0, {"score": 8.0, "rollout": 1.0}), "Teacher bound", "teacher.backend.threads"),
        (RunTimes(9.0, 1.0, 0.0, {"verify": 8.0, "rollout": 1.0}), "Verifier bound", "verifier.workers"),
        (RunTimes(9.0, 1.0, 0.0, {"score": 4.0, "rollout": 5.0}), "Student and teacher bound", "max_response_tokens"),
        (RunTimes(9.0, 1.0, 0.0, {"rollout": 9.0}), "100 % of that for rollout.", "max_response_tokens"),
        (RunTimes(9.0, 1.0, 0.0, {"mystery": 9.0}), "What it waited for was not recorded", ""),
        (RunTimes(9.0, 1.0, 0.0, {"nothing": 8.0, "score": 1.0}), "Policy bound: the trainer waited 90 %", "own code"),
        (RunTimes(9.0, 1.0, 0.0, PROBE, {"probe": StageUse(99.0, 3.0, 100)}, 64), "Student", "raise stages.probe"),
        (RunTimes(9.0, 1.0, 0.0, PROBE, {"probe": StageUse(99.0, 0.0, 100, 64)}, 64), "Student", "64 slots were full"),
        (RunTimes(9.0, 1.0, 0.0, PROBE, {"probe": StageUse(3.0, 0.0, 100)}, 64), "Student", "a few long ones"),
        (RunTimes(9.0, 1.0, 0.0, PROBE, {"probe": StageUse(40.0, 0.0, 100)}, 64), "Student", "was not the reason"),
        (RunTimes(9.0, 1.0, 0.0, PROBE), "Student", "policy.probe_top_k"),
    ],
)
def test_every_bottleneck_has_its_words_and_its_keys(times, sentence, advice):
    verdict = judge(times)
    assert sentence in verdict.sentence
    assert advice in " ".join(verdict.advice)


FULL_PROBES = StageUse(100.0, 31.0, 100)


@pytest.mark.parametrize(
    ("times", "brief"),
    [
        (RunTimes(4.0, 6.0, 0.1), "Trainer bound: optimisation took 59 % of the time; servers stood idle"),
        (RunTimes(3.0, 3.0, 4.0), "Weight-update bound: sending weights to the student's servers took 40 %"),
        (
            RunTimes(6.2, 3.8, 0.0, {"score": 6.2}, {"score": StageUse(8.0, 31.0, 8)}, 64),
            "Teacher bound: the trainer waited 62 % of the time, 100 % of that for score; "
            "the limit of 8 requests was full (8.0 of 8 score requests in flight, 31 queued, while the trainer waited "
            "for them); raise stages.score.concurrency as far as spot-async tune says",
        ),
        (
            RunTimes(9.0, 1.0, 0.0, PROBE, {"probe": FULL_PROBES}, 64),
            "raise stages.probe.concurrency as far as spot-async tune says",
        ),
        (RunTimes(9.0, 1.0, 0.0, PROBE, {"probe": StageUse(99.0, 0.0, 100, 64)}, 64), "64 slots were full"),
        (RunTimes(9.0, 1.0, 0.0, PROBE, {"probe": StageUse(3.0, 0.0, 100)}, 64), "a few long ones"),
        (
            RunTimes(9.0, 1.0, 0.0, PROBE, {"probe": StageUse(40.0, 0.0, 100)}, 64),
            "the server itself works at full speed",
        ),
        (RunTimes(9.0, 1.0, 0.0, PROBE), "Student bound: the trainer waited 90 % of the time, 90 % of that for probe"),
        (RunTimes(0.0, 0.0, 0.0), ""),
        (RunTimes(9.0, 1.0, 0.0, may_be_asynchronous=True), ""),
    ],
)
def test_the_same_verdict_fits_on_a_line(times, brief):
    assert brief in judge(times).brief
    assert bool(brief) == bool(judge(times).brief)


@pytest.mark.parametrize(
    "use",
    [FULL_PROBES, StageUse(99.0, 0.0, 100, 64), StageUse(3.0, 0.0, 100), StageUse(40.0, 0.0, 100),
     StageUse(196.0, 33.0, 196, is_limit_of_servers=True)],
)  # fmt: skip
@pytest.mark.parametrize("room", [(), ("student",)])
def test_the_line_ends_with_the_first_remedy_of_the_list_and_has_the_stages_load(use, room):
    verdict = judge(RunTimes(9.0, 1.0, 0.0, PROBE, {"probe": use}, 64, roles_with_room=room))
    assert verdict.brief.endswith(f"; {verdict.advice[1]}")
    assert re.search(rf"{use.in_flight:.0f}(\.0)? of {use.limit} probe .* {use.queued:.0f} queued", verdict.brief)


def test_what_is_said_of_a_stage_ends_with_a_remedy_for_its_own_server():
    """Also where more was waited for another server, by several stages together."""
    waited_for_s = {"rollout": 26.0, "probe": 20.0, "score": 40.0}
    stages = {stage: StageUse(in_flight=10.0, queued=0.0, limit=64) for stage in waited_for_s}
    verdict = judge(RunTimes(90.0, 5.0, 1.0, waited_for_s, stages))
    assert verdict.brief.startswith("Student and teacher bound: the trainer waited 94 % of the time, 47 % of that for")
    assert "10 of 64 score requests in flight" in verdict.brief
    assert "the server itself works at full speed; a faster teacher server" in verdict.brief
    assert verdict.brief.endswith(f"; {verdict.advice[1]}")


def test_replicas_are_advised_only_where_there_is_room_for_them():
    full = {"probe": StageUse(216.0, 22.0, 256, 64)}
    assert "replicas" not in " ".join(judge(RunTimes(9.0, 1.0, 0.0, PROBE, full, 64)).advice)
    assert "more student replicas" in judge(RunTimes(9.0, 1.0, 0.0, PROBE, full, 64, roles_with_room={"student"})).brief

    local = {"kind": "local", "url": None, "device": "cpu", "threads": 1, "replicas": 1}
    config = {"student": {"backend": local}, "teacher": {"backend": local}}
    assert roles_with_room(config, 2) == set()
    assert roles_with_room(config, 3) == {"student", "teacher"}
    assert roles_with_room(config, None) == set()
    elsewhere = {"student": {"backend": local | {"url": "http://a"}}, "teacher": {"backend": local | {"threads": 2}}}
    assert roles_with_room(elsewhere, 3) == {"student"}
    assert roles_with_room({"student": {"backend": {"kind": "vllm"}}, "teacher": None}, 1) == {"student"}


def test_where_the_servers_take_no_more_no_limit_of_ours_is_to_be_raised():
    use = StageUse(196.0, 33.0, 196, is_limit_of_servers=True)
    advice = " ".join(judge(RunTimes(9.0, 1.0, 0.0, PROBE, {"probe": use}, 64)).advice)
    assert "the 196 requests that the student's servers have shown that they can take were full" in advice
    assert "stages.probe.concurrency" not in advice


def test_servers_that_are_down_and_endpoints_that_refuse_come_before_any_limit_of_ours():
    use = StageUse(4.0, 31.0, 4, throttled_share=0.3)
    times = RunTimes(9.0, 1.0, 0.0, {"score": 9.0}, {"score": use}, 64, {"teacher": ServerUse(2, 0, 4)})
    assert "throttled by the endpoint, which lets in 4 at a time (30 % of what is sent" in judge(times).brief
    assert "throttled" in judge(times).advice[0]
    times = RunTimes(9.0, 1.0, 0.0, {"score": 9.0}, {"score": use}, 64, {"teacher": ServerUse(2, 1, 4)})
    assert "1 of 2 replicas of the teacher are down" in judge(times).brief
    calm = StageUse(4.0, 31.0, 4, throttled_share=0.01)
    times = RunTimes(9.0, 1.0, 0.0, {"score": 9.0}, {"score": calm}, 64, {"student": ServerUse(2, 1, 4)})
    assert "throttled" not in judge(times).brief
    assert "down" not in judge(times).brief


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (
            RunTimes(40.0, 10.0, 1.0, PROBE, iterations=10, may_be_asynchronous=True),
            "an iteration takes 5.1 s: spot-",
        ),
        (RunTimes(40.0, 10.0, 1.0, PROBE, may_be_asynchronous=True), "spot-async simulate CONFIG --from RUN says how"),
        (RunTimes(5.0, 46.0, 0.0, PROBE, may_be_asynchronous=True), ""),  # hardly worth it
        (RunTimes(40.0, 10.0, 1.0, PROBE), ""),
    ],
)
def test_a_strict_run_is_told_where_it_finds_what_staleness_would_bring(times, words):
    verdict = judge(times)
    assert verdict.staleness.startswith(words)
    assert bool(verdict.staleness) == bool(words)
    assert (verdict.advice[-1] == verdict.staleness) == bool(words)


def test_staleness_is_not_spoken_of_where_it_cannot_be_had():
    alone = {"student": {"backend": {"kind": "vllm"}}, "training": {"ranks": 1, "threads": 1}}
    assert may_be_asynchronous(alone, None)
    assert not may_be_asynchronous(alone | {"max_staleness": 1}, None)
    assert not may_be_asynchronous(alone | {"student": {"backend": {"sleep_while_training": True}}}, None)
    local = {"backend": {"kind": "local", "url": None, "device": "cpu", "threads": 1, "replicas": 1}}
    shared = alone | {"student": local, "teacher": local}
    assert may_be_asynchronous(shared, 3)
    assert not may_be_asynchronous(shared, 2)  # the trainer has no core of its own


@pytest.mark.parametrize("environment", [None, {"workers": 2}])
def test_no_command_is_advised_that_is_refused_beside_an_environment(environment):
    row = {"iteration": 1.0, "time/iteration_s": 10.0, "time/wait_for_batch_s": 9.0, "time/train_s": 1.0}
    row |= {"wait/rollout_s": 9.0, "stage/rollout/mean_in_flight": 8.0, "stage/rollout/mean_queued": 9.0}
    config = {"student": {"backend": {"kind": "vllm"}}, "stages": {"rollout": {"concurrency": 8}}}
    advice = judge(run_times([row], config | {"environment": environment})).advice
    assert any(line.startswith("raise stages.rollout.concurrency") for line in advice)
    said = [command for command in ("spot-async tune", "spot-async simulate") if command in " ".join(advice)]
    assert said == ([] if environment else ["spot-async tune"]) + ["spot-async simulate"]


@pytest.mark.parametrize(
    ("publish_s", "words"),
    [
        ({"drain": 30.0, "update weights": 10.0}, "before the weight update; a student server that loads weights"),
        ({"drain": 3.0, "update weights": 10.0}, "waiting for the weight update; publish to a faster disk"),
        ({"update weights": 3.0, "evaluate": 90.0}, "the evaluation; a higher evaluation.eval_every"),
        ({"update weights": 3.0, "write weights": 9.0}, "the weights to be on disk; a faster disk"),
    ],
)
def test_a_trainer_that_is_too_far_ahead_waits_for_what_publishing_does(publish_s, words):
    verdict = judge(RunTimes(1.0, 3.0, 4.0, publish_s={"wait for weights": 1.0, **publish_s}))
    assert verdict.brief.startswith("Publishing bound: the trainer waited 50 % of the time until its weights were s")
    assert words in verdict.brief
    assert "max_staleness" in verdict.advice[-1]


def key_exists(schemas: list[Any], key: str) -> bool:
    """Whether some schema (a plug-in's, where the key leads to one) has the key."""
    name, _, rest = key.partition(".")
    for schema in schemas:
        field = schema.model_fields.get(name)
        if field is None:
            continue
        group = {"backend": "backends", "policy": "policies", "verifier": "verifiers"}.get(name)
        if group is not None:
            inner = [registry.load(group, each).Settings for each in registry.names(group)]
        else:
            inner = [each for each in (field.annotation, *getattr(field.annotation, "__args__", ()))
                     if hasattr(each, "model_fields")]  # fmt: skip
        if not rest or key_exists(inner, rest):
            return True
    return False


def test_every_key_that_is_advised_is_a_key_of_the_configuration():
    uses = [None, FULL_PROBES, StageUse(99.0, 0.0, 100, 64), StageUse(3.0, 0.0, 100), StageUse(40.0, 0.0, 100),
            StageUse(4.0, 9.0, 4, throttled_share=0.5)]  # fmt: skip
    verdicts = [judge(RunTimes(4.0, 6.0, 0.1)), judge(RunTimes(3.0, 3.0, 4.0))]
    verdicts += [judge(RunTimes(3.0, 3.0, 4.0, publish_s={phase: 1.0})) for phase in PUBLISHES]
    for stage, use in itertools.product(STAGE_SERVERS, uses):
        stages = {stage: use} if use is not None else {}
        servers = {STAGE_SERVERS[stage]: ServerUse(2, 1, 4)}
        verdicts.append(judge(RunTimes(9.0, 1.0, 0.0, {stage: 9.0}, stages, 64, servers)))
    words = " ".join(" ".join([verdict.sentence, *verdict.advice]) for verdict in verdicts)
    keys = set(re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", words))
    assert {"stages.score.concurrency", "teacher.backend.url", "verifier.workers"} <= keys
    assert {key for key in keys if not key_exists([Config], key)} == set()


def live_verdict(run, say, every_s=60.0, **changes):
    """Return a live verdict on a run that can only be strict."""
    stage = {run.stage.name: {"concurrency": run.stage.concurrency}}
    config = {
        "student": {"backend": {"sleep_while_training": True}},
        "training": {"batch_size": 64},
        "stages": stage,
        **changes.pop("config", {}),
    }
    return LiveBottleneck(run, say, config, every_s=every_s, **changes)


class Run:
    """What a live verdict reads of an orchestrator; one stage whose requests take `latency_s` each."""

    is_strict = True

    def __init__(self, *, concurrency: int, latency_s: float, stage: str = "score") -> None:
        self.latency_s = latency_s
        self.events = Channel()
        self.stage = Stage(
            stage,
            pool_of(None),
            StageLimits(concurrency=concurrency, timeout_s=1e6, retry=RetryPolicy(8), waiting_capacity=1000),
            jitter=lambda: 0.0,
            events=self.events,
        )
        self.refusals = 0
        self.waits = WaitClock([self.stage])
        self.events.subscribe(self.waits)
        self.stages = SimpleNamespace(all=(self.stage,), events=self.events)

    async def ask(self, ordinal: int) -> None:
        async def answer(service, deadline):
            if self.refusals > 0:
                self.refusals -= 1
                raise ThrottledError("429", retry_after_s=1.0)
            await asyncio.sleep(self.latency_s)

        await self.stage.ask((ordinal,), answer)

    def phase_ended(self, name, started_s, ended_s, then):
        waits = self.waits.take(started_s, ended_s) if name == "wait for batch" else []
        self.events.publish(PhaseEnded("train", 1, name, started_s, ended_s, waits=waits))
        self.events.publish(PhaseBegan("train", 1, then, ended_s))


def live(run, verdicts, script, **config):
    """Run `script` while requests of prompts 0 to 38 are at the stage; a verdict every minute."""

    async def main():
        verdict = live_verdict(run, verdicts.append, config=config)
        async with asyncio.TaskGroup() as group:
            speaking = group.create_task(verdict.speak())
            for ordinal in range(39):
                group.create_task(run.ask(ordinal))
            await script()
            speaking.cancel()

    run_on_virtual_time(main())


def test_the_last_minute_is_judged_although_no_request_of_it_has_ended():
    verdicts = []
    run = Run(concurrency=8, latency_s=300.0)
    live(run, verdicts, lambda: asyncio.sleep(61.0))
    assert verdicts == [
        "Teacher bound: the trainer waited 100 % of the time, 100 % of that for score; the limit of 8 requests was "
        "full (8.0 of 8 score requests in flight, 31 queued, while the trainer waited for them); raise "
        "stages.score.concurrency as far as spot-async tune says"
    ]


def test_workers_of_an_environment_that_are_busy_are_to_be_more():
    verdicts = []
    run = Run(concurrency=64, latency_s=300.0, stage="environment")
    live(run, verdicts, lambda: asyncio.sleep(61.0), environment={"workers": 2})
    assert verdicts == [
        "Environment bound: the trainer waited 100 % of the time, 100 % of that for environment; the environment's 2 "
        "workers were full (39 of 64 environment requests in flight, 0 queued, while the trainer waited for them): a "
        "higher limit would only make them wait there; more processes for the environment (environment.workers), or "
        "one that answers faster"
    ]


def test_each_minute_is_judged_by_itself():
    verdicts = []
    run = Run(concurrency=8, latency_s=30.0)

    async def script():
        await asyncio.sleep(60.0)  # wait for the batch until here, and train from here on
        run.phase_ended("wait for batch", 0.0, 60.0, "train")
        await asyncio.sleep(61.0)

    live(run, verdicts, script)
    assert [line.split(":")[0] for line in verdicts] == ["Teacher bound", "Trainer bound"]


def test_a_throttled_minute_is_told_from_a_slow_one():
    verdicts = []
    run = Run(concurrency=8, latency_s=30.0)
    run.refusals = 20
    live(run, verdicts, lambda: asyncio.sleep(61.0))
    assert "throttled by the endpoint (" in verdicts[0]


def test_where_to_find_what_staleness_would_bring_is_said_once():
    said = []
    live(Run(concurrency=8, latency_s=300.0), said, lambda: asyncio.sleep(200.0), student={"backend": {"kind": "vllm"}})
    assert len(said) == 4
    assert [line for line in said if "max_staleness" in line] == [
        "spot-async simulate CONFIG --from RUN says how long it would take with max_staleness=1"
    ]


def test_what_the_servers_can_take_is_the_limit_and_those_that_are_down_are_counted():
    def replica(name, state, limit):
        return ReplicaStatus(name, state, 0, limit, 0, 0, None, Traffic())

    async def main():
        run = Run(concurrency=64, latency_s=30.0, stage="teacher_response")
        replicas = {"teacher": [replica("a", State.SERVING, 3), replica("b", State.RECOVERING, 512)]}
        tree = {"teacher": {"backend": {"slots": 1, "replicas": 2}}}
        verdict = live_verdict(run, pytest.fail, replicas=lambda: replicas, config=tree)
        await run.ask(0)
        return verdict.judge()

    verdict = run_on_virtual_time(main())
    assert "1.0 of 3 teacher_response requests in flight" in verdict.brief
    assert "1 of 2 replicas of the teacher are down" in verdict.brief
    assert "the teacher's 1 slots were full" in verdict.advice[1]


def test_where_the_endpoint_asked_for_a_pause_the_verdict_says_so_and_no_more_of_them_are_advised():
    paused = ReplicaStatus("a", State.SERVING, 0, 64, 0, 0, None, Traffic(), held_s=3540.0)

    async def main():
        run = Run(concurrency=64, latency_s=30.0)
        room = {"teacher": {"backend": {"kind": "vllm"}}}
        verdict = live_verdict(run, pytest.fail, replicas=lambda: {"teacher": [paused]}, config=room)
        await run.ask(0)
        return verdict.judge()

    brief = run_on_virtual_time(main()).brief
    assert "1 of 1 replicas of the teacher asked to be left alone, for another 59 min: a higher rate limit" in brief
    assert "more teacher replicas" not in brief
    pool = SimpleNamespace(replicas=[paused])
    assert replica_lines({"teacher": pool}) == ["a: serving, 0 of 64 in flight, left alone for another 59 min"]
