"""How many servers are behind one url: stand-ins of vLLM behind a balancer that takes turns."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET
from vllm_stand_in import StandIn

from spot_async.backends.shared.discovery import behind
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.checks.server_diagnosis import ServerDiagnosis
from spot_async.models.vocabulary import load_tokenizer
from spot_async.tools.check.servers import ROWS
from spot_async.types import BehindUrl


class Process(StandIn):
    """A server that says when it started."""

    started: str | None = None
    throttled = 0  # of so many requests of every path

    def answer(self, path, body):
        self.asked = getattr(self, "asked", Counter())
        self.asked[path] += 1
        if self.asked[path] <= self.throttled:
            return 429, {"error": {"message": "no room"}}
        if path == "/metrics" and self.started is not None:
            self.metrics = [f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {self.started}\n"]
        return super().answer(path, body)


@contextlib.asynccontextmanager
async def balancer(servers: list[StandIn]) -> AsyncIterator[str]:
    """Give each connection to the next server."""
    turns = itertools.cycle(servers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next(turns).serve(reader, writer)
        writer.close()

    with contextlib.closing(await asyncio.start_server(serve, "127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


@pytest.fixture
def model(random_model):
    return random_model(max_position_embeddings=64)


async def found(model, tmp_path, started, *, versions=("0.32.0", "0.32.0"), throttled=0) -> BehindUrl:
    servers = []
    for start, version in zip(started, versions, strict=False):
        servers.append(Process(model, load_tokenizer(model), version=version))
        servers[-1].started, servers[-1].throttled = start, throttled
    async with balancer(servers) as url:
        backend = VllmBackend(VllmBackend.Settings(url=url), role="teacher", model=str(model), run_directory=tmp_path)
        async with backend:
            return await backend.behind_url(deadline=asyncio.get_running_loop().time() + 30)


async def test_two_servers_at_one_url_are_told_apart(model, tmp_path):
    said = await found(model, tmp_path, ["1.5", "2.5"], versions=("0.32.0", "0.31.0"))
    assert said.servers == 2
    assert said.differing == ("process", "version")


async def test_one_server_is_one_and_one_that_says_nothing_is_unknown(model, tmp_path):
    assert (await found(model, tmp_path, ["1.5"])).servers == 1
    assert (await found(model, tmp_path, [None])).servers is None


@pytest.mark.usefixtures("asked_again_soon")
async def test_a_server_that_throttles_each_question_once_is_asked_again(model, tmp_path):
    assert (await found(model, tmp_path, ["1.5"], throttled=1)).servers == 1


def judged(role: str, said: BehindUrl) -> ServerDiagnosis:
    judge: Any = SimpleNamespace(
        role=role, section=f"{role}.backend", facts=SimpleNamespace(behind=said), refusals=[], warnings=[]
    )
    ServerDiagnosis._judge_address(judge)
    return judge


def test_a_student_behind_a_balancer_is_refused_and_unlike_teachers_are_warned_of():
    alike = BehindUrl(servers=2, differing=("process",))
    unlike = BehindUrl(servers=2, differing=("process", "version", "weights"))
    one = BehindUrl(servers=1, differing=())
    (refusal,) = judged("student", alike).refusals
    assert refusal.startswith("student.backend: at least 2 servers answer at one url, and new weights would reach one")
    teacher = judged("teacher", unlike)
    assert teacher.refusals == []
    assert "differ in their version and weights" in teacher.warnings[0]
    for role, said in (("student", one), ("teacher", one), ("teacher", alike)):
        judge = judged(role, said)
        assert (judge.refusals, judge.warnings) == ([], [])


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        (UNSET, ""),
        (BehindUrl(servers=None, differing=()), "unknown"),
        (BehindUrl(servers=1, differing=()), "one"),
        (BehindUrl(servers=2, differing=()), "at least 2"),
    ],
)
def test_check_shows_how_many_servers_are_behind_a_url(behind, words):
    assert dict(ROWS)["servers behind the url"](SimpleNamespace(behind=behind)) == words


def test_different_versions_or_weights_are_two_servers_also_without_a_start():
    assert behind({"process": [], "weights": ["1.0", "1.0", "1.1"]}).servers == 2
    assert behind({"process": [], "weights": ["1.0", "1.0"]}).servers is None
    assert behind({"process": ["a", "b", "c"], "version": ["1"] * 3}).servers == 3
