"""The verifier behind a url, against a real server that judges, lies, hangs and breaks off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from deadlines import soon

from spot_async.backends.http_verifier import HttpVerifier
from spot_async.base.events import Channel
from spot_async.base.retry import RetryPolicy
from spot_async.config.loading import validate_as
from spot_async.config.problems import DataConfig
from spot_async.errors import (
    BudgetSpentError,
    ConfigError,
    DeadlineExceededError,
    FailureClass,
    PermanentError,
    PoisonedReplyError,
    RequestError,
    TransientError,
)
from spot_async.replicas.leasing import LeaseRequest, pool_of
from spot_async.running.assembly import make_verifier
from spot_async.spending.run_spending import RunSpending, summarize_spending
from spot_async.stages.events import AttemptFailed
from spot_async.stages.plugin_contract import ask_judgement
from spot_async.stages.stage import Stage, StageLimits
from spot_async.types import ChatTurn, Judgement, Problem, Verdict
from spot_async.verification import BoxedMatch

pytestmark = pytest.mark.usefixtures("asked_again_soon")
KEY = "sk-a-key-that-nobody-may-read"
PROBLEM = Problem(id="p7", text="Write a haiku.", answer="", category="poems", tier="hard")
FINE = b'{"verdict": "correct"}'

Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


def reply(body: bytes, status: int = 200, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers, "", ""]).encode() + body


def always(sent: bytes) -> Answer:
    async def answer(question: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(sent)

    return answer


class Judge:
    """A server that answers the question of the start rightly, and every other as it is told."""

    def __init__(self, answer: Answer, *, first: bytes = reply(FINE)) -> None:
        self.questions: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self._answer, self._first = answer, first

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                length = re.search(r"(?i)content-length: (\d+)", head)
                question = json.loads(await reader.readexactly(int(length[1]) if length else 0))
                if question["id"] == "spot-async":
                    writer.write(self._first)
                else:
                    self.questions.append(question)
                    await self._answer(question, writer)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def judging(judge: Judge, **settings: Any) -> AsyncIterator[HttpVerifier]:
    server = await asyncio.start_server(judge.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/judge"
    with contextlib.closing(server):
        async with HttpVerifier(HttpVerifier.Settings(url=url, **settings)) as verifier:
            yield verifier


class Asked:
    """A stage of its own for one verifier, and what failed there."""

    def __init__(self, verifier: HttpVerifier, timeout_s: float = 30.0) -> None:
        self.failures: list[AttemptFailed] = []
        self.failed = asyncio.Event()
        events = Channel()
        events.subscribe(self, to=AttemptFailed)
        limits = StageLimits(concurrency=8, timeout_s=timeout_s, retry=RetryPolicy(2), waiting_capacity=64)
        self.stage = Stage("verify", pool_of(verifier), limits, jitter=lambda: 0.0, events=events)

    def on(self, event: AttemptFailed) -> None:
        self.failures.append(event)
        self.failed.set()

    async def judgement(self, response: str = "leaves fall") -> Judgement:
        return await ask_judgement(self.stage, (0,), PROBLEM, response)  # type: ignore[arg-type]


async def test_a_question_has_all_that_the_problem_says_and_the_reply_is_the_judgement() -> None:
    judge = Judge(always(reply(b'{"verdict": "wrong", "reward": 0.4, "feedback": "seven syllables\\n"}')))
    async with judging(judge) as verifier:
        told = await Asked(verifier).judgement()
        asked = Problem(id="q", text="2", answer="B", choices=("x", "y"), history=(ChatTurn(role="user", content="1"),))
        await verifier.verify(asked, "r", deadline=soon())
    assert told == Judgement(Verdict.WRONG, 0.4, "seven syllables\n")
    nothing = {"solution": None, "tier": None, "category": None}
    assert judge.questions == [
        {"id": "p7", "problem": "Write a haiku.", "answer": "", "response": "leaves fall", "solution": None,
         "choices": [], "tier": "hard", "category": "poems"},
        {"id": "q", "problem": "[user] 1\n2", "answer": "B", "response": "r", "choices": ["x", "y"], **nothing},
    ]  # fmt: skip
    assert all(head.startswith("POST /v1/judge HTTP/1.1\r\n") for head in judge.heads)


@pytest.mark.parametrize(
    ("body", "judged"),
    [
        (b'{"reward": 2}', Judgement(Verdict.UNJUDGED, 2.0)),
        (b'{"verdict": "no_answer", "feedback": null}', Judgement(Verdict.NO_ANSWER)),
        (b'{"verdict": "unjudged"}', Judgement(Verdict.UNJUDGED)),
    ],
)
async def test_a_number_alone_is_neither_right_nor_wrong(body: bytes, judged: Judgement) -> None:
    async with judging(Judge(always(reply(body)))) as verifier:
        assert await Asked(verifier).judgement() == judged


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (reply(b'{"verdict": "good"}'), "Invalid enum value 'good' - at `$.verdict`"),
        (reply(b'{"reward": "1"}'), "Expected `float | null`, got `str` - at `$.reward`"),
        (reply(b'{"reward": true}'), "Expected `float | null`, got `bool` - at `$.reward`"),
        (reply(b'{"reward": NaN}'), "JSON is malformed"),
        (reply(b'{"reward": 1e999}'), "Number out of range - at `$.reward`"),
        (reply(b'{"reward": 1e300}'), "reward 1e+300 is no number from -1e+30 to 1e+30"),
        (reply(b'{"verdict": "timeout", "reward": 0}'), "reward 0 beside the verdict timeout, which is none"),
        (reply(b'{"verdict": "wrong", "score": 0.9}'), "Object contains unknown field `score`"),
        (reply(b"{}"), "it has neither a verdict nor a reward"),
        (reply(b""), "Input data was truncated"),
        (reply(b'{"verdict": "correct", "feedback": "\xff"}'), "can't decode byte 0xff"),
        (reply(b'{"verdict": "correct", "feedback": "\\ud800"}'), "DecodeError"),
        (reply(FINE + b'{"verdict": "wrong"}'), "trailing characters"),
        (reply(b"<html><body>Log in</body></html>"), "JSON is malformed"),
        (reply(b'{"verdict": "correct", "feedback": "%s"}' % bytes(10 << 20)), "larger than the 65,536 bytes"),
        (reply(b"x" * 40, 200, "Content-Encoding: gzip"), "it is no gzip"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
async def test_what_is_no_judgement_is_missing_evidence_and_a_line_and_never_a_reward(sent: bytes, said: str) -> None:
    judge = Judge(always(sent))
    async with judging(judge) as verifier:
        asked = Asked(verifier)
        assert await asked.judgement() == Judgement(Verdict.ERROR, None)
        with pytest.raises(PoisonedReplyError) as caught:
            await verifier.verify(PROBLEM, "x", deadline=soon())
    assert str(caught.value).startswith("verifier/v1/judge: cannot read the reply: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [each.failure for each in asked.failures] == [FailureClass.POISONED] * 2
    assert len(judge.questions) == 3  # a poisoned reply is asked for once more


async def test_a_server_that_says_it_could_not_judge_is_asked_once_more() -> None:
    judge = Judge(always(reply(b'{"verdict": "error", "feedback": "the sandbox is full"}')))
    async with judging(judge) as verifier:
        assert await Asked(verifier).judgement() == Judgement(Verdict.ERROR, None, "the sandbox is full")
    assert len(judge.questions) == 2


async def test_a_server_that_hangs_gives_no_verdict_at_the_stages_deadline() -> None:
    async def hang(question: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with judging(Judge(hang)) as verifier:
        assert await Asked(verifier, timeout_s=0.1).judgement() == Judgement(Verdict.TIMEOUT)
        with pytest.raises(DeadlineExceededError, match=r"^verifier/v1/judge: no reply before the deadline$"):
            await verifier.verify(PROBLEM, "x", deadline=soon(0.05))


@pytest.mark.parametrize(
    ("status", "headers", "kind", "said"),
    [
        (500, (), TransientError, "HTTP 500: out of luck"),
        (422, (), PermanentError, "HTTP 422: out of luck"),
        (307, ("Location: http://127.0.0.1:1/x?y",), PermanentError, "it redirects to http://127.0.0.1:1: if that"),
        (401, (), PermanentError, "name the environment variable that holds it in verifier.api_key_env"),
    ],
)
async def test_a_refusal_is_a_failed_request_and_no_verdict(
    status: int, headers: tuple[str, ...], kind: type[RequestError], said: str
) -> None:
    judge = Judge(always(reply(b"out of luck", status, *headers)))
    async with judging(judge) as verifier:
        with pytest.raises(kind, match=re.escape(said)):
            await Asked(verifier).judgement()
    assert len(judge.questions) == (2 if kind is TransientError else 1)


async def test_a_reply_that_breaks_off_is_asked_for_again() -> None:
    async def break_off(question: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        sent = reply(FINE)
        if len(judge.questions) == 1:
            writer.write(sent[:-9])
            writer.close()
        else:
            writer.write(sent)

    judge = Judge(break_off)
    async with judging(judge) as verifier:
        asked = Asked(verifier)
        assert (await asked.judgement()).verdict is Verdict.CORRECT
    assert [each.failure for each in asked.failures] == [FailureClass.TRANSIENT]


async def test_a_server_that_asks_for_a_pause_gets_it_and_nothing_is_sent_meanwhile() -> None:
    async def throttle(question: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        times.append(asyncio.get_running_loop().time())
        first = len(times) == 1
        writer.write(reply(b"slow down", 429, "Retry-After: 0.3") if first else reply(FINE))

    times: list[float] = []
    async with judging(Judge(throttle)) as verifier:
        asked = Asked(verifier)
        one = asyncio.create_task(asked.judgement())
        await asked.failed.wait()
        both = [await one, await asked.judgement()]
    assert both == [Judgement(Verdict.CORRECT)] * 2
    assert [each.failure for each in asked.failures] == [FailureClass.THROTTLED]
    assert min(times[1:]) - times[0] >= 0.3


async def test_a_second_answer_to_one_question_is_not_taken_for_the_next_ones() -> None:
    async def twice(question: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        answer = reply(b'{"reward": %s}' % question["response"].encode())
        writer.write(answer)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(answer)

    async with judging(Judge(twice)) as verifier:
        for n in range(3):
            assert (await Asked(verifier).judgement(str(n))).reward == n
            await asyncio.sleep(0.1)  # until the second answer is there


async def test_a_key_comes_from_the_environment_and_is_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^verifier: the environment variable JUDGE_KEY is not set$"):
        HttpVerifier.Settings(url="http://127.0.0.1:1", api_key_env="JUDGE_KEY").check_machine("verifier")
    monkeypatch.setenv("JUDGE_KEY", KEY)

    async def repeat(question: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        assert f"Authorization: Bearer {KEY}" in judge.heads[-1]
        writer.write(reply(f"{KEY} is no good".encode(), 400))

    judge = Judge(repeat)
    async with judging(judge, api_key_env="JUDGE_KEY") as verifier:
        with pytest.raises(PermanentError, match="is no good") as caught:
            await verifier.verify(PROBLEM, "x", deadline=soon())
    assert KEY not in str(caught.value)
    assert KEY not in verifier.settings.model_dump_json()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "127.0.0.1:9000"}, "is no address of a server"),
        ({"url": "http://user:word@judge/"}, "holds a password"),
        ({"headers": {"Authorization": "x"}}, "Authorization is a secret"),
        ({"prices": {"prompt": 3.0}}, "give only prices.request"),
        ({"budget": 3.0}, "budget=3 needs prices"),
    ],
)
def test_settings_that_cannot_work_or_would_be_saved_with_a_secret_are_refused(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        HttpVerifier.Settings.model_validate({"url": "http://judge", **settings})


async def test_a_run_does_not_begin_with_a_server_that_gives_no_judgements() -> None:
    with pytest.raises(PoisonedReplyError, match="Object contains unknown field `score`"):
        async with judging(Judge(always(b""), first=reply(b'{"score": 1}'))):
            pytest.fail("it was entered")
    with pytest.raises(TransientError, match=r"verifier/judge: nothing answers at 127\.0\.0\.1:1: Connection"):
        async with HttpVerifier(HttpVerifier.Settings(url="http://127.0.0.1:1/judge")):
            pytest.fail("it was entered")


async def test_a_budget_ends_before_the_question_that_would_exceed_it() -> None:
    judge = Judge(always(reply(FINE)))
    async with judging(judge, prices={"request": 0.5}, budget=2.0) as verifier:
        for _ in range(3):  # the question of the start is paid for too
            await Asked(verifier).judgement()
        with pytest.raises(BudgetSpentError, match=r"^verifier\.budget=2 USD is spent: 2 for 4 answers"):
            await Asked(verifier).judgement()
    assert len(judge.questions) == 3


def test_what_it_costs_is_in_the_accounts_of_the_run() -> None:
    settings = HttpVerifier.Settings(url="http://judge", prices={"request": 0.5}, budget=1.0)
    spending = RunSpending({}, verifier=settings)
    data = validate_as(DataConfig, {"train": "problems.jsonl"})
    verifier = make_verifier(SimpleNamespace(verifier=settings, data=data), spending)
    assert verifier.settings.account is spending.accounts["verifier"]
    assert summarize_spending(spending.accounts)["verifier"]["budget"] == 1.0


async def test_requests_wait_for_their_turn_before_their_time_runs() -> None:
    judge = Judge(always(reply(FINE)))
    async with judging(judge, requests_per_minute=600) as verifier:
        asked = Asked(verifier, timeout_s=0.3)
        told = await asyncio.gather(*(asked.judgement() for _ in range(8)))
    assert told == [Judgement(Verdict.CORRECT)] * 8  # the last waited longer than it may take
    assert asked.failures == []


async def test_each_training_set_is_judged_by_its_own_verifier_which_has_its_own_limits() -> None:
    judge = Judge(always(reply(FINE)))
    server = await asyncio.start_server(judge.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/judge"
    code: Any = {"path": "code", "verifier": {"kind": "http", "url": url}}
    data = validate_as(DataConfig, {"train": [{"path": "math"}, code, {**code, "path": "more"}]})
    config: Any = SimpleNamespace(verifier=BoxedMatch.Settings(), data=data)
    with contextlib.closing(server):
        async with make_verifier(config, RunSpending({})) as verifier:
            stage = Asked(verifier).stage
            verdicts = []
            for index in range(3):
                problem = Problem(id=f"{index}/p", text="1 + 1", answer="2", set_key=f"data.train.{index}")
                verdicts.append((await ask_judgement(stage, (0,), problem, r"\boxed{3}")).verdict)
            assert verdicts == [Verdict.WRONG, Verdict.CORRECT, Verdict.CORRECT]
            assert [each["id"] for each in judge.questions] == ["1/p", "2/p"]
            # Requests wait for a set's own limit, outside of their time. Sets with equal settings share one.
            requests = [LeaseRequest("verify", (0,), kind=f"data.train.{index}") for index in range(3)]
            leases = [await pool_of(verifier).lease(each) for each in requests]  # type: ignore[type-var]
            services = [await lease.__aenter__() for lease in leases]
            assert [isinstance(each, HttpVerifier) for each in services] == [False, True, True]
            assert services[1] is services[2]
            assert type(leases[1]) is type(await services[1].lease(None))
