"""Runs on real servers with faults: a student killed in mid-run, and a teacher behind a bad connection.

The orchestrator, its stages, pools and the feed check are a run's own. The trainer publishes two models in turns, so
that every number which it was fed can be compared with a forward of the weights that it names.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import faulty_proxy
import numpy as np
import pytest
from coin_verifier import CoinVerifier
from conftest import StartServer, TinyModels
from only_teacher import only
from parity import PARITY_NATS, Dense, decisions, own
from server_process import command_line, expect_gone, name_of, run_server
from tiny_models import TOKENS

from spot_async.backends.shared.launch import free_port
from spot_async.backends.shared.launch_settings import LaunchSettings
from spot_async.base.events import Event
from spot_async.base.processes.guard import process_tree
from spot_async.base.tasks import gather, watched
from spot_async.config import ModelConfig, SamplingConfig, ServingConfig
from spot_async.errors import DeadlineExceededError, PoisonedReplyError, RequestError
from spot_async.loop.events import PromptEnded
from spot_async.loop.orchestrator import Orchestrator
from spot_async.models.files import read_model
from spot_async.policies.spot import SpotPolicy
from spot_async.replicas.life_cycle import State
from spot_async.replicas.pool import ReplicaPool
from spot_async.running.services import backend_factories
from spot_async.testing.simulation import make_policy, make_run
from spot_async.types import Problem, Prompt, Supervision, TrainReport, WeightSnapshot, WeightVersion

BATCH, ITERATIONS, PEACEFUL = 8, 4, 1  # iterations before the first signal
PROMPT_TOKENS, RESPONSE_TOKENS = 280, 24  # vLLM on a CPU caches prefixes by 128 tokens
TIMEOUT_S = 240.0
SCORING = ("/generate", "/v1/completions", "/inference/v1/generate")
# No flipped bits: in a digit of JSON without a digest they cannot be seen, and TCP and TLS check for them.
FAULTS = ("storm", "cut", "garble", "nan", "duplicate", "gateway", "reset", "error", "slow")


@dataclass
class Publisher:
    """The trainer, and a listener. The weights of even steps are the student's, those of odd ones are others."""

    models: TinyModels
    batches: list[Sequence[Supervision]] = field(default_factory=list)
    dead: list[RequestError] = field(default_factory=list)
    is_over: bool = False  # admits no further batch

    def weights(self, step: int) -> Path:
        return self.models.other if step % 2 else self.models.student

    async def train(self, iteration: int, batch: Sequence[Supervision]) -> TrainReport:
        self.batches.append(batch)
        snapshot = WeightSnapshot(directory=str(self.weights(iteration + 1)), version=WeightVersion(0, iteration + 1))
        return TrainReport(snapshot=snapshot, metrics={})

    async def published(self, step: int) -> tuple[()]:
        return ()

    def on(self, event: Event) -> None:
        match event:
            case PromptEnded(error=RequestError() as error):
                self.dead.append(error)

    @property
    def trained(self) -> list[Supervision]:
        return [each for batch in self.batches for each in batch]

    def expect_every_number_to_be_right(self, dense: Dense) -> None:
        """Of the student by the weights that a sample names, and of the teacher."""
        for step, batch in enumerate(self.batches):
            assert [each.version for each in batch] == [WeightVersion(0, step)] * BATCH
        for each in self.trained:
            assert each.version is not None
            sequence = [*each.prompt_ids, *each.response_ids]
            for model, found in (
                (self.weights(each.version.step), each.behavior_logprobs),
                (self.models.teacher, each.pulls[0].logprobs),
            ):
                expected = own(decisions(dense(model, sequence), each.prompt_ids, each.response_ids), each.response_ids)
                np.testing.assert_allclose(found, expected, rtol=0, atol=PARITY_NATS)


def prompt(ordinal: int) -> Prompt:
    token_ids = np.random.default_rng(ordinal).integers(5, TOKENS, PROMPT_TOKENS).astype(np.int32)
    return Prompt(ordinal=ordinal, problem=Problem(id=f"p{ordinal}", text="", answer=""), token_ids=token_ids)


def prompts(publisher: Publisher) -> Iterator[Prompt]:
    """Whole batches until it is over."""
    for ordinal in itertools.count():
        if publisher.is_over and ordinal % BATCH == 0:
            return
        yield prompt(ordinal)


@asynccontextmanager
async def orchestrated(
    publisher: Publisher, student: ReplicaPool[Any], teacher: ReplicaPool[Any], iterations: int
) -> AsyncIterator[Orchestrator]:
    """A SPOT run over pools that are entered."""
    files = read_model("student", str(publisher.models.student))
    async with CoinVerifier(CoinVerifier.Settings(kind="coin")) as verifier:
        deadline = asyncio.get_running_loop().time() + TIMEOUT_S
        run = make_run(
            make_policy(SpotPolicy, files.policy_context, positions=1, score_top_k=8, probe_top_k=3),
            student=student,
            teachers=only(teacher),
            verifier=verifier,
            trainer=publisher,
            prompts=prompts(publisher),
            vocabulary=files.vocabulary,
            capabilities={
                "student": await student.capabilities(deadline=deadline),
                "teacher": await teacher.capabilities(deadline=deadline),
            },
            sampling=SamplingConfig(max_prompt_tokens=PROMPT_TOKENS, max_response_tokens=RESPONSE_TOKENS),
            iterations=iterations,
            batch_size=BATCH,
            vocab_size=files.vocab_size,
            weight_update_timeout_s=TIMEOUT_S,
            max_dead_share=1.0,
        )
        (scores,) = (each for each in run.stages.all if each.name == "score")
        scores.limits, scores._attempt_timeout_s = replace(scores.limits, timeout_s=10.0), 10.0  # given up soon
        run.stages.events.subscribe(publisher)
        yield run.orchestrator


def pool_of(role: str, model: Path, backend: Any, folder: Path, *, are_ours: bool = False) -> ReplicaPool[Any]:
    settings = ModelConfig(model=str(model), backend=backend, serving=ServingConfig(stall_s=5.0))
    return ReplicaPool(role, backend_factories(settings, role, folder), settings.serving, are_ours=are_ours)


async def both(*coroutines: Any) -> None:
    await gather(coroutines)


async def until(condition: Callable[[], bool]) -> None:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():  # noqa: ASYNC110 - looked at from outside, as a person would
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"not so after {TIMEOUT_S:g} s: {inspect.getsource(condition).strip()}")


def children() -> set[int]:
    return process_tree(os.getpid()).keys() - {os.getpid()}


async def freeze_and_thaw(pid: int, pool: ReplicaPool[Any]) -> None:
    """A frozen server loses what it has in flight, and continues as it is once it thaws."""
    await until(lambda: pool.replicas[0].in_flight > 0)
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: pool.replicas[0].state is State.RECOVERING)
    await until(lambda: pool.replicas[0].in_flight == 0)  # while it is still frozen
    os.kill(pid, signal.SIGCONT)
    await until(lambda: pool.replicas[0].state is State.SERVING)
    assert pool.replicas[0].restarts == 0


def engine_among(pids: set[int]) -> int:
    [engine] = [pid for pid in pids if "EngineCore" in name_of(pid)]
    return engine


def server_among(pids: set[int]) -> int:
    """Its first process, which is not the guard above it."""
    [guard] = [pid for pid in pids if int(process_tree(pid)[pid][1]) == os.getpid()]
    [server] = [pid for pid in pids if int(process_tree(pid)[pid][1]) == guard]
    return server


@pytest.fixture(scope="module")
def faults() -> ModuleType:
    """`tests/support/faulty_proxy.py`."""
    return faulty_proxy


class Bad:
    """A proxy's plan: once it is on, every third request for scores meets the next fault, until each came twice."""

    def __init__(self) -> None:
        self.is_on = False
        self._asked = 0

    def __call__(self, number: int, path: str) -> str | None:
        if not self.is_on or path not in SCORING:
            return None
        self._asked += 1
        turn, rest = divmod(self._asked, 3)
        return None if rest or turn > 2 * len(FAULTS) else FAULTS[turn % len(FAULTS)]


@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=pytest.mark.nightly)])
async def test_a_run_outlives_a_frozen_and_killed_student_and_a_bad_connection_to_its_teacher(
    kind: str,
    request: pytest.FixtureRequest,
    models: TinyModels,
    dense_logprobs: Dense,
    faults: ModuleType,
    tmp_path: Path,
) -> None:
    start: StartServer = request.getfixturevalue(f"start_{kind}")
    launch: LaunchSettings = request.getfixturevalue(f"{kind}_launch")
    publisher, plan = Publisher(models), Bad()
    with start(models.teacher) as server:
        port = int(server.url.rpartition(":")[2])
        async with faults.FaultyProxy(("127.0.0.1", port), plan, byte_s=1.0) as proxy:
            before = children()
            student = pool_of(
                "student", models.student, {"kind": kind, "launch": launch.model_dump()}, tmp_path, are_ours=True
            )
            teacher = pool_of("teacher", models.teacher, {"kind": kind, "url": proxy.url}, tmp_path)
            started: set[int] = set()
            shares: list[float] = []

            async def drill() -> None:
                plan.is_on = True
                await until(lambda: len(publisher.batches) == PEACEFUL)
                shares.append(share_of_continuations_cached(student, publisher))
                first = children() - before
                started.update(first)
                if kind == "vllm":
                    await freeze_and_thaw(engine_among(first), student)
                await until(lambda: student.replicas[0].in_flight > 0)
                os.kill(server_among(first), signal.SIGKILL)
                await until(lambda: student.replicas[0].state is State.SERVING and student.replicas[0].restarts == 1)
                await asyncio.to_thread(expect_gone, first)  # vLLM's engine would outlive its server for long
                started.update(children() - before)

            async with student, teacher, orchestrated(publisher, student, teacher, ITERATIONS) as orchestrator:
                await watched(both(orchestrator.run(), drill()), [student.watch, teacher.watch])
            assert [each.restarts for each in student.replicas] == [1]
            await asyncio.to_thread(expect_gone, started)
    assert len(publisher.batches) == ITERATIONS
    publisher.expect_every_number_to_be_right(dense_logprobs)
    assert set(proxy.met) == {faults.Fault(each) for each in FAULTS}
    assert publisher.dead
    for error in publisher.dead:  # damage is asked for again; what comes damaged twice, or not at all, is given up
        assert isinstance(error, PoisonedReplyError | DeadlineExceededError), error
        assert error.stage == "score"
    assert shares[0] > 0.5, shares


def share_of_continuations_cached(student: ReplicaPool[Any], publisher: Publisher) -> float:
    """Of the tokens that probes and candidates sent before the ones that they asked for, those the server held: all
    but the rollouts', whose prompts are new to it."""
    traffic = student.traffic
    rollouts = PROMPT_TOKENS * (len(publisher.trained) + len(publisher.dead))
    share = traffic.cached_tokens / (traffic.prompt_tokens - rollouts)
    of_all = traffic.cached_tokens / traffic.prompt_tokens
    logging.getLogger(__name__).info("cached: %.3f of probes and candidates, %.3f of all prompt tokens", share, of_all)
    return share


@contextmanager
def local_server(model: Path, folder: Path) -> Iterator[tuple[str, int]]:
    port = free_port()
    argv = [sys.executable, "-m", "spot_async", "serve", str(model), "--port", str(port)]
    with run_server(argv, environment={}, port=port, model=model, log_path=folder / f"{port}.log"):
        yield "127.0.0.1", port


async def test_a_server_that_missed_weights_gets_nothing_until_it_has_them_and_the_run_goes_on(
    models: TinyModels, dense_logprobs: Dense, faults: ModuleType, tmp_path: Path
) -> None:
    publisher, takes_weights = Publisher(models), True

    def plan(number: int, path: str) -> str | None:
        return None if takes_weights or path != "/update_weights" else "error"

    with (
        local_server(models.student, tmp_path) as first,
        local_server(models.student, tmp_path) as second,
        local_server(models.teacher, tmp_path) as scorer,
    ):
        async with faults.FaultyProxy(first, plan) as proxy:
            urls = [proxy.url, url_of(second)]
            student = pool_of("student", models.student, {"kind": "local", "url": urls}, tmp_path)
            teacher = pool_of("teacher", models.teacher, {"kind": "local", "url": url_of(scorer)}, tmp_path)

            async def drill() -> None:
                nonlocal takes_weights
                await until(lambda: len(publisher.batches) >= PEACEFUL)
                takes_weights = False
                await until(lambda: student.replicas[0].state is State.RECOVERING)
                trained, requests = len(publisher.batches), student.replicas[0].requests
                await until(lambda: len(publisher.batches) >= trained + 2)
                assert student.replicas[0].state is State.RECOVERING
                assert student.replicas[0].requests == requests > 0
                takes_weights = True
                await until(lambda: student.replicas[0].state is State.SERVING)
                await until(lambda: student.replicas[0].requests > requests)
                publisher.is_over = True

            async with student, teacher, orchestrated(publisher, student, teacher, 10_000) as orchestrator:
                await watched(both(orchestrator.run(), drill()), [student.watch, teacher.watch])
    assert not publisher.dead
    publisher.expect_every_number_to_be_right(dense_logprobs)


def url_of(place: tuple[str, int]) -> str:
    return f"http://{place[0]}:{place[1]}"


def test_a_run_whose_trainer_is_killed_ends_with_one_line_and_what_was_trained(tmp_path: Path) -> None:
    run = tmp_path / "run"
    small = ["training.iterations=500", "training.batch_size=8", "training.mini_batch_size=4"]
    small += ["evaluation=null", "training.restarts=0"]
    with subprocess.Popen(
        [sys.executable, "-m", "spot_async", "train", "configs/quickstart.yaml", f"run.directory={run}", *small],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            give_up = time.monotonic() + TIMEOUT_S
            while not (run / "student" / "config.json").exists():
                assert process.poll() is None
                assert time.monotonic() < give_up, f"nothing was trained after {TIMEOUT_S:g} s"
                time.sleep(0.1)
            tree = process_tree(process.pid).keys()
            [rank] = [pid for pid in tree if command_line(pid)[1:3] == ["-m", "spot_async.trainer"]]
            os.kill(rank, signal.SIGKILL)
            _, said = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    [line] = [each for each in said.splitlines() if each.startswith("error:")]
    assert process.returncode == 1, said
    assert f"rank 0 (pid {rank}) was killed by SIGKILL" in line
    assert "saved: step-" in said
    expect_gone(tree)
