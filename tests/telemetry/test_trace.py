"""The trace file of runs on virtual time, and which stage is named as the one that the trainer waits for."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from limits import same_limits
from only_teacher import only

from spot_async.config import SamplingConfig
from spot_async.loop.events import IterationFinished
from spot_async.loop.publishing import LiveEvaluation
from spot_async.policies.opd import OpdPolicy
from spot_async.policies.spot import SpotPolicy
from spot_async.replicas.leasing import OneService
from spot_async.stages.events import RequestAsked, RequestEnded, WaitClock, seconds_by_stage
from spot_async.telemetry import trace
from spot_async.telemetry.trace import Lanes, TraceFile, trace_to
from spot_async.testing.services import VOCAB_SIZE, capabilities, generation, token_scores
from spot_async.testing.simulation import make_policy, make_run
from spot_async.types import Verdict


class Timed:
    """Every service at once, with latencies one can add up by hand: the rollout of prompt i takes i + 1 s."""

    async def generate(self, prompt_ids, sampling, *, session, **settings):
        await asyncio.sleep(1.0 + int(session.removeprefix("prompt-")))
        return generation([5, 1])

    async def score(self, request, **settings):
        await asyncio.sleep(0.5)
        return token_scores([0.0, 0.0])

    async def verify(self, problem, text, **settings):
        await asyncio.sleep(0.25)
        return Verdict.CORRECT

    async def update_weights(self, snapshot, *, deadline):
        await asyncio.sleep(0.125)


class TwoServers:
    """A role's pool: prompts take turns."""

    def __init__(self, service):
        self._leases = [OneService(service), OneService(service)]
        self._leases[0].replica, self._leases[1].replica = "student", "student-2"

    async def lease(self, request):
        return self._leases[request.priority[0] % 2]


def timed_run(verifier):
    """Two prompts through on-policy distillation."""
    student, teachers, sinks = TwoServers(Timed()), only(Timed()), [Timed()]
    services = {"student": student, "teachers": teachers, "verifier": verifier, "weight_sinks": sinks}
    return make_run(make_policy(OpdPolicy), **services, iterations=1, batch_size=2)


def spot_run(**sizes):
    """SPOT on simulated services, scarce slots so that requests queue."""
    sampling = SamplingConfig(max_response_tokens=128)
    return make_run(make_policy(SpotPolicy), limits=same_limits(concurrency=5), sampling=sampling, **sizes)


def record(path, run):
    """The events of a whole run, with the names of tracks in place of their ids."""
    traced(path, run)
    events = json.loads(path.read_bytes())
    names = {(e["name"], e["pid"], e["tid"]): e["args"].get("name") for e in events if e["ph"] == "M"}
    for event in events:
        event["process"] = names["process_name", event["pid"], 0]
        if event["ph"] in "Xsf":
            event["thread"] = names["thread_name", event["pid"], event["tid"]]
    return events


def traced(path, run):
    with trace_to(path) as follow:
        follow(run.orchestrator)
        run.finish()


def label(event):
    """A slice's name, and whose it is where a prompt has it."""
    return " ".join(str(part) for part in (event["name"], event["args"].get("prompt")) if part is not None)


def slices(events, process, thread=None):
    return [
        (label(e), e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in events
        if e["ph"] == "X" and e["process"] == process and thread in (None, e["thread"])
    ]


def test_every_span_of_a_small_run_is_where_it_must_be(tmp_path):
    run = timed_run(verifier=Timed())
    events = record(tmp_path / "trace.json", run)

    # prompt 0: rollout 0-1, score 1-1.5, verify 1-1.25; prompt 1: rollout 0-2, score 2-2.5, verify 2-2.25
    assert slices(events, "student: rollout") == [("rollout 0", 0.0, 1.0), ("rollout 1", 0.0, 2.0)]
    assert slices(events, "teacher: score") == [("score 0", 1.0, 1.5), ("score 1", 2.0, 2.5)]
    assert slices(events, "verifier: verify") == [("verify 0", 1.0, 1.25), ("verify 1", 2.0, 2.25)]
    assert slices(events, "prompts") == [("prompt 0", 0.0, 1.5), ("prompt 1", 0.0, 2.5)]
    assert slices(events, "trainer", "iterations") == [("iteration 1", 0.0, 3.625)]
    assert slices(events, "trainer", "trainer") == [
        ("wait for batch", 0.0, 2.5),
        ("waits for rollout", 0.0, 2.0),  # score 0 runs beside rollout 1, and is not the one to wait for
        ("waits for score", 2.0, 2.5),  # longer than verify
        ("train", 2.5, 3.5),
        ("update weights", 3.5, 3.625),
    ]
    of_prompts = {e["name"] for e in events if e["ph"] == "X" and e["process"] != "trainer"}
    assert of_prompts == {"prompt", "rollout", "score", "verify"}  # by kind, so that viewers sum up what is alike
    threads = {(e["process"], label(e)): e["thread"] for e in events if e["ph"] == "X"}
    assert threads["student: rollout", "rollout 0"] != threads["student: rollout", "rollout 1"]
    assert threads["teacher: score", "score 0"] == threads["teacher: score", "score 1"]  # one after the other

    arrows = {(e["ph"], e["id"]): e for e in events if e["ph"] in "sf"}
    assert sorted(arrows) == [("f", 0), ("f", 1), ("s", 0), ("s", 1)]
    for ordinal, end_s in ((0, 1.5), (1, 2.5)):
        start, end = arrows["s", ordinal], arrows["f", ordinal]
        assert (start["process"], start["thread"]) == ("prompts", threads["prompts", f"prompt {ordinal}"])
        assert start["ts"] == end_s * 1e6 - 1
        assert (end["process"], end["thread"], end["ts"], end["bp"]) == ("trainer", "trainer", 2.5e6, "e")

    counters = [(e["ts"] / 1e6, e["args"]) for e in events if e["ph"] == "C" and e["name"] == "rollout"]
    assert counters == [
        (0.0, {"in flight": 2, "waiting": 0}),
        (1.0, {"in flight": 1, "waiting": 0}),
        (2.0, {"in flight": 0, "waiting": 0}),
    ]
    at_servers = [e for e in events if e["ph"] == "C" and e["process"] == "servers"]
    assert [(e["name"], e["ts"] / 1e6, e["args"]["in flight"]) for e in at_servers] == [
        ("student", 0.0, 1),
        ("student-2", 0.0, 1),
        ("student", 1.0, 0),
        ("student-2", 2.0, 0),
    ]
    sent_to = {label(e): e["args"].get("server") for e in events if e["ph"] == "X"}
    assert (sent_to["rollout 0"], sent_to["rollout 1"], sent_to["score 0"]) == ("student", "student-2", None)
    used = {"trainer", "prompts", "servers", "student: rollout", "teacher: score", "verifier: verify"}
    assert {e["process"] for e in events} == used  # not the stages that this policy asks nothing
    assert run.stages.all[0].prompts == 0
    assert run.journal.results[0].times_s.waited_for == {"rollout": 2.0, "score": 0.5}


def test_verdicts_of_an_immediate_verifier_are_counted_and_not_drawn(tmp_path):
    class Immediate(Timed):
        async def verify(self, problem, text, **settings):
            return Verdict.CORRECT

    events = record(tmp_path / "trace.json", timed_run(verifier=Immediate()))
    assert slices(events, "verifier: verify") == []
    (iteration,) = [e for e in events if e["name"] == "iteration 1"]
    assert iteration["args"]["brief"] == {"verify": 2}
    assert len(slices(events, "student: rollout")) == 2


def test_slices_of_a_track_nest_or_follow_and_every_trained_prompt_has_its_arrow(tmp_path):
    events = record(tmp_path / "trace.json", spot_run(iterations=3, batch_size=16))
    tracks = {}
    for event in events:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        open_until = []
        for start, end in spans if len(spans) < 2 else sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)
    for ended in "sf":
        assert sorted(e["id"] for e in events if e["ph"] == ended) == list(range(48))
    for stage in ("student: rollout", "student: probe"):  # lanes are as many as slots were ever busy
        assert len({e["thread"] for e in events if e["ph"] == "X" and e["process"] == stage}) == 5
    in_flight = [e["args"]["in flight"] for e in events if e["ph"] == "C" and e["name"] == "probe"]
    assert max(in_flight) == 5
    assert in_flight[-1] == 0
    waits = [name for name, _, _ in slices(events, "trainer", "trainer") if name.startswith("waits for")]
    assert waits.count("waits for probe") >= 3


def test_publishing_beside_the_trainer_has_a_track_with_all_its_phases(tmp_path):
    run = spot_run(
        iterations=4,
        batch_size=4,
        max_staleness=1,
        capabilities={"student": capabilities(VOCAB_SIZE, in_flight_updates=False)},
        evaluation=LiveEvaluation(lambda iteration: iteration == 2, lambda iteration: asyncio.sleep(100.0)),
    )
    events = record(tmp_path / "trace.json", run)
    lane = sorted(slices(events, "trainer", "publishing"), key=lambda span: span[1:])
    assert [name for name, *_ in lane][:8] == [
        *["wait for weights", "drain", "update weights"] * 2,
        "evaluate",
        "wait for weights",
    ]
    assert all(first[2] <= second[1] for first, second in pairwise(lane))
    (evaluation,) = (span for span in lane if span[0] == "evaluate")
    assert evaluation[2] - evaluation[1] == pytest.approx(100.0)
    trains = [span for span in slices(events, "trainer", "trainer") if span[0] == "train"]
    assert any(started < evaluation[2] and ended > evaluation[1] for _, started, ended in trains)  # at the same time
    weights = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "weights"]
    assert weights[0] == {"trained": 1, "served": 0}
    assert weights[-1] == {"trained": 4, "served": 4}
    assert not slices(record(tmp_path / "strict.json", spot_run(iterations=1, batch_size=4)), "trainer", "publishing")


def test_a_killed_runs_file_needs_nothing_but_its_bracket(tmp_path):
    path = tmp_path / "trace.json"
    whole = record(path, spot_run(iterations=1, batch_size=4))
    lines = path.read_bytes().splitlines(keepends=True)
    for cut in (2, len(lines) // 2, len(lines) - 1):
        text = b"".join(lines[:cut]).rstrip().removesuffix(b",") + b"]"
        assert len(json.loads(text)) == cut - 1 < len(whole) + 1


def test_events_reach_the_disk_with_every_phase(tmp_path):
    path, seen = tmp_path / "trace.json", []
    run = spot_run(iterations=5, batch_size=4)

    class Reader:
        def on(self, event):
            if isinstance(event, IterationFinished):
                seen.append(path.read_bytes())

    run.stages.events.subscribe(Reader())
    record(path, run)
    finished = [e["name"] for e in json.loads(seen[1].rstrip() + b"]") if e["name"].startswith("iteration ")]
    assert finished == ["iteration 1", "iteration 2"]


def test_a_run_killed_before_its_first_phase_ends_leaves_a_file_that_opens(tmp_path):
    path = tmp_path / "trace.json"
    with trace_to(path) as follow:
        follow(spot_run(iterations=1, batch_size=4).orchestrator)
        assert json.loads(path.read_bytes() + b"]")


def test_a_long_run_keeps_the_trainers_track_and_ever_fewer_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "SHARE_BYTES", 40_000)
    events = record(tmp_path / "trace.json", spot_run(iterations=40, batch_size=4))
    iterations = [e for e in events if e["name"].startswith("iteration ")]
    assert len(iterations) == 40
    kept = [e["name"] for e in iterations if "requests" not in e["args"]]
    assert kept[:2] == ["iteration 1", "iteration 2"]
    assert 3 < len(kept) < 20
    rollouts = [e for e in events if e["ph"] == "X" and e["process"] == "student: rollout"]
    assert len(rollouts) == 4 * len(kept)
    begun, arrived = (sorted(e["id"] for e in events if e["ph"] == end) for end in "sf")
    assert begun == arrived
    assert "keeps those of one iteration in 2" in json.dumps(events)


@pytest.mark.parametrize("spoil", [lambda path: path.symlink_to("/dev/full"), lambda path: path.mkdir()])
def test_a_file_that_takes_no_trace_ends_the_trace_and_not_the_run(tmp_path, spoil):
    spoil(tmp_path / "trace.json")
    run = spot_run(iterations=2, batch_size=4)
    traced(tmp_path / "trace.json", run)
    assert run.orchestrator.state.iteration == 2


def test_an_empty_trace_is_valid(tmp_path):
    TraceFile(tmp_path / "trace.json").close()
    assert json.loads((tmp_path / "trace.json").read_bytes()) == []


def test_lanes_are_as_few_as_overlap_demands():
    rng = np.random.default_rng(0)
    spans = [(int(start), int(start + length)) for start, length in rng.integers(0, 100, (300, 2))]
    lanes, placed = Lanes(), {}
    for start, end in sorted(spans, key=lambda span: span[1]):
        placed.setdefault(lanes.place(start, end), []).append((start, end))
    for row in placed.values():
        assert all(first[1] <= second[0] for first, second in pairwise(row))
    deepest = max(sum(start <= at < max(end, start + 1) for start, end in spans) for at in range(200))
    assert len(lanes) <= deepest


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # (time, prompts at rollout, at score) as each request ends
        ([(1.0, 2, 0), (3.0, 1, 1), (4.0, 0, 1)], {"rollout": 3.0, "score": 1.0}),
        ([(1.0, 1, 2), (4.0, 1, 0)], {"score": 1.0, "rollout": 3.0}),
        ([], {"nothing": 4.0}),
    ],
)
def test_each_moment_of_a_wait_belongs_to_the_stage_with_most_prompts(events, expected):
    rollout, score = (SimpleNamespace(name=name, prompts=0) for name in ("rollout", "score"))
    clock = WaitClock([rollout, score])
    for at, rollout.prompts, score.prompts in events:
        clock.on(RequestEnded("rollout", (0,), 0.0, 0.0, at, "done"))
    rollout.prompts = score.prompts = 0
    waits = clock.take(0.0, 4.0)
    assert seconds_by_stage(waits) == pytest.approx(expected)
    assert all(first.ended_s == second.started_s for first, second in pairwise(waits))


def test_time_before_a_request_is_asked_is_not_that_of_its_stage():
    """A policy that waits outside of all stages holds the run up itself."""
    rollout, score = (SimpleNamespace(name=name, prompts=0) for name in ("rollout", "score"))
    clock = WaitClock([rollout, score])
    clock.on(RequestAsked(0.0))
    rollout.prompts = 1
    clock.on(RequestEnded("rollout", (0,), 0.0, 0.0, 1.0, "done"))
    rollout.prompts = 0
    clock.on(RequestAsked(4.0))
    score.prompts = 1
    clock.on(RequestEnded("score", (0,), 4.0, 4.0, 4.5, "done"))
    score.prompts = 0
    assert seconds_by_stage(clock.take(0.0, 4.5)) == {"rollout": 1.0, "nothing": 3.0, "score": 0.5}
