"""New weights for a real SGLang server, on a CPU; requests that are given up; a server that goes away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from parity import expect_of_samples, nats_off
from safetensors.torch import load_file, save_file
from server_process import WAIT_S, RunningServer
from sglang_on_cpu import (
    FIRST,
    SECOND,
    Connect,
    Rows,
    check_everything,
    connecting,
    endless,
    rows_of,
    sampling,
    soon,
    tokens,
    wait_until,
)

from spot_async.backends.shared.weight_transport import WeightSettings
from spot_async.errors import (
    DataError,
    PoisonedReplyError,
    RequestError,
    TransientError,
    VersionMismatchError,
)
from spot_async.types import Generation, ScoreRequest, WeightSnapshot, WeightVersion


@pytest.fixture(scope="module")
def rows(dense_logprobs: Any) -> Rows:
    return rows_of(dense_logprobs)


@pytest.fixture
def connect(tmp_path: Path) -> Connect:
    return connecting(tmp_path)


def snapshot_of(model: Path, version: WeightVersion) -> WeightSnapshot:
    return WeightSnapshot(directory=str(model), version=version)


def weight_settings(transport: str) -> WeightSettings:
    return WeightSettings(transport=transport, device="cpu")


@pytest.mark.parametrize("transport", ["disk", "distributed"])
async def test_new_weights_are_served_whole_and_named(
    transport: str,
    sglang_student: RunningServer,
    models: Any,
    connect: Connect,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("spot_async.backends.shared.weight_transport.buckets.__defaults__", (100_000,))  # several parts
    async with connect(sglang_student, weights=weight_settings(transport)) as backend:
        await backend.update_weights(snapshot_of(models.student, FIRST), deadline=soon())
        await check_everything(backend, models.student, rows, FIRST)
        await backend.update_weights(snapshot_of(models.other, SECOND), deadline=soon())
        await check_everything(backend, models.other, rows, SECOND)
        assert (await backend.capabilities(deadline=soon())).version == SECOND
        one = np.zeros(1, np.int32)
        with pytest.raises(VersionMismatchError, match=r"holds weights 0\.1, not the 0\.0 asked for"):
            await backend.candidate_logprobs(
                ScoreRequest(tokens(4, 0), tokens(2, 1), 1.0, soon()), one, one[None] + 9, expected_version=FIRST
            )
        await backend.update_weights(snapshot_of(models.student, FIRST), deadline=soon())
        await check_everything(backend, models.student, rows, FIRST)


@pytest.mark.parametrize("transport", ["disk", "distributed"])
async def test_an_update_in_the_middle_of_a_generation_splits_it_at_the_switch(
    transport: str, sglang_student: RunningServer, models: Any, connect: Connect, rows: Rows
) -> None:
    prompt = tokens(20, 8)
    async with connect(sglang_student, weights=weight_settings(transport)) as backend:
        await backend.update_weights(snapshot_of(models.student, FIRST), deadline=soon())

        async def meet_an_update() -> float:
            async with asyncio.TaskGroup() as group:
                under_way = group.create_task(backend.generate(prompt, endless(1500), top_k=4, deadline=soon()))
                await wait_until(sglang_student, 1, tokens=len(prompt) + 10)  # into the generation
                await backend.update_weights(snapshot_of(models.other, SECOND), deadline=soon())
            await backend.update_weights(snapshot_of(models.student, FIRST), deadline=soon())
            return nats_off_split(under_way.result(), prompt, models.student, models.other, rows)

        await expect_of_samples(meet_an_update)


def nats_off_split(generation: Generation, prompt: Any, before: Path, after: Path, rows: Rows) -> float:
    old, new = generation.version_spans
    assert (old.version, new.version) == (FIRST, SECOND)
    assert 0 < old.end == new.start < new.end == 1500
    sequence = np.concatenate([prompt, generation.token_ids])
    by_old, by_new = (rows(model, sequence, 1.0)[len(prompt) - 1 : -1] for model in (before, after))
    return nats_off(generation, np.concatenate([by_old[: old.end], by_new[old.end :]]))


async def test_the_sequence_of_older_versions_ends_with_the_new_weights_too(
    sglang_student: RunningServer, models: Any, connect: Connect, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests in flight are aborted there, which their stages take as a reason to ask again."""
    monkeypatch.setattr("spot_async.backends.sglang.weights.FLUSH_WHILE_PAUSED", (9,))
    async with connect(sglang_student) as backend:
        under_way = asyncio.create_task(backend.generate(tokens(5, 1), endless(1500), deadline=soon()))
        await wait_until(sglang_student, 1)
        await backend.update_weights(snapshot_of(models.other, SECOND), deadline=soon())
        with pytest.raises(TransientError, match="the server aborted the request"):
            await under_way
        await check_everything(backend, models.other, rows, SECOND)
        await backend.update_weights(snapshot_of(models.student, FIRST), deadline=soon())


async def test_an_update_whose_flush_was_refused_is_finished(
    sglang_student: RunningServer, models: Any, connect: Connect, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held with their cache (in_place), requests keep the server from flushing: updated, but without its name."""
    async with connect(sglang_student) as backend:
        control = backend._updater.control
        transport = backend._updater._transport
        under_way = asyncio.create_task(backend.generate(tokens(5, 1), endless(1500), deadline=soon()))
        await wait_until(sglang_student, 1)
        await control.post("/pause_generation", {"mode": "in_place"}, soon())
        flush, flush_was_refused = control.flush, asyncio.Event()

        async def flush_again(deadline: float) -> None:
            flush_was_refused.set()
            await flush(deadline)

        monkeypatch.setattr(control, "flush", flush_again)
        with backend._names.updating(SECOND):
            async with asyncio.TaskGroup() as group:
                update = transport.send(snapshot_of(models.other, SECOND), {}, deadline=soon())
                updating = group.create_task(update)
                async with asyncio.timeout(WAIT_S):
                    await flush_was_refused.wait()
                assert not updating.done()
                await control.post("/pause_generation", {"mode": "retract"}, soon())
            await control.confirm(SECOND, soon())
        await control.post("/continue_generation", {}, soon())
        under_way.cancel()
        await asyncio.wait([under_way])
        await check_everything(backend, models.other, rows, SECOND)
        await backend.update_weights(snapshot_of(models.student, FIRST), deadline=soon())


async def test_weights_that_are_not_the_models_are_refused_and_the_old_ones_serve(
    sglang_student: RunningServer, models: Any, connect: Connect, rows: Rows, tmp_path: Path
) -> None:
    whole = load_file(models.other / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    cut = (models.other / "model.safetensors").read_bytes()[:-100]

    def directory(title: str, tensors: dict[str, Any] | None, raw: bytes = b"") -> WeightSnapshot:
        path = tmp_path / title
        path.mkdir()
        if tensors is None:
            (path / "model.safetensors").write_bytes(raw)
        else:
            save_file(tensors, path / "model.safetensors")
        return snapshot_of(path, SECOND)

    bad = [
        directory("partial", {key: value for key, value in whole.items() if key != name}),
        directory("shape", {**whole, name: whole[name].T.contiguous()}),
        directory("named", {**whole, "model.layers.7.mlp.down_proj.weight": whole[name].clone()}),
        directory("cut", None, cut),
        snapshot_of(tmp_path / "nowhere", SECOND),
    ]
    for transport in ("disk", "distributed"):
        async with connect(sglang_student, weights=weight_settings(transport)) as backend:
            await backend.update_weights(snapshot_of(models.student, FIRST), deadline=soon())
            for snapshot in bad:
                with pytest.raises(DataError, match=Path(snapshot.directory).name):
                    await backend.update_weights(snapshot, deadline=soon())
            await check_everything(backend, models.student, rows, FIRST)


async def test_weights_that_are_others_only_while_the_server_reads_them_are_noticed(
    sglang_student: RunningServer, models: Any, connect: Connect, rows: Rows, tmp_path: Path
) -> None:
    new = snapshot_of(shutil.copytree(models.other, tmp_path / "new"), SECOND)
    path, own = Path(new.directory) / "model.safetensors", Path(new.directory) / "own"
    async with connect(sglang_student) as backend:
        await backend.update_weights(snapshot_of(models.student, FIRST), deadline=soon())
        transport = backend._updater._transport
        send = transport.send

        async def send_others(*given: Any, **settings: Any) -> None:
            path.rename(own)
            shutil.copyfile(models.teacher / path.name, path)
            await send(*given, **settings)
            own.replace(path)

        transport.send = send_others
        with pytest.raises(PoisonedReplyError, match=r"student: does not hold weights 0\.1 .*; it stays paused$"):
            await backend.update_weights(new, deadline=soon())
        transport.send = send
        await backend.update_weights(new, deadline=soon())
        await check_everything(backend, models.other, rows, SECOND)
        await backend.update_weights(snapshot_of(models.student, FIRST), deadline=soon())


async def test_a_sender_that_dies_leaves_the_old_weights_and_the_next_update_starts_another(
    sglang_student: RunningServer, models: Any, connect: Connect, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(sglang_student, weights=weight_settings("distributed")) as backend:
        await backend.update_weights(snapshot_of(models.student, FIRST), deadline=soon())
        sender = backend._updater._transport.sender  # type: ignore[attr-defined]
        os.kill(sender._child.pid, signal.SIGSTOP)
        update = asyncio.create_task(backend.update_weights(snapshot_of(models.other, SECOND), deadline=soon()))
        await until_the_engine_waits(sglang_student)  # for tensors
        os.killpg(sender._child.pid, signal.SIGKILL)
        with pytest.raises(RequestError, match=r"student-weights .* was killed by SIGKILL|/update_weights_from_distr"):
            await update
        await check_everything(backend, models.student, rows, FIRST)

        monkeypatch.setattr(type(sender), "join", lambda *_, **__: asyncio.sleep(3600))
        with pytest.raises(RequestError, match="before the deadline"):  # the sender never joins
            await backend.update_weights(snapshot_of(models.other, SECOND), deadline=soon(10.0))
        monkeypatch.undo()
        await backend.update_weights(snapshot_of(models.other, SECOND), deadline=soon())
        await check_everything(backend, models.other, rows, SECOND)
        await backend.update_weights(snapshot_of(models.student, FIRST), deadline=soon())


async def until_the_engine_waits(server: RunningServer) -> None:
    """Until it does not answer: the process in front of it has to ask it for this."""
    patient = httpx.Timeout(WAIT_S, read=1.0)  # connecting may take long on a machine that is busy
    async with asyncio.timeout(WAIT_S), httpx.AsyncClient(base_url=server.url, timeout=patient) as client:
        with contextlib.suppress(httpx.ReadTimeout):
            while True:
                await client.get("/server_info")


# Requests that are given up, and a server that goes away.


async def test_a_request_that_is_given_up_frees_its_place_and_no_other(
    sglang_student: RunningServer, connect: Connect
) -> None:
    async with connect(sglang_student) as backend:
        requests = [
            asyncio.create_task(backend.generate(tokens(5, n), endless(1800), deadline=soon())) for n in range(4)
        ]
        await wait_until(sglang_student, 4)
        requests[1].cancel()
        await asyncio.wait([requests[1]])
        await wait_until(sglang_student, 3)  # by itself the server notices nothing for long (conftest.py)
        others = [requests[0], requests[2], requests[3]]
        assert not any(each.done() for each in others)
        finished = await asyncio.gather(*others)
    assert [len(each.token_ids) for each in finished] == [1800] * 3


async def test_a_deadline_that_passes_frees_the_place_too(sglang_student: RunningServer, connect: Connect) -> None:
    async with connect(sglang_student) as backend:
        with pytest.raises(TransientError, match="no reply before the deadline"):
            await backend.generate(tokens(5, 0), endless(1900), deadline=soon(0.5))
        await wait_until(sglang_student, 0)


async def test_seeds_act_under_deterministic_inference_and_a_killed_server_is_a_transient_error(
    start_sglang: Any, models: Any, connect: Connect
) -> None:
    """Two things of one server, because it takes long to start."""
    with start_sglang(models.student, "--enable-deterministic-inference") as server:
        async with connect(server) as backend:
            assert (await backend.capabilities(deadline=soon())).seeds

            async def sample(seed: int) -> list[int]:
                settings = sampling(24, seed=seed, stop_token_ids=())
                return list((await backend.generate(tokens(10, 0), settings, deadline=soon())).token_ids)

            first, again, other = await asyncio.gather(sample(1 << 62), sample(1 << 62), sample((1 << 62) + 1))
            assert first == again != other

            settings = endless(1900)
            request = asyncio.create_task(backend.generate(tokens(5, 0), settings, deadline=soon()))
            await wait_until(server, 1)
            server.signal_group(signal.SIGKILL)
            with pytest.raises(TransientError, match="student/generate"):
                await request
