"""The local backend end to end: real server processes, real sockets, real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from deadlines import soon
from engine_requests import dense_logprobs
from only_teacher import only
from transformers import AutoModelForCausalLM

from spot_async import stages_for
from spot_async.backends.local.backend import LocalBackend
from spot_async.backends.shared.http import HttpEndpoint
from spot_async.base import wire
from spot_async.config import SamplingConfig, ScoreStageConfig, StagesConfig
from spot_async.errors import (
    DeadlineExceededError,
    PermanentError,
    ProcessDiedError,
    TransientError,
)
from spot_async.models.alignment import decision_rows
from spot_async.policies.opd import OpdPolicy
from spot_async.serving import api
from spot_async.serving.server import _listen
from spot_async.serving.settings import ServeSettings
from spot_async.stages.services import Services, StagesSettings
from spot_async.testing.services import SimulatedVerifier
from spot_async.testing.simulation import make_policy, simulated_vocabulary
from spot_async.types import (
    Generation,
    IntArray,
    Problem,
    Prompt,
    SamplingSettings,
    ScoreRequest,
    WeightSnapshot,
    WeightVersion,
)

VOCAB = 53
PROMPT = np.array([5, 9, 2], np.int32)
RESPONSE = np.array([7, 7, 30, 1], np.int32)


MODEL = {"vocab_size": VOCAB, "tie_word_embeddings": False, "initializer_range": 0.02, "max_position_embeddings": 20000}


@pytest.fixture(scope="module")
def model_directory(random_model: Callable[..., Path]) -> Path:
    return random_model(seed=0, **MODEL)


@pytest.fixture(scope="module")
def new_weights(random_model: Callable[..., Path]) -> Path:
    return random_model(seed=1, **MODEL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalBackend]:
    settings = LocalBackend.Settings(slots=4)
    run_directory = tmp_path_factory.mktemp("run")
    async with LocalBackend(settings, role="student", model=str(model_directory), run_directory=run_directory) as it:
        yield it


def sampling(**changes: object) -> SamplingSettings:
    return SamplingSettings(**{"max_tokens": 8, "stop_token_ids": (), "seed": 1, **changes})  # type: ignore[arg-type]


with_backend = pytest.mark.asyncio(loop_scope="module")


@with_backend
async def test_the_server_says_what_it_offers(backend: LocalBackend) -> None:
    found = await backend.capabilities(deadline=soon())
    assert (found.vocab_size, found.max_context_tokens, found.max_top_k) == (VOCAB, 20000, VOCAB)
    assert found.exact_entropy
    assert found.candidate_logprobs
    assert found.weight_update
    assert found.in_flight_updates
    assert found.slots == 4
    assert len(found.vocab_fingerprint) == 64


@with_backend
@pytest.mark.parametrize("end_token", ["replace", "sum"])
async def test_a_students_end_token_is_scored_by_the_teachers_first_or_by_all_of_them(
    backend: LocalBackend, model_directory: Path, end_token: str
) -> None:
    """Against whole distributions in float64; at a temperature, which all of them must be at."""
    response, teacher_ends, temperature = np.array([7, 9, 12, 1], np.int32), (30, 44, 1), 0.5
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.from_numpy(np.concatenate([PROMPT, response]).astype(np.int64))[None]).logits[0]
    dense = torch.log_softmax(logits / temperature, -1)[decision_rows(len(PROMPT), len(response))]
    expected = dense[torch.arange(4), torch.from_numpy(response).long()]
    summed = torch.tensor(teacher_ends if end_token == "sum" else teacher_ends[:1])
    expected[-1] = torch.logsumexp(dense[-1, summed], 0)

    stages = stages_for(
        make_policy(OpdPolicy),
        Services(
            student=backend,
            teachers=only(backend, vocabulary=simulated_vocabulary(teacher_ends)),
            verifier=SimulatedVerifier(),
            vocabulary=simulated_vocabulary((1,)),
        ),
        StagesSettings(
            limits=StagesConfig(score=ScoreStageConfig(end_token=end_token)),
            sampling=SamplingConfig(temperature=temperature),
        ),
    )
    prompt = Prompt(ordinal=0, problem=Problem(id="p", text="?", answer="1"), token_ids=PROMPT)
    scores = await stages.for_prompt(prompt).score(response, top_k=3)
    np.testing.assert_allclose(scores.logprobs, expected.numpy(), atol=1e-5)
    np.testing.assert_allclose(scores.topk_logprobs, dense.topk(3).values.numpy(), atol=1e-5)  # single tokens, always


@with_backend
async def test_updates_in_flight_leave_every_token_with_the_weights_that_it_names(
    backend: LocalBackend, model_directory: Path, new_weights: Path
) -> None:
    """Five responses of one session share the reading of their prompt, and one of them waits for a slot."""
    held = {WeightVersion(2, step): (new_weights, model_directory)[step % 2] for step in range(5)}
    first, *later = [WeightSnapshot(directory=str(path), version=version) for version, path in held.items()]
    await backend.update_weights(first, deadline=soon())
    async with asyncio.TaskGroup() as group:
        long = [
            group.create_task(
                backend.generate(PROMPT, sampling(max_tokens=400, seed=seed), session="s", deadline=soon())
            )
            for seed in range(5)
        ]
        for snapshot in later:
            await backend.score(ScoreRequest(PROMPT, RESPONSE, 1.0, soon()), top_k=0)  # steps pass
            await backend.update_weights(snapshot, deadline=soon())
    met = set()
    for task in long:
        reply = task.result()
        assert len(reply.token_ids) == reply.version_spans[-1].end == 400
        met |= {span.version for span in reply.version_spans}
        exact = {
            path: dense_logprobs(path, PROMPT, reply.token_ids)[np.arange(400), reply.token_ids]
            for path in {held[span.version] for span in reply.version_spans}
        }
        for span in reply.version_spans:
            tokens = slice(span.start, span.end)
            np.testing.assert_allclose(reply.logprobs[tokens], exact[held[span.version]][tokens], atol=1e-4)
    assert len(met) > 1


@with_backend
async def test_bad_requests_are_refused_in_one_line_and_never_retried(backend: LocalBackend) -> None:
    with pytest.raises(PermanentError, match=r"^student: prompt_ids holds 53: the vocabulary has 53 tokens$"):
        await backend.generate(np.array([VOCAB], np.int32), sampling(), deadline=soon())
    with pytest.raises(PermanentError, match="exceed the context of 20000 tokens"):
        await backend.score(ScoreRequest(PROMPT, np.zeros(20000, np.int32), 1.0, soon()), top_k=0)
    with pytest.raises(PermanentError, match="temperature=nan"):
        await backend.generate(PROMPT, sampling(temperature=float("nan")), deadline=soon())


async def keep_busy(backend: LocalBackend) -> asyncio.Task[Generation]:
    """A request that runs for long, in its slot."""
    running = asyncio.create_task(backend.generate(PROMPT, sampling(max_tokens=19000), deadline=soon()))
    while (await backend.stats(deadline=soon())).active == 0:
        pass
    return running


async def wait_until_idle(backend: LocalBackend) -> api.Stats:
    """The server notices a hang-up by itself; a request of our own behind it shows when it has."""
    for seed in range(50):
        await backend.generate(PROMPT, sampling(max_tokens=1, seed=seed), deadline=soon())
        stats = await backend.stats(deadline=soon())
        if stats.active == 0 and stats.waiting == 0:
            return stats
    raise AssertionError(f"still busy: {stats}")


@with_backend
async def test_requests_nobody_waits_for_give_their_slots_back(backend: LocalBackend) -> None:
    endless = sampling(max_tokens=19000)
    with pytest.raises(DeadlineExceededError):
        await asyncio.gather(*(backend.generate(PROMPT, endless, deadline=soon(0.3)) for _ in range(9)))
    await wait_until_idle(backend)
    hung_up = await keep_busy(backend)
    hung_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hung_up
    stats = await wait_until_idle(backend)
    assert 0 < stats.tokens_generated < 19000


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of all HTTP requests."""
    paths: list[str] = []
    request = HttpEndpoint._request

    async def counted(self: HttpEndpoint, question: Any, *args: Any, **more: Any) -> None:
        paths.append(question.path)
        await request(self, question, *args, **more)

    monkeypatch.setattr(HttpEndpoint, "_request", counted)
    return paths


@with_backend
async def test_requests_of_one_session_share_one_http_request_and_nothing_else(
    backend: LocalBackend, sent: list[str]
) -> None:
    settings = [sampling(max_tokens=tokens, seed=tokens) for tokens in (3, 40, 8)]
    alone = [await backend.generate(PROMPT, each, deadline=soon()) for each in settings]
    sent.clear()
    together = await asyncio.gather(
        *(backend.generate(PROMPT, each, session="s", deadline=soon()) for each in settings),
        backend.generate(PROMPT, sampling(max_tokens=20000), session="s", deadline=soon()),
        backend.generate(PROMPT, sampling(max_tokens=19000), session="s", deadline=soon(0.4)),
        backend.generate(PROMPT, settings[0], session="t", deadline=soon()),
        backend.generate(PROMPT, settings[0], top_k=2, session="s", deadline=soon()),
        backend.generate(PROMPT, sampling(max_tokens=19000), top_k=9, session="s", deadline=soon(0.4)),
        return_exceptions=True,
    )
    assert sorted(sent) == [api.GENERATE, api.GENERATE, api.MANY]
    *replies, too_long, too_late, other, with_top_k, long_and_wide = together
    assert isinstance(too_long, PermanentError)
    assert isinstance(too_late, DeadlineExceededError)
    assert isinstance(long_and_wide, DeadlineExceededError)
    for expected, reply in zip([*alone, alone[0], alone[0]], [*replies, other, with_top_k], strict=True):
        assert isinstance(reply, Generation)
        np.testing.assert_array_equal(reply.token_ids, expected.token_ids)
        np.testing.assert_array_equal(reply.logprobs, expected.logprobs)


@with_backend
async def test_scores_of_one_turn_share_one_http_request_and_so_do_chosen_tokens(
    backend: LocalBackend, sent: list[str]
) -> None:
    def ask(response: IntArray) -> Awaitable[list[Any]]:
        request = ScoreRequest(PROMPT, response, 1.0, soon())
        positions, ids = np.array([0, 1], np.int32), np.array([[5, 6], [7, 8]], np.int32)
        return asyncio.gather(
            backend.score(request, top_k=0),
            backend.score(request, top_k=3),
            backend.candidate_logprobs(request, positions, ids, expected_version=None),
        )

    responses = [RESPONSE, RESPONSE[:2], RESPONSE[::-1]]
    alone = [await ask(each) for each in responses]
    sent.clear()
    positions, ids = np.zeros(1, np.int32), np.ones((1, 2), np.uint16)  # cannot be read, so all of them are refused
    *together, unreadable, refused = await asyncio.gather(
        *map(ask, responses),
        backend.candidate_logprobs(ScoreRequest(PROMPT, RESPONSE, 1.0, soon()), positions, ids, expected_version=None),
        backend.score(ScoreRequest(PROMPT, RESPONSE + VOCAB, 1.0, soon()), top_k=0),
        return_exceptions=True,
    )
    assert sorted(sent) == [api.CANDIDATE_LOGPROBS] * 4 + [api.MANY] * 2
    assert isinstance(unreadable, PermanentError)
    assert isinstance(refused, PermanentError)
    assert refused.exchange is not None
    assert refused.exchange.sent["response_ids"] == ["<i4", [4], "16 bytes"]
    for expected, found in zip(alone, together, strict=True):
        assert wire.encode(found) == wire.encode(expected)


@with_backend
async def test_replies_of_one_session_wait_for_no_other(backend: LocalBackend) -> None:
    endless = sampling(max_tokens=19000)
    slow = asyncio.create_task(backend.generate(PROMPT, endless, session="s", deadline=soon(50)))
    same = [backend.generate(PROMPT, sampling(max_tokens=20), session="s", deadline=soon()) for _ in range(12)]
    await asyncio.gather(*same)
    assert not slow.done()
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow


@with_backend
async def test_a_session_that_hangs_up_gives_all_its_slots_back(backend: LocalBackend) -> None:
    endless = sampling(max_tokens=19000)
    asked = [backend.generate(PROMPT, endless, session="s", deadline=soon(50)) for _ in range(3)]
    together = asyncio.gather(*asked)
    while (await backend.stats(deadline=soon())).active < 3:
        pass
    together.cancel()
    with pytest.raises(asyncio.CancelledError):
        await together
    await wait_until_idle(backend)


@with_backend
async def test_the_server_ends_a_request_whose_time_is_up_by_itself(backend: LocalBackend) -> None:
    request = api.GenerateRequest(prompt_ids=PROMPT, sampling=sampling(max_tokens=19000), timeout_s=0.2)
    with pytest.raises(DeadlineExceededError, match=r"/generate: not answered in 0\.2 s"):
        await backend._server.post(api.GENERATE, request, Generation, lambda reply: reply, soon())
    await wait_until_idle(backend)


@pytest.fixture
def short_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where backends make their socket directories; pytest's own is too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="t") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


def is_empty(directory: Path) -> bool:
    return not list(directory.iterdir())


@pytest.mark.long
async def test_a_killed_server_is_named_and_its_requests_fail(
    model_directory: Path, tmp_path: Path, short_temporary_directory: Path
) -> None:
    settings = LocalBackend.Settings()
    async with LocalBackend(settings, role="teacher", model=str(model_directory), run_directory=tmp_path) as backend:
        running = await keep_busy(backend)
        pid = backend._server._launched._child.pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ProcessDiedError, match=rf"teacher \(pid {pid}\) was killed by SIGKILL.*teacher\.log"):
            await backend.watch()
        with pytest.raises(TransientError):
            await running
        with pytest.raises(TransientError):
            await backend.generate(PROMPT, sampling(), deadline=soon())
    assert is_empty(short_temporary_directory)


@pytest.mark.long
async def test_leaving_stops_a_busy_server_and_leaves_nothing_behind(
    model_directory: Path, tmp_path: Path, short_temporary_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spot_async.base.processes.child.STOP_GRACE_S", 60.0)  # this machine may be busy
    settings = LocalBackend.Settings()
    async with LocalBackend(settings, role="student", model=str(model_directory), run_directory=tmp_path) as backend:
        running = await keep_busy(backend)
        watcher = asyncio.create_task(backend.watch())
    await watcher  # returns: it was stopped on purpose
    with pytest.raises(TransientError):
        await running
    assert backend._server._launched._child.process.returncode == 0  # so it ended by itself, within the grace
    with pytest.raises(ProcessLookupError):
        os.kill(backend._server._launched._child.pid, 0)
    assert is_empty(short_temporary_directory)


async def test_a_model_that_cannot_be_served_fails_the_start_with_its_reason(
    tmp_path: Path, short_temporary_directory: Path
) -> None:
    backend = LocalBackend(LocalBackend.Settings(), role="student", model="/no/model", run_directory=tmp_path)
    with pytest.raises(ProcessDiedError, match=r"exited with code 2: error: /no/model: no such model directory"):
        await backend.__aenter__()
    assert is_empty(short_temporary_directory)


async def test_a_start_that_takes_too_long_is_ended(
    model_directory: Path, tmp_path: Path, short_temporary_directory: Path
) -> None:
    settings = LocalBackend.Settings().of_run(start_timeout_s=0.05)
    backend = LocalBackend(settings, role="student", model=str(model_directory), run_directory=tmp_path)
    with pytest.raises(
        ProcessDiedError, match=r"was not ready after 0\.05 s .*: raise student\.serving\.recovery_timeout_s"
    ):
        await backend.__aenter__()
    assert is_empty(short_temporary_directory)
    with pytest.raises(ProcessLookupError):
        os.kill(backend._server._launched._child.pid, 0)


def run_server(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "SPOT_ASYNC_API_KEY"}
    command = [sys.executable, "-m", "spot_async.serving", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


@pytest.mark.long
def test_settings_that_cannot_be_served_are_one_line_and_exit_code_2(
    model_directory: Path, tmp_path: Path, short_temporary_directory: Path
) -> None:
    (tmp_path / "no-tokenizer").mkdir()
    (tmp_path / "no-tokenizer" / "config.json").write_text("{}")
    model = str(model_directory)
    uds = str(short_temporary_directory / "uds")
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket(socket.AF_UNIX) as taken_uds:
        port = str(taken.getsockname()[1])
        taken_uds.bind(uds)
        taken_uds.listen()
        for arguments, message in (
            (["/no/model", "--port", "0"], "/no/model: no such model directory"),
            ([str(tmp_path), "--port", "0"], "has no config.json"),
            ([str(tmp_path / "no-tokenizer"), "--port", "0"], "has no tokenizer"),
            ([model, "--port", port], f"cannot listen on 127.0.0.1 port {port}: in use by another process"),
            ([model, "--uds", uds], "uds: in use by another process"),
            ([model, "--port", "0", "--host", "0.0.0.0"], "set SPOT_ASYNC_API_KEY to a secret key first"),
            ([model, "--port", "0", "--uds", "x"], "give exactly one of uds and port"),
            ([model, "--port", "0", "--slots", "0"], "error: --slots 0: must be greater than 0"),
            ([model, "--port", "0", "--dtype", "foo"], "error: --dtype foo: must be 'float32' or 'bfloat16'"),
            ([model, "--port", "http"], "error: --port http: must be a valid integer"),
        ):
            done = run_server(*arguments)
            assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
            assert message in done.stderr


def test_the_socket_file_of_a_dead_server_is_replaced_and_private(
    short_temporary_directory: Path, model_directory: Path
) -> None:
    path = short_temporary_directory / "uds"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with _listen(ServeSettings(model=str(model_directory), uds=str(path))):
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


@pytest.mark.long
@with_backend
async def test_other_weights_than_those_of_the_run_are_not_loaded(
    backend: LocalBackend, new_weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await backend.score(ScoreRequest(PROMPT, RESPONSE, 1.0, soon()), top_k=0)
    wrong = {"model.norm.weight": "0" * 64}
    monkeypatch.setattr("spot_async.backends.local.backend.file_digests", lambda directory: wrong)
    with pytest.raises(PermanentError, match=r"tensor 'model\.norm\.weight' is not the one that the run published"):
        await backend.update_weights(
            WeightSnapshot(directory=str(new_weights), version=WeightVersion(9, 9)), deadline=soon()
        )
    after = await backend.score(ScoreRequest(PROMPT, RESPONSE, 1.0, soon()), top_k=0)
    assert after.version == before.version
