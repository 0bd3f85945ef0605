"""Weight updates of the SGLang backend against a stand-in: versions, failures, and servers that must not stay paused.

The stand-in answers with recorded replies. `tests/servers/test_sglang_updates.py` tests the real server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deadlines import passed_once, soon
from sglang_stand_in import (
    PROMPT,
    V0,
    V1,
    VOCAB,
    Sender,
    connected,
    ok,
    recorded,
    recorded_bytes,
)

from spot_async.backends.sglang.backend import SglangBackend
from spot_async.backends.sglang.weights import Control, DistributedTransport, ServerInfo, SglangWeights
from spot_async.backends.shared.weight_transport import WeightSettings
from spot_async.errors import (
    ConfigError,
    DeadlineExceededError,
    PermanentError,
    RequestError,
    ServerRestartedError,
    TransientError,
)
from spot_async.types import SamplingSettings, VersionSpan, WeightSnapshot

NOT_FLUSHED = (400, recorded_bytes("update not flushed"))
FLUSH_REFUSED = (400, b"Flush cache failed.\n")
CLOSES = (-1, b"")  # the connection, instead of an answer
UPDATED = (200, recorded_bytes("update"))
CONTROL: dict[str, Any] = {
    "pause_generation": ok(status="ok", message="Generation paused successfully."),
    "continue_generation": ok(status="ok"),
    "flush_cache": [(200, b"Cache flushed.\n")],
    "update_weights_from_disk": [UPDATED],
    "update_weight_version": [(200, recorded_bytes("named"))],
    "model_info": ok(weight_version="0.1"),
    "weights_checker": ok(ranks=[]),
}


@pytest.fixture(scope="module")
def model(random_model: Callable[..., Path]) -> Path:
    return random_model(vocab_size=VOCAB)


async def update(
    model: Path, tmp_path: Path, *, version: str = "0.5.23", **replies: Any
) -> tuple[list[tuple[str, Any]], RequestError | None]:
    """What an update asks of a server of that version, and what comes of it. Its deadline passes once the server is
    silent.
    """
    async with (
        connected(model, tmp_path, **{**CONTROL, **replies}) as (backend, stand_in),
        passed_once(stand_in.silent),
    ):
        weights = SglangWeights(backend._server, WeightSettings(), ServerInfo(version=version), log_directory=tmp_path)
        try:
            await weights.update(WeightSnapshot(directory=str(model), version=V1), deadline=soon())
        except RequestError as error:
            return stand_in.asked, error
        return stand_in.asked, None


@pytest.mark.parametrize("version", ["0.5.21", "0.5.23.post1", "0.6.0.dev2+gabc", "unknown"])
async def test_servers_that_flush_while_paused_keep_their_requests(version: str, model: Path, tmp_path: Path) -> None:
    asked, error = await update(model, tmp_path, version=version)
    assert error is None
    body = {"model_path": str(model), "weight_version": "0.1", "flush_cache": True, "abort_all_requests": False}
    assert asked == [
        ("/pause_generation", {"mode": "retract"}),
        ("/update_weights_from_disk", body),
        ("/model_info", None),
        ("/weights_checker", {"action": "checksum", "selector": "target"}),
        ("/continue_generation", {}),
    ]


@pytest.mark.parametrize(("version", "holds"), [("0.5.20", False), ("0.5.21", True)])
async def test_only_servers_that_keep_their_requests_are_updated_in_flight(
    version: str, holds: bool, model: Path, tmp_path: Path
) -> None:
    async with connected(model, tmp_path) as (backend, _):
        info = ServerInfo(version=version)
        weights = SglangWeights(backend._server, WeightSettings(), info, log_directory=tmp_path)
        assert weights.holds_requests == holds


@pytest.mark.parametrize("version", ["0.5.20", "0.5.9.post2", "0.4.10"])
async def test_older_servers_are_flushed_before_the_update_which_would_end_them(
    version: str, model: Path, tmp_path: Path
) -> None:
    flush = [FLUSH_REFUSED, (200, b"")]
    asked, error = await update(model, tmp_path, version=version, flush_cache=flush)
    assert error is None
    assert [path for path, _ in asked] == [
        "/pause_generation", "/flush_cache", "/flush_cache", "/update_weights_from_disk", "/model_info",
        "/weights_checker", "/continue_generation",
    ]  # fmt: skip
    assert asked[0][1] == {"mode": "abort"}
    assert asked[3][1]["flush_cache"] is False


async def test_weights_that_were_updated_without_a_flush_are_flushed_and_named(model: Path, tmp_path: Path) -> None:
    flush = [FLUSH_REFUSED, (200, b"")]
    asked, error = await update(model, tmp_path, update_weights_from_disk=[NOT_FLUSHED], flush_cache=flush)
    assert error is None
    assert [path for path, _ in asked][2:5] == ["/flush_cache", "/flush_cache", "/update_weight_version"]
    assert asked[4][1] == {"new_version": "0.1", "abort_all_requests": False}  # it would abort all by default


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        ({"update_weights_from_disk": [(400, recorded_bytes("no such directory"))]}, "Failed to get weights iterator"),
        (
            {"update_weights_from_disk": ok(success=False, message="no loader")},
            "student/update_weights_from_disk: no loader",
        ),
        ({"model_info": ok(weight_version="0.0")}, "serves weights 0.0 after an update to 0.1"),
        ({"update_weights_from_disk": [(0, b"")]}, "no reply before the deadline"),
    ],
)
async def test_a_refused_update_is_an_error_and_the_server_goes_on(
    replies: Any, message: str, model: Path, tmp_path: Path
) -> None:
    asked, error = await update(model, tmp_path, **replies)
    assert message in str(error)
    assert asked[-1] == ("/continue_generation", {})


@pytest.mark.parametrize("path", ["pause_generation", "continue_generation"])
async def test_a_server_whose_pause_or_resumption_got_no_answer_is_told_to_go_on(
    path: str, model: Path, tmp_path: Path
) -> None:
    replies: dict[str, Any] = {path: [(0, b""), (200, b'{"status": "ok"}')]}
    asked, error = await update(model, tmp_path, **replies)
    assert isinstance(error, DeadlineExceededError)
    assert path in str(error)
    assert [path for path, _ in asked].count("/continue_generation") == (2 if path == "continue_generation" else 1)
    assert asked[-1] == ("/continue_generation", {})


async def test_an_update_that_is_cancelled_while_it_pauses_leaves_no_pause(model: Path, tmp_path: Path) -> None:
    replies: dict[str, Any] = {**CONTROL, "pause_generation": [(0, b"")]}
    async with connected(model, tmp_path, **replies) as (backend, stand_in):
        weights = SglangWeights(backend._server, WeightSettings(), ServerInfo(version="0.5.23"), log_directory=tmp_path)
        updating = asyncio.create_task(
            weights.update(WeightSnapshot(directory=str(model), version=V1), deadline=soon())
        )
        await stand_in.silent.wait()
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
    assert stand_in.paths == ["/pause_generation", "/continue_generation"]


@pytest.mark.parametrize("status", [401, 404])
async def test_a_flush_that_can_never_succeed_is_not_asked_again(status: int, model: Path, tmp_path: Path) -> None:
    async with connected(model, tmp_path, flush_cache=[(status, b"no")]) as (backend, stand_in):
        with pytest.raises(PermanentError, match=f"HTTP {status}"):
            await Control(backend._server).flush(soon())
    assert stand_in.paths == ["/flush_cache"]


@pytest.mark.parametrize("path", ["/init_weights_update_group", "/update_weights_from_distributed"])
async def test_a_part_of_a_broadcast_is_not_sent_again_over_another_connection(
    path: str, model: Path, tmp_path: Path
) -> None:
    """A server that began with it waits for a broadcast that only the first sending has."""
    calls = ("begin_weight_update", "end_weight_update", "init_weights_update_group", "destroy_weights_update_group")
    replies = {**CONTROL, **{call: ok(success=True) for call in calls}, "update_weights_from_distributed": [UPDATED]}
    async with connected(model, tmp_path, **{**replies, path[1:]: [CLOSES, UPDATED]}) as (backend, stand_in):
        info = ServerInfo(version="0.5.23")
        weights = SglangWeights(backend._server, WeightSettings(), info, log_directory=tmp_path)
        sender: Any = Sender()
        weights._transport = DistributedTransport(Control(backend._server), WeightSettings(), sender, 1, True)
        with pytest.raises(TransientError, match=path):
            await weights.update(WeightSnapshot(directory=str(model), version=V1), deadline=soon())
    assert stand_in.paths.count(path) == 1
    assert stand_in.paths[-1] == "/continue_generation"


async def test_a_student_that_was_restarted_after_an_update_is_no_student_of_this_run(
    model: Path, tmp_path: Path
) -> None:
    reply = recorded("generate")
    reply["meta_info"]["weight_versions"] = [{"version": "default", "start": 0, "end": 6}]
    body = [(200, json.dumps(reply).encode())]
    sampling = SamplingSettings(max_tokens=6, stop_token_ids=(), seed=0)
    async with connected(model, tmp_path, **CONTROL, generate=body) as (backend, _):
        info = ServerInfo(version="0.5.23")
        backend._updater = SglangWeights(backend._server, WeightSettings(), info, log_directory=tmp_path)
        backend._names.start("default")
        before = await backend.generate(PROMPT, sampling, deadline=soon())
        assert before.version_spans == (VersionSpan(0, 6, V0),)
        await backend.update_weights(WeightSnapshot(directory=str(model), version=V1), deadline=soon())
        with pytest.raises(ServerRestartedError, match=r"calls its weights 'default'.*was it restarted"):
            await backend.generate(PROMPT, sampling, deadline=soon())


@pytest.mark.parametrize(
    ("answers", "goes_on"),
    [
        ([(400, b'{"success": false, "message": "Failed to receive weights: closed"}')], True),  # of all in one part
        (
            [(400, b'{"success": false, "message": "The full weights of the ModelRunner are partially updated."}')],
            False,
        ),
        ([UPDATED, (400, b'{"success": false, "message": "Failed to receive weights: closed"}')], False),  # of two
    ],
)
async def test_a_server_with_parts_of_two_models_stays_paused(
    answers: Any, goes_on: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(answers) > 1:
        monkeypatch.setattr("spot_async.backends.shared.weight_transport.buckets.__defaults__", (8000,))
    calls = ("begin_weight_update", "end_weight_update", "init_weights_update_group", "destroy_weights_update_group")
    replies = {**CONTROL, **{call: ok(success=True) for call in calls}, "update_weights_from_distributed": answers}
    async with connected(model, tmp_path, **replies) as (backend, stand_in):
        info = ServerInfo(version="0.5.23")
        weights = SglangWeights(backend._server, WeightSettings(), info, log_directory=tmp_path)
        sender: Any = Sender()
        weights._transport = DistributedTransport(Control(backend._server), WeightSettings(), sender, 1, True)
        with pytest.raises(
            PermanentError, match="Failed to receive" if goes_on else "parts of two models and stays paused"
        ):
            await weights.update(WeightSnapshot(directory=str(model), version=V1), deadline=soon())
        assert ("/continue_generation" in stand_in.paths) == goes_on
        assert stand_in.paths.index("/end_weight_update") < stand_in.paths.index("/destroy_weights_update_group")
        # The next whole update mends it.
        stand_in.replies["/update_weights_from_distributed"] = [UPDATED]
        await weights.update(WeightSnapshot(directory=str(model), version=V1), deadline=soon())
        assert stand_in.paths[-1] == "/continue_generation"
        sent = [body for path, body in stand_in.asked if path == "/update_weights_from_distributed"]
        assert (sent[-1]["flush_cache"], sent[-1]["weight_version"]) == (True, "0.1")


def test_data_parallel_replicas_are_not_updated_by_broadcast(model: Path, tmp_path: Path) -> None:
    server = SglangBackend(
        SglangBackend.Settings(url="http://x"), role="student", model=str(model), run_directory=tmp_path
    )._server
    with pytest.raises(ConfigError, match=r"student\.backend\.weights\.transport=distributed: .* 4 data-parallel"):
        SglangWeights(server, WeightSettings(transport="distributed"), ServerInfo(dp_size=4), log_directory=tmp_path)
