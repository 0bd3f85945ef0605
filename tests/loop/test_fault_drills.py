"""Supervision over a faulty connection is what it would be over a good one, or it is missing.

There is one real server. Orchestrator, stages and feed check are a run's own; the trainer only keeps what it gets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from deadlines import soon
from limits import same_limits
from server_on_thread import serving

from spot_async.backends.local.backend import LocalBackend
from spot_async.base import wire
from spot_async.config import SamplingConfig
from spot_async.errors import (
    DeadlineExceededError,
    PoisonedReplyError,
    RequestError,
    ServerRestartedError,
    ThrottledError,
    TransientError,
)
from spot_async.loop.admission import PromptState
from spot_async.models.files import ModelFiles, read_model
from spot_async.policies.spot import SpotPolicy
from spot_async.serving import api
from spot_async.stages.services import TeacherService
from spot_async.testing.services import SimulatedTrainer
from spot_async.testing.simulation import SimulatedRun, make_policy, make_run, simulated_prompts
from spot_async.trainer.feed_check import WrongSupervisionError
from spot_async.types import (
    Generation,
    Problem,
    SamplingSettings,
    Verdict,
    WeightSnapshot,
    WeightVersion,
)

Attached = Callable[..., AbstractAsyncContextManager[tuple[Any, Any]]]
MODEL = Path(__file__).parents[2] / "examples" / "running_sum" / "student"
BATCH = 8
PROMPT = np.arange(5, 12, dtype=np.int32)
SAMPLING = SamplingSettings(max_tokens=12, stop_token_ids=(1,), seed=3)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    with serving(MODEL) as url:
        yield "127.0.0.1", int(url.rpartition(":")[2])


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return read_model("student", str(MODEL))


@pytest.fixture
def attached(server: tuple[str, int], faults: ModuleType, tmp_path: Path) -> Attached:
    """A backend behind a proxy, holding version 0.0: `attached(plan)`."""

    @asynccontextmanager
    async def attach(plan: Any = None, **more: Any) -> AsyncIterator[tuple[Any, Any]]:
        async with faults.FaultyProxy(server, **more) as proxy:
            settings = LocalBackend.Settings(url=proxy.url)
            async with LocalBackend(settings, role="student", model=str(MODEL), run_directory=tmp_path) as backend:
                snapshot = WeightSnapshot(directory=str(MODEL), version=WeightVersion(0, 0))
                await backend.update_weights(snapshot, deadline=soon())
                proxy.plan = plan or proxy.plan
                yield backend, proxy

    return attach


class LengthIsRight:
    async def verify(self, problem: Problem, response_text: str, *, deadline: float) -> Verdict:
        return Verdict.CORRECT if len(response_text) % 3 == 0 else Verdict.WRONG


async def run(backend: Any, files: ModelFiles, timeout_s: float = 60.0) -> SimulatedRun:
    """SPOT on a real server, as student and as teacher. Its weights never change, only their versions."""
    run = make_run(
        make_policy(SpotPolicy, files.policy_context, positions=1, score_top_k=8, probe_top_k=3),
        student=backend,
        teachers={"": TeacherService(server=backend)},
        verifier=LengthIsRight(),
        trainer=SimulatedTrainer(step_s=0.0, directory=str(MODEL)),
        prompts=simulated_prompts(problems=8),
        vocabulary=files.vocabulary,
        limits=same_limits(timeout_s=timeout_s),
        sampling=SamplingConfig(max_prompt_tokens=64, max_response_tokens=24),
        batch_size=BATCH,
        vocab_size=files.vocab_size,
        max_dead_share=1.0,
    )
    await run.orchestrator.run()
    return run


def by_ordinal(run: SimulatedRun) -> dict[int, bytes]:
    return {each.prompt_ordinal: wire.encode(each) for each in run.trained}


@pytest.mark.long
async def test_a_run_through_a_bad_connection_trains_on_what_a_good_one_would_have_given(
    attached: Attached, faults: ModuleType, files: ModelFiles
) -> None:
    async with attached() as (backend, _):
        good = await run(backend, files)
    assert not good.journal.dead
    kinds = [each for each in faults.Fault if each is not faults.Fault.STALE]
    async with attached(faults.seeded(0.25, kinds, seed=5), byte_s=2.0) as (backend, proxy):
        bad = await run(backend, files, timeout_s=8.0)
    assert {len(batch) for batch in bad.batches} == {BATCH}  # whatever died was replaced
    expected, found = by_ordinal(good), by_ordinal(bad)
    same = [ordinal for ordinal in found if ordinal in expected]
    by_version = [ordinal for ordinal in same if ordinal < BATCH]  # later ones may have moved to another iteration
    assert len(by_version) >= BATCH // 2
    assert all(found[ordinal] == expected[ordinal] for ordinal in by_version)
    assert len(proxy.met) >= 6, proxy.met
    dead = bad.journal.dead
    assert bad.orchestrator.book.count(PromptState.DEAD) == len(dead)
    for error in dead.values():
        assert isinstance(error, PoisonedReplyError | DeadlineExceededError), error
        assert error.stage in ("rollout", "score", "candidates", "probe")


def only(fault: str, path: str) -> Any:
    return lambda number, asked: fault if asked == path else None


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("cut", TransientError),
        ("corrupt", PoisonedReplyError),
        ("nan", PoisonedReplyError),
        ("duplicate", PoisonedReplyError),
        ("stale", ServerRestartedError),
        ("storm", ThrottledError),
        ("gateway", TransientError),
        ("error", TransientError),
        ("slow", DeadlineExceededError),
        ("reset", TransientError),
    ],
)
async def test_each_fault_of_a_reply_has_its_class_and_says_what_was_asked(
    attached: Attached, fault: str, kind: type[RequestError]
) -> None:
    async with attached(only(fault, "/generate"), storm_s=0.2) as (backend, proxy):
        with pytest.raises(kind) as caught:
            await backend.generate(PROMPT, SAMPLING, deadline=soon(1.0 if fault == "slow" else 60.0))
        assert type(caught.value) is kind
        exchange = caught.value.exchange
        assert exchange is not None
        assert exchange.path == "/generate"
        assert exchange.sent["sampling"]["max_tokens"] == SAMPLING.max_tokens
        if isinstance(caught.value, ThrottledError):
            assert caught.value.retry_after_s == 0.2
        proxy.plan, proxy.storm_s = (lambda number, path: None), 0.0
        await asyncio.sleep(0.3 if fault == "storm" else 0.0)
        assert isinstance(await backend.generate(PROMPT, SAMPLING, deadline=soon()), Generation)


@pytest.mark.parametrize("fault", ["cut", "corrupt", "reset", "gateway"])
async def test_a_damaged_stream_of_replies_gives_those_that_came_whole(attached: Attached, fault: str) -> None:
    async with attached() as (backend, proxy):

        async def ask() -> list[Any]:
            asked = [backend.generate(PROMPT + n, SAMPLING, session="same", deadline=soon()) for n in range(4)]
            return await asyncio.gather(*asked, return_exceptions=True)

        honest = await ask()
        proxy.plan = only(fault, api.MANY)
        outcomes = await ask()
    refused = [each for each in outcomes if isinstance(each, BaseException)]
    assert refused
    assert all(isinstance(each, PoisonedReplyError | TransientError) for each in refused)
    for each, right in zip(outcomes, honest, strict=True):
        if isinstance(each, Generation):
            assert wire.encode(each) == wire.encode(right)


async def test_supervision_that_no_check_caught_stops_the_run_at_the_trainers_door(
    attached: Attached, files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with attached() as (backend, _):
        honest = backend.generate

        async def generate(*arguments: Any, **more: Any) -> Generation:
            generation: Generation = await honest(*arguments, **more)
            logprobs = np.full_like(generation.logprobs, np.nan)
            return msgspec.structs.replace(generation, logprobs=logprobs)

        monkeypatch.setattr(backend, "generate", generate)
        with pytest.raises(ExceptionGroup) as caught:
            await run(backend, files)
    assert caught.group_contains(WrongSupervisionError, match="behavior_logprobs hold what is no finite number")
