"""An account books what was sent and what that cost, and a budget is never overdrawn."""

from __future__ import annotations

import asyncio
import random
from contextlib import closing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_async.errors import BudgetSpentError, DataError, PermanentError, ThrottledError, TransientError
from spot_async.loop.events import ResponseJudged
from spot_async.run_directory.layout import RunDirectory
from spot_async.run_directory.ledger import Ledger
from spot_async.spending.account import Account, Spending
from spot_async.spending.prices import Prices, Size, Usage, read_usage
from spot_async.telemetry.run_log import RESPONSES, SpendingLog
from spot_async.testing.virtual_time import run_on_virtual_time

PRICES = Prices(prompt=2.0, cached_prompt=0.5, completion=8.0, request=0.001, currency="EUR")


def reply(prompt, completion, cached=None):
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached, "audio_tokens": None}
    return msgspec.json.encode({"choices": [{"text": "x"}], "usage": usage})


async def ask(account, outcome, *, size=None, endpoint="there", takes_s=1.0):
    size = size or Size(prompt_tokens=100, max_completion_tokens=10)
    async with account.request(endpoint, size, account.rate_limit) as charge:
        charge.sent(b"12345")
        await asyncio.sleep(takes_s)
        if isinstance(outcome, BaseException):
            raise outcome
        charge.answered(outcome)


@settings(max_examples=60)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 500), st.integers(1, 100), st.floats(0, 1), st.sampled_from("aaaarlu")),
        min_size=1,
        max_size=40,
    ),
    budget=st.floats(0.001, 0.08),
    together=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_a_budget_is_never_overdrawn_whatever_is_in_flight_and_however_it_ends(requests, budget, together, seed):
    """a: answered, r: refused, l: lost on the way and billed all the same, u: lost and not billed."""
    draw = random.Random(seed)
    account, bill, stopped = Account("teacher", prices=PRICES, budget=budget), [], []

    async def one(prompt, completion, share, how, places):
        async with places:
            used = Usage(prompt_tokens=prompt, completion_tokens=int(share * completion))
            outcome = {
                "a": reply(prompt, used.completion_tokens),
                "r": PermanentError("400"),
            }.get(how, TransientError("reset"))
            try:
                size = Size(prompt_tokens=prompt, max_completion_tokens=completion)
                await ask(account, outcome, size=size, takes_s=draw.random())
            except BudgetSpentError as error:
                stopped.append(error)
                return
            except (PermanentError, TransientError):
                pass
            if how in "al":
                bill.append(0.001 + (2 * prompt + 8 * used.completion_tokens) / 1e6)

    async def run():
        places = asyncio.Semaphore(together)
        await asyncio.gather(*(one(*each, places) for each in requests))

    run_on_virtual_time(run())
    total = account.total
    assert sum(bill) <= budget + 1e-12
    assert total.money <= sum(bill) + 1e-12  # what is counted as billed was
    assert sum(bill) <= total.money + total.unknown_money + 1e-12
    assert total.requests + len(stopped) == len(requests)
    if stopped:  # no later one goes through
        assert total.money + total.unknown_money + 0.001 + 508 / 1e6 + 1000 * 8 / 1e6 > budget


def test_a_request_waits_while_only_unfinished_ones_stand_in_its_way():
    account = Account("teacher", prices=Prices(completion=1e6), budget=15.0)  # one a token

    async def run():
        ten = Size(prompt_tokens=1, max_completion_tokens=10)
        await asyncio.gather(*(ask(account, reply(1, 2), size=ten) for _ in range(3)))
        return asyncio.get_running_loop().time()

    assert run_on_virtual_time(run()) == pytest.approx(3.0)  # one after the other: none may start beside another
    assert account.total.money == pytest.approx(6.0)


def test_a_token_budget_counts_prompts_and_responses():
    account = Account("teacher", token_budget=250)

    async def run():
        await ask(account, reply(100, 10))
        await ask(account, reply(100, 10))
        with pytest.raises(BudgetSpentError, match=r"teacher\.backend\.token_budget=250 is spent: 220 for 2 answers"):
            await ask(account, reply(100, 10))

    run_on_virtual_time(run())
    assert account.is_metered


def test_failures_are_counted_by_class_and_only_what_was_never_answered_may_have_been_billed():
    account = Account("teacher", prices=PRICES)

    async def run():
        errors = [PermanentError("400"), ThrottledError("429"), TransientError("reset"), TransientError("502")]
        for error in errors:
            with pytest.raises(type(error)):
                await ask(account, error, endpoint="a")
        given_up = asyncio.create_task(ask(account, reply(1, 1), endpoint="b"))
        await asyncio.sleep(0.5)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)

    run_on_virtual_time(run())
    a, b = account.spending["a"], account.spending["b"]
    assert a.failed == {"PermanentError": 1, "ThrottledError": 1, "TransientError": 2}
    assert (a.requests, a.answered, a.unknown, a.sent_bytes) == (4, 0, 2, 20)
    assert (b.requests, b.unknown, b.unknown_tokens) == (1, 1, 110)
    assert account.total.unknown_money == pytest.approx(3 * (0.001 + (100 * 2 + 10 * 8) / 1e6))
    assert account.total.money == 0


def test_cached_prompt_tokens_have_their_own_price():
    account = Account("teacher", prices=PRICES)
    run_on_virtual_time(ask(account, reply(100, 10, cached=80)))
    assert account.total.money == pytest.approx(0.001 + (20 * 2 + 80 * 0.5 + 10 * 8) / 1e6)
    assert account.total.cached_tokens == 80


def test_a_reply_that_states_nothing_is_counted_from_the_request_and_said_to_be():
    account = Account("teacher", prices=PRICES)
    run_on_virtual_time(ask(account, b'{"choices": []}'))
    total = account.total
    assert (total.prompt_tokens, total.completion_tokens, total.uncounted) == (100, 10, 1)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        # vLLM 0.32.0, /inference/v1/generate
        (b'{"choices":[],"usage":{"prompt_tokens":4,"total_tokens":7,"completion_tokens":3,"prompt_tokens_details":'
         b'{"cached_tokens":2}},"prompt_logprobs":null}', Usage(prompt_tokens=4, cached_tokens=2, completion_tokens=3)),
        # SGLang 0.5.23, /generate: amid log-probabilities
        (b'{"output_ids":[495],"meta_info":{"finish_reason":{"type":"length","length":8},"prompt_tokens":12,'
         b'"output_top_logprobs":[[-0.5,1,null]],"completion_tokens":8,"cached_tokens":0,"dp_rank":null}}',
         Usage(prompt_tokens=12, completion_tokens=8)),
        (b'{"usage": {"prompt_tokens": 9, "completion_tokens": null, "prompt_tokens_details": null}}',
         Usage(prompt_tokens=9)),
        # what a model wrote, and a log-probability's text
        (b'{"usage":{"prompt_tokens":5,"completion_tokens":1},"text":"\\"prompt_tokens\\": 7,",'
         b'"top_logprobs":[{"prompt_tokens":-0.25,"x":0.0}]}', Usage(prompt_tokens=5, completion_tokens=1)),
        (b'{"choices":[{"text":"usage"}]}', None),
    ],
)  # fmt: skip
def test_usage_is_read_from_every_dialect(said, expected):
    assert read_usage(said) == expected


@pytest.mark.parametrize(("trains", "rows"), [(False, 2), (True, 0)])
def test_responses_of_a_stand_alone_evaluation_are_written_now_and_then_those_of_training_never(tmp_path, trains, rows):
    """In training a row of iteration 0 stands for the start."""
    account = Account("student", prices=PRICES)
    account.spending["one"] = Spending(answered=3)
    log = SpendingLog(RunDirectory(tmp_path), {"student": account}, trains=trains)
    for finished in range(1, 2 * RESPONSES + 1):
        log.on(ResponseJudged(finished, 1000))
    path = tmp_path / "spending.jsonl"
    assert len(path.read_text().splitlines() if path.exists() else []) == rows


def test_spending_is_continued_from_whole_lines_and_a_damaged_or_foreign_file_is_refused(tmp_path):
    def opened(prices=PRICES):
        account = Account("student", prices=prices)
        return account, SpendingLog(RunDirectory(tmp_path), {"student": account})

    account, log = opened()
    account.spending["one"] = Spending(answered=3, money=0.5, failed={"TransientError": 2})
    log.write(0)
    with (tmp_path / "spending.jsonl").open("ab") as file:
        file.write(b'{"role":"stud')  # torn by a kill
    again, log = opened()
    log.go_on()
    assert again.spending == account.spending
    with pytest.raises(
        DataError, match=r"spending.jsonl:1: 0.5 EUR are spent, and student.backend.prices are in CHF now"
    ):
        opened(PRICES.model_copy(update={"currency": "CHF"}))[1].go_on()
    log.write()
    with (tmp_path / "spending.jsonl").open("ab") as file:
        file.write(b'{"role":"\xff","server":"one"}\n')
    with pytest.raises(DataError, match=r"spending.jsonl:3: cannot continue with this file"):
        opened()[1].go_on()


def test_a_kill_forgets_only_what_was_asked_since_a_prompt_last_ended(tmp_path):
    """A request that was under way then may have been billed, so the budget has no room for it any more."""
    size = Size(prompt_tokens=100, max_completion_tokens=10)
    worst = PRICES.highest_cost(size.at_most)

    def opened():
        account = Account("teacher", prices=PRICES, budget=2.5 * worst)
        return account, SpendingLog(RunDirectory(tmp_path), {"teacher": account})

    async def ask_until_killed(account, ledger):
        await ask(account, reply(100, 10))
        async with account.request("there", size, account.rate_limit):
            ledger.finish(0, [], {})
            return ledger.spending()

    account, log = opened()
    log.write(0)
    with closing(Ledger.open(tmp_path, {"teacher": account})) as ledger:
        kept = run_on_virtual_time(ask_until_killed(account, ledger))
    resumed, log = opened()
    log.go_on(kept)
    assert (resumed.total.requests, resumed.total.answered, resumed.total.unknown) == (2, 1, 1)
    assert resumed.total.unknown_money == worst
    with pytest.raises(BudgetSpentError):
        run_on_virtual_time(ask(resumed, reply(100, 10)))
    log.write()
    once_more, log = opened()
    log.go_on(kept)  # which the file's rows are newer than
    assert once_more.spending == resumed.spending
