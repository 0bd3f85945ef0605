"""A server that does not hold what it was told to load is found out by the digests that it reports."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from deadlines import soon
from safetensors.numpy import load_file, save_file
from structlog.testing import capture_logs
from vllm_stand_in import V0, V1, Connect, checksums

from spot_async.backends.shared import witnesses
from spot_async.backends.shared.witnesses import Witnesses, file_digests, sglang_on_gpu, sha256, sha256_begin
from spot_async.errors import PermanentError, PoisonedReplyError, ProcessDiedError
from spot_async.types import WeightSnapshot

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model after a step."""
    directory = tmp_path_factory.mktemp("other")
    moved = {name: tensor * np.float32(1.5) for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(moved, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


async def test_a_vllm_that_holds_other_weights_than_it_was_told_to_load_stays_paused(connect: Connect, other: Path):
    async with connect() as (backend, stand_in):
        await backend.update_weights(WeightSnapshot(directory=str(stand_in.model), version=V0), deadline=soon())
        assert (await backend.capabilities(deadline=soon())).weights_checked
        await backend.update_weights(WeightSnapshot(directory=str(other), version=V1), deadline=soon())
        stand_in.planted = stand_in.model  # it continues loading these
        with pytest.raises(
            ProcessDiedError, match=rf"student: does not hold weights 0\.1 .*those of {other} \(the fir"
        ):
            await backend.update_weights(WeightSnapshot(directory=str(other), version=V1), deadline=soon())
        assert stand_in.paused


async def test_a_server_that_reports_nothing_is_said_to_be_unchecked_once(connect: Connect):
    with capture_logs() as logged:
        async with connect(version="0.31.0") as (backend, stand_in):
            for version in (V0, V1):
                await backend.update_weights(
                    WeightSnapshot(directory=str(stand_in.model), version=version), deadline=soon()
                )
            assert (await backend.capabilities(deadline=soon())).weights_checked is False
            assert stand_in.calls.count("/weight_checker") == 1
    assert [each["server"] for each in logged if "not checked" in each["event"]] == ["student"]


async def test_only_tensors_that_the_server_holds_as_they_are_in_the_files_are_witnesses(model: Path):
    async def ask(deadline: float) -> Mapping[str, str]:
        return checksums(model)

    found = Witnesses("student", ask)
    await found.learn(model, deadline=soon())
    assert {NORM, "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.o_proj.weight"} <= found.names
    assert not [name for name in found.names if "embed_tokens" in name or "qkv" in name]


@pytest.mark.parametrize("digest", [sha256, sha256_begin, sglang_on_gpu])
@pytest.mark.parametrize("served", ["F32", "BF16"])
async def test_a_server_s_own_type_and_digest_are_found_by_trying(tmp_path, model, other, digest, served):
    def report(directory: Path) -> dict[str, str]:
        norm = load_file(directory / "model.safetensors")[NORM]
        if served == "BF16":  # as torch rounds
            words = norm.view(np.uint32).astype(np.uint64)
            norm = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
        return {f"0:{NORM}": digest(norm.view(np.uint8)), "0:unknown": "7" * 16}

    async def ask(deadline: float) -> Mapping[str, str]:
        return report(held)

    found = Witnesses("student", ask)
    held = model
    await found.learn(model, deadline=soon())
    assert found.names == {NORM}
    held = other
    await found.check(WeightSnapshot(directory=str(other), version=V1), deadline=soon())
    held = model
    with pytest.raises(PoisonedReplyError, match=f"1 of 1 tensors that it reports on .*{NORM}"):
        await found.check(WeightSnapshot(directory=str(other), version=V1), deadline=soon())


def test_sglang_s_digest_on_a_gpu_is_its_kernel_s():
    """As Triton's interpreter computes SGLang 0.5.23's `gpu_tensor_hash`."""
    rng = np.random.default_rng(0)
    recorded = {
        1: "cfb20b78676d40d0",
        3: "4286ee7b471b87af",
        100: "570f2bec5ca21b08",
        32768: "2b53e68bd3de6466",
        40001: "c9585d58068866e9",
        200000: "fe268c362eb15a0b",
    }
    assert {size: sglang_on_gpu(rng.integers(0, 256, size, dtype=np.uint8)) for size in recorded} == recorded


async def test_of_a_large_model_the_small_tensors_and_the_first_of_each_kind_are_enough(monkeypatch, model: Path):
    assert file_digests(model).keys() == load_file(model / "model.safetensors").keys()
    monkeypatch.setattr(witnesses, "SMALL_BYTES", 1 << 10)
    few = file_digests(model)
    assert {"model.layers.0.mlp.down_proj.weight", NORM} <= few.keys()
    assert "model.layers.1.mlp.down_proj.weight" not in few
    norm = load_file(model / "model.safetensors")[NORM]
    assert few[NORM] == hashlib.sha256(norm.tobytes()).hexdigest()


async def test_a_server_that_refuses_to_report_when_it_starts_is_unchecked_and_serves(model: Path):
    async def ask(deadline: float) -> Mapping[str, str]:
        raise PermanentError("HTTP 403: no")

    found = Witnesses("student", ask)
    with capture_logs() as logged:
        await found.learn(model, deadline=soon())
    assert (found.are_there, [each["reason"] for each in logged]) == (False, ["HTTP 403: no"])
