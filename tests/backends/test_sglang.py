"""The SGLang backend against a stand-in: its requests, its start-up and its pings.

The stand-in answers with recorded replies. `tests/servers/test_sglang.py` tests the real server.
"""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from deadlines import passed_once, soon
from raw_server import listening
from sglang_stand_in import (
    PROMPT,
    RESPONSE,
    V0,
    VOCAB,
    StandIn,
    connected,
    ok,
    recorded,
    recorded_bytes,
)

from spot_async.backends.local.backend import LocalBackend
from spot_async.backends.sglang.process import sglang_command
from spot_async.backends.sglang.requests import NEUTRAL, neutral
from spot_async.backends.sglang.sglang_discovery import check_exact, check_vocabulary
from spot_async.backends.sglang.weights import ModelInfo, ServerInfo
from spot_async.backends.shared import request_limits
from spot_async.backends.shared.launch import Doorway
from spot_async.backends.shared.launch_settings import LaunchSettings
from spot_async.backends.vllm import VllmBackend
from spot_async.errors import (
    ConfigError,
    DeadlineExceededError,
    PermanentError,
    ServerRestartedError,
    TransientError,
)
from spot_async.types import SamplingSettings, ScoreRequest


@pytest.fixture(scope="module")
def model(random_model: Callable[..., Path]) -> Path:
    return random_model(vocab_size=VOCAB)


async def test_a_request_says_what_is_asked_for_under_an_id_of_fixed_length(model: Path, tmp_path: Path) -> None:
    reply = [(200, recorded_bytes("generate stopped"))]
    end = recorded("generate stopped")["output_ids"][-1]
    async with connected(model, tmp_path, generate=reply) as (backend, stand_in):
        for seed in (1, 2):
            further = {"min_p": 0.1, "repetition_penalty": 1.1}
            sampling = SamplingSettings(
                temperature=0.7,
                top_p=0.9,
                max_tokens=30,
                stop_token_ids=(end, 1),
                seed=seed,
                further=tuple(further.items()),
            )
            generation = await backend.generate(PROMPT, sampling, deadline=soon())
    assert (generation.finish_reason, generation.token_ids[-1]) == ("stop", end)
    (_, first), (_, second) = stand_in.asked
    assert first["sampling_params"] == {
        **NEUTRAL,
        "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 30, "stop_token_ids": [end, 1],
        "ignore_eos": False,  # or the server would not look at stop_token_ids
        "sampling_seed": 1,
        "min_p": 0.1, "repetition_penalty": 1.1,
    }  # fmt: skip
    assert len(first["rid"]) == len(second["rid"]) == 32
    assert first["rid"] != second["rid"]  # aborts match by prefix


def test_what_a_server_prefers_is_overruled_whatever_it_is() -> None:
    """As SGLang does it: {**preferred, **the request's}, and null stands for the parameter's own default."""
    preferred = {"top_k": 1, "repetition_penalty": 1.3, "n": 4, "min_new_tokens": 9, "stop": ["x"], "regex": "a+"}
    unlike = neutral(ModelInfo(preferred_sampling_params=preferred), ServerInfo(enable_watermark=True))
    assert {**preferred, **unlike} == {**NEUTRAL, "stop": None, "regex": None, "watermark": {"enabled": False}}
    assert neutral(ModelInfo(), ServerInfo()) == NEUTRAL  # older servers refuse parameters that they do not know


def test_a_student_whose_server_takes_a_drafts_tokens_for_its_own_is_refused() -> None:
    info = ServerInfo(speculative_algorithm="EAGLE", speculative_accept_threshold_single=0.5)
    student: Any = SimpleNamespace(role="student", section="student.backend")
    with pytest.raises(ConfigError, match=r"student\.backend: .* --speculative-accept-threshold-single 0\.5, so it"):
        check_exact(student, info)
    check_exact(student, ServerInfo(speculative_algorithm="EAGLE"))
    teacher: Any = SimpleNamespace(role="teacher", section="teacher.backend")
    check_exact(teacher, info)  # scores are not sampled


async def test_every_request_says_what_is_neutral_for_its_server(model: Path, tmp_path: Path) -> None:
    replies: dict[str, Any] = {
        "server_info": ok(version="0.5.23"),
        "generate": [(200, b"{}"), UNKNOWN_TOKEN, (400, b"{}")],
        "model_info": ok(weight_version="default", preferred_sampling_params={"top_k": 1, "stop": "x"}),
        "tokenize": [(404, b"{}")],
    }
    one = np.zeros(1, np.int32)
    async with connected(model, tmp_path, **replies) as (backend, stand_in):
        with pytest.raises(ConfigError):  # its first response is refused, which ends start-up
            await backend.__aenter__()
    started = [body["sampling_params"] for path, body in stand_in.asked if path == "/generate"]
    async with connected(model, tmp_path, generate=[(400, b"{}")]) as (backend, stand_in):
        sampling = SamplingSettings(max_tokens=4, stop_token_ids=(1,), seed=0)
        for ask in (
            backend.generate(PROMPT, sampling, deadline=soon()),
            backend.score(ScoreRequest(PROMPT, RESPONSE, 1.0, soon()), top_k=4),
            backend.score_at(ScoreRequest(PROMPT, RESPONSE, 1.0, soon()), one, top_k=4),
        ):
            with pytest.raises(PermanentError):
                await ask
    later = [body["sampling_params"] for _, body in stand_in.asked]
    least = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert [each.items() >= least.items() for each in [*started, *later]] == [True] * 6
    assert [each["stop"] for each in started] == [None] * 3


async def test_an_end_token_that_only_the_server_knows_is_named(model: Path, tmp_path: Path) -> None:
    end = recorded("generate stopped")["output_ids"][-1]
    reply = [(200, recorded_bytes("generate stopped"))]
    async with connected(model, tmp_path, generate=reply) as (backend, _):
        sampling = SamplingSettings(max_tokens=30, stop_token_ids=(1,), seed=0)
        with pytest.raises(PermanentError, match=rf"ends responses at token {end}, which is none of .*eos_token_id"):
            await backend.generate(PROMPT, sampling, deadline=soon())


async def test_a_request_that_nobody_waits_for_is_aborted_by_its_own_id(model: Path, tmp_path: Path) -> None:
    replies: dict[str, Any] = {"generate": [(0, b"")], "abort_request": [(200, b"")]}
    async with connected(model, tmp_path, **replies) as (backend, stand_in):
        sampling = SamplingSettings(max_tokens=30, stop_token_ids=(1,), seed=0)
        async with passed_once(stand_in.silent):  # when the server has it
            with pytest.raises(TransientError, match="student/generate: no reply before the deadline"):
                await backend.generate(PROMPT, sampling, deadline=soon())
        stand_in.silent.clear()
        request = asyncio.create_task(backend.generate(PROMPT, sampling, deadline=soon()))
        await stand_in.silent.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    assert stand_in.paths == ["/generate", "/abort_request"] * 2
    for (_, generate), (_, abort) in zip(stand_in.asked[::2], stand_in.asked[1::2], strict=True):
        assert abort == {"rid": generate["rid"]}


async def test_a_request_that_the_server_still_has_an_earlier_sending_of_is_worth_another_id(
    model: Path, tmp_path: Path
) -> None:
    refusal = {"error": {"message": "Duplicate request ID detected: 0123"}}
    async with connected(model, tmp_path, generate=[(400, json.dumps(refusal).encode())]) as (backend, _):
        with pytest.raises(TransientError, match="student/generate: HTTP 400: Duplicate request ID"):
            await backend.generate(PROMPT, SamplingSettings(max_tokens=4, stop_token_ids=(), seed=0), deadline=soon())


# Start-up.

UNKNOWN_TOKEN = (400, b'{"error": {"message": "token_ids_logprob contains out-of-vocabulary token id 512; valid"}}')


async def test_a_server_that_an_earlier_run_left_paused_is_not_waited_for(model: Path, tmp_path: Path) -> None:
    replies: dict[str, Any] = {"ready": [(503, b"")], "server_info": ok(version="0.5.23"), "generate": [(0, b"")]}
    async with connected(model, tmp_path, **replies) as (backend, stand_in):
        with pytest.raises(ConfigError, match=r"student\.backend: the server is paused.*POST /continue_generation"):
            async with backend:
                pass
    assert stand_in.paths == ["/server_info", "/ready"]


async def test_start_up_compares_vocabularies_and_notes_what_the_weights_are_called(
    model: Path, tmp_path: Path
) -> None:
    replies: dict[str, Any] = {
        "server_info": ok(version="0.5.23"),
        "generate": [(200, b"{}"), UNKNOWN_TOKEN],
        "model_info": ok(weight_version="default"),
        "tokenize": ok(tokens=[1]),  # which ends start-up
    }
    async with connected(model, tmp_path, **replies) as (backend, stand_in):
        with pytest.raises(ConfigError, match=r"read 'The sum of .* as different tokens"):
            async with backend:
                pass
    assert [body["token_ids_logprob"] for path, body in stand_in.asked if path == "/generate"] == [[511], [512]]
    assert backend._names.reader()("default") == V0


NOT_FOUND = [(404, b"{}")]
PAGE = [(200, b"<html>")]


def owned_by(owner: str) -> Any:
    return ok(data=[{"id": "m", "owned_by": owner}])


@pytest.mark.parametrize(
    ("server_info", "models", "said"),
    [
        (NOT_FOUND, None, r"student.backend: student does not answer as SGLang does .* kind: vllm"),
        (PAGE, None, r"student.backend: student does not answer as SGLang does .* kind: vllm"),
        (NOT_FOUND, owned_by("vllm"), r"\(GET /server_info\), but as vLLM: use kind: vllm$"),
        (NOT_FOUND, owned_by("spot-async"), "but as `spot-async serve`: use kind: local$"),
        (NOT_FOUND, owned_by("me"), "but as an OpenAI-compatible server: use kind: openai$"),
        (NOT_FOUND, NOT_FOUND, "for another server use kind: vllm or openai$"),
        (NOT_FOUND, PAGE, "for another server use kind: vllm or openai$"),
        # vLLM for developers has a server_info too.
        (
            ok(vllm_config="model='m'"),
            owned_by("vllm"),
            "does not answer as SGLang does .*, but as vLLM: use kind: vllm",
        ),
        ([(401, b"{}")], None, "HTTP 401"),  # a refused key says nothing of the kind
    ],
)
async def test_what_answers_in_the_place_of_sglang_is_named_with_its_kind(
    server_info: Any, models: Any, said: str, model: Path, tmp_path: Path
) -> None:
    replies = {"server_info": server_info} | ({"v1/models": models} if models else {})
    async with connected(model, tmp_path, **replies) as (backend, _):
        with pytest.raises(ConfigError, match=said):
            await backend.__aenter__()


@pytest.mark.parametrize(("kind", "asked"), [(VllmBackend, "/version"), (LocalBackend, "/health")])
async def test_other_kinds_name_an_sglang_that_answers_in_their_place(
    kind: Any, asked: str, model: Path, tmp_path: Path
) -> None:
    stand_in = StandIn({"/v1/models": owned_by("sglang")})
    async with listening(stand_in.serve) as url:
        backend = kind(kind.Settings(url=url), role="teacher", model=str(model), run_directory=tmp_path)
        with pytest.raises(ConfigError, match=rf"\(GET {asked}\), but as SGLang: use kind: sglang$"):
            await backend.__aenter__()


@pytest.mark.parametrize("answers", [*([(status, b"{}")] for status in (400, 401, 403, 404, 501)), [(200, b"")]])
async def test_a_server_of_another_kind_is_told_from_ours(answers: Any, model: Path, tmp_path: Path) -> None:
    stand_in = StandIn({"/health": answers})
    async with listening(stand_in.serve) as url:
        backend = LocalBackend(LocalBackend.Settings(url=url), role="teacher", model=str(model), run_directory=tmp_path)
        with pytest.raises(ConfigError, match=r"teacher.backend: teacher does not answer as `spot-async serve` does"):
            await backend.__aenter__()


@pytest.mark.parametrize(
    ("answers", "wrong"),
    [
        ([(200, b"{}"), UNKNOWN_TOKEN], None),
        ([(200, b"{}"), (200, b"{}")], "takes token 512"),
        ([UNKNOWN_TOKEN], "refuses token 511"),
    ],
)
async def test_a_vocabulary_of_another_size_than_the_servers_is_refused(
    answers: Any, wrong: str | None, model: Path, tmp_path: Path
) -> None:
    async with connected(model, tmp_path, generate=answers) as (backend, stand_in):
        with pytest.raises(ConfigError, match=f"vocab_size=512, but the server {wrong}") if wrong else nullcontext():
            await check_vocabulary(backend._server, ServerInfo(version="0.5.14"), {}, deadline=soon())
    asked = [body["token_ids_logprob"] for _, body in stand_in.asked]
    assert asked == [[511], [512]][: len(asked)]
    assert len({body["rid"] for _, body in stand_in.asked}) == len(asked)


async def test_a_server_that_a_token_out_of_its_vocabulary_ends_is_not_asked_one(model: Path, tmp_path: Path) -> None:
    async with connected(model, tmp_path) as (backend, stand_in):
        await check_vocabulary(backend._server, ServerInfo(version="0.5.13"), {}, deadline=soon())
    assert not stand_in.asked


async def test_what_a_server_serves_at_temperature_1_only_is_not_asked_at_another(model: Path, tmp_path: Path) -> None:
    one, first = np.zeros(1, np.int32), np.full((1, 1), 9, np.int32)
    async with connected(model, tmp_path, generation_temperature="one") as (backend, stand_in):
        with pytest.raises(PermanentError, match=r"temperature 1 only, not at 0\.5: set sampling\.temperature=1"):
            await backend.score(ScoreRequest(PROMPT, RESPONSE, 0.5, soon()), top_k=4)
        with pytest.raises(PermanentError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
            await backend.candidate_logprobs(
                ScoreRequest(PROMPT, RESPONSE, 0.5, soon()), one, first, expected_version=V0
            )
        assert not stand_in.asked


async def test_a_ping_asks_the_scheduler_and_which_weights_there_are(model: Path, tmp_path: Path) -> None:
    lives = {"server_info": ok(version="0.5.23"), "ready": [(200, b"")], "model_info": ok(weight_version="default")}
    async with connected(model, tmp_path, **lives) as (backend, stand_in):
        backend._names.start("default")
        await backend.ping(deadline=soon())
        assert stand_in.paths == ["/server_info", "/ready", "/model_info"]
        stand_in.replies["/ready"] = [(503, b"")]
        with pytest.raises(TransientError, match="the server is paused, but not by this run"):
            await backend.ping(deadline=soon())
        stand_in.replies["/ready"] = [(404, b"{}")]  # older servers do not know it
        await backend.ping(deadline=soon())
        stand_in.replies["/model_info"] = ok(weight_version="0.3")
        with pytest.raises(ServerRestartedError, match=r"holds weights 0\.3 and was last given 0\.0"):
            await backend.ping(deadline=soon())
        stand_in.replies["/server_info"] = [(0, b"")]  # frozen: the process in front still answers all the others
        with pytest.raises(DeadlineExceededError):
            await backend.ping(deadline=soon(0.2))


def test_a_server_of_ours_listens_on_loopback_with_its_key_in_a_file_and_names_its_first_weights(
    tmp_path: Path,
) -> None:
    launch = LaunchSettings(
        python="/env/bin/python", dtype="bfloat16", tensor_parallel_size=2, memory_fraction=0.7,
        arguments=["--enable-deterministic-inference"], environment={"X": "1"},
    )  # fmt: skip
    command = sglang_command(launch, Path("/m"), Doorway(3000, tmp_path, "secret"), sleeps=True)
    text = " ".join(command.argv)
    assert text.startswith("/env/bin/python -m sglang.launch_server --model-path /m --host 127.0.0.1 --port 3000 ")
    for part in ("--tp-size 2", "--mem-fraction-static 0.7", "--weight-version 0.0", "--enable-memory-saver"):
        assert part in text
    assert text.endswith(" --enable-deterministic-inference")  # what users add comes last
    assert command.environment["X"] == "1"
    assert f"--config {tmp_path / 'flags.yaml'}" in text
    assert "secret" not in text
    assert "secret" not in repr(command)
    assert command.files == {"flags.yaml": "api-key: secret\n"}


def test_a_file_of_flags_besides_ours_is_refused_before_the_server_refuses_it(tmp_path: Path) -> None:
    launch = LaunchSettings(python="/env/bin/python", arguments=["--config", "mine.yaml"])
    with pytest.raises(ConfigError, match=r"launch\.arguments: --config names the file with the server's key: give"):
        sglang_command(launch, Path("/m"), Doorway(3000, tmp_path, "secret"))


def test_prefixes_of_many_positions_take_the_memory_of_one_sequence():
    prompt, response = np.arange(3, dtype=np.int32), np.arange(10, 2010, dtype=np.int32)
    tracemalloc.start()
    try:
        prefixes = request_limits.prefixes(ScoreRequest(prompt, response, 1.0, 0.0), np.arange(len(response)))
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [len(prefixes[0]), len(prefixes[-1])] == [3, 2002]
    assert most_bytes < 100 * response.nbytes
