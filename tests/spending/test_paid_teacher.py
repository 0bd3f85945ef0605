"""Runs with a teacher that bills: the account agrees with the bill, the budget holds, and a replay asks nobody.

The endpoint is a process of its own that counts by itself (`paid_endpoint.py`). Adapter, accounts, stages, orchestrator
and cache are the real ones; student and trainer are simulated.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from only_teacher import only

from spot_async.backends.openai.backend import OpenAIBackend
from spot_async.base.tasks import root_cause
from spot_async.config import TeacherConfig
from spot_async.errors import ReplayMissError
from spot_async.loop.admission import PromptState
from spot_async.models.files import read_model
from spot_async.policies.opd import OpdPolicy
from spot_async.run_directory.layout import RunDirectory
from spot_async.spending.score_cache import ScoreCache
from spot_async.spending.teacher_cache import ReplayedTeacher, TeacherCache
from spot_async.telemetry.run_log import SpendingLog
from spot_async.testing.services import Latency, SimulatedStudent, SimulatedTrainer
from spot_async.testing.simulation import make_policy, make_run, simulated_prompts

MODEL = Path(__file__).parents[2] / "examples" / "running_sum" / "teacher"
PRICES = {"prompt": 3.0, "cached_prompt": 0.75, "completion": 12.0, "request": 0.0002}
ITERATIONS, BATCH = 4, 8
FAST = ("--requests-per-minute", "4800", "--tokens-per-minute", "400000")  # 80 requests a second


class Student(SimulatedStudent):
    """Of the example's vocabulary."""

    async def generate(self, *asked, **settings):
        response = await super().generate(*asked, **settings)
        return msgspec.structs.replace(response, token_ids=response.token_ids % 40)


def bill_of(url):
    with urllib.request.urlopen(f"{url}/bill") as reply:
        return json.load(reply)


def run(url, folder, *, replay=False, cache=None, seed=0, **settings):
    """A short run with this teacher: (orchestrator, account, batches that the trainer got, cache)."""
    settings = OpenAIBackend.Settings(url=url, prices=PRICES, **settings)
    account = settings.open_account("teacher")
    config = TeacherConfig.model_construct(
        model=str(MODEL), backend=settings, cache=str(cache) if cache else None, replay=replay
    )
    files = read_model("teacher", str(MODEL))
    kept = TeacherCache(ScoreCache(cache, is_replay=replay), config, files) if cache else None
    folder.mkdir()
    log = SpendingLog(RunDirectory(folder), {"teacher": account})

    async def ask():
        billed = settings.of_run(None, account)
        backend = OpenAIBackend(billed, role="teacher", model=str(MODEL), run_directory=folder)
        async with AsyncExitStack() as stack:
            teacher = await stack.enter_async_context(ReplayedTeacher(kept) if replay else backend)
            if kept is not None and not replay:
                await stack.enter_async_context(kept)
            stack.callback(log.write)
            found = await teacher.capabilities(deadline=asyncio.get_running_loop().time() + 20)
            scores = await kept.identify(found) if kept is not None else None
            run = run_with(teacher, found, scores, log)
            run.stages.settings = dataclasses.replace(run.stages.settings, seed=seed)  # which responses follow from
            await run.orchestrator.run()
        return run

    run = asyncio.run(ask())
    return SimpleNamespace(
        orchestrator=run.orchestrator, account=account, batches=run.batches, cache=kept, folder=folder
    )


def run_with(teacher, found, kept_scores, log):
    run = make_run(
        make_policy(OpdPolicy, read_model("teacher", str(MODEL)).policy_context),
        student=Student(Latency(0.001, 0.0), mean_tokens=12),
        teachers=only(teacher, kept_scores=kept_scores),
        trainer=SimulatedTrainer(step_s=0.01),
        prompts=simulated_prompts(problems=5),
        capabilities={"teacher": found},
        iterations=ITERATIONS,
        batch_size=BATCH,
        vocab_size=48,
    )
    run.stages.events.subscribe(log)
    return run


@pytest.fixture(scope="module")
def paid(paid_endpoint, tmp_path_factory):
    """A whole run under the endpoint's limits, and the endpoint's bill for it."""
    folder = tmp_path_factory.mktemp("paid")
    with paid_endpoint("--vocabulary", "48", *FAST) as url:
        done = run(
            url, folder / "run", cache=folder / "scores.sqlite", requests_per_minute=4800, tokens_per_minute=400000
        )
        yield SimpleNamespace(url=url, run=done, bill=bill_of(url), cache=folder / "scores.sqlite")


def test_the_account_agrees_with_the_bill(paid):
    total = paid.run.account.total
    assert len(paid.run.batches) == ITERATIONS
    assert total.money == pytest.approx(float(paid.bill["money"]), rel=0.01)
    assert (total.prompt_tokens, total.cached_tokens, total.completion_tokens, total.answered) == tuple(
        paid.bill[name] for name in ("prompt", "cached", "completion", "answered")
    )
    assert paid.bill["cached"] > 0
    assert total.unknown == total.uncounted == 0
    assert sum(total.failed.values()) == paid.bill["invalid"] + paid.bill["refused"]


def test_a_run_that_knows_the_limits_is_hardly_ever_refused(paid):
    assert paid.bill["answered"] > ITERATIONS * BATCH
    assert paid.bill["refused"] <= 0.02 * paid.bill["answered"]


def test_what_was_spent_is_in_a_file_after_every_iteration(paid):
    rows = [json.loads(line) for line in (paid.run.folder / "spending.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, None]
    money = [row["money"] for row in rows]
    assert money == sorted(money)
    assert money[-1] == pytest.approx(float(paid.bill["money"]))
    assert {(row["role"], row["server"], row["currency"]) for row in rows} == {("teacher", "teacher", "USD")}


def test_a_replay_asks_nobody_and_trains_on_the_same_numbers(paid, tmp_path):
    again = run("http://127.0.0.1:9", tmp_path / "run", replay=True, cache=paid.cache)  # nobody listens there
    assert bill_of(paid.url) == paid.bill
    assert again.cache.cache.counters.misses == 0
    for first, second in zip(paid.run.batches, again.batches, strict=True):
        for one, other in zip(first, second, strict=True):
            np.testing.assert_array_equal(one.pulls[0].logprobs, other.pulls[0].logprobs)
            np.testing.assert_array_equal(one.response_ids, other.response_ids)


def test_a_second_run_pays_only_for_its_start(paid, tmp_path):
    again = run(paid.url, tmp_path / "run", cache=paid.cache)
    scored = ITERATIONS * BATCH
    assert again.cache.cache.counters.hits == scored
    assert again.account.total.answered == paid.run.account.total.answered - scored


def test_a_replay_of_another_run_names_the_prompt(paid, tmp_path):
    with pytest.raises(ExceptionGroup) as raised:
        run(paid.url, tmp_path / "run", replay=True, cache=paid.cache, seed=1)
    cause = root_cause(raised.value)
    assert isinstance(cause, ReplayMissError)
    assert "(problem 'p" in str(cause)
    assert "teacher.replay=false" in str(cause)


def test_a_budget_ends_the_run_with_full_batches_and_is_not_overdrawn(paid, paid_endpoint, tmp_path):
    budget = 0.6 * float(paid.bill["money"])
    with paid_endpoint("--vocabulary", "48", *FAST) as url:
        done = run(url, tmp_path / "run", budget=budget)
        bill = bill_of(url)
    assert float(bill["money"]) <= budget
    assert float(bill["money"]) > 0.9 * budget  # and not much is left
    assert done.account.total.money == pytest.approx(float(bill["money"]))
    state, book = done.orchestrator.state, done.orchestrator.book
    assert "teacher.backend.budget=" in str(state.spent)
    assert 0 < state.iteration < ITERATIONS
    assert [len(batch) for batch in done.batches] == [BATCH] * state.iteration
    assert book.count(PromptState.UNPAID) > 0
    assert book.count(PromptState.DEAD) == book.count(PromptState.RUNNING) == 0
