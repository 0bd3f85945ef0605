"""Weights that a server would die of, or mix with others, are never sent."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from spot_async.backends.shared.snapshots import check_snapshot
from spot_async.errors import DataError

NAMES = ("model.embed_tokens.weight", "model.layers.0.w.weight", "model.norm.weight", "lm_head.weight")
SHAPES = ((8, 4), (4, 6), (4,), (8, 4))


def tensors(**changes):
    made = {name: np.ones(shape, np.float32) for name, shape in zip(NAMES, SHAPES, strict=True)}
    return {name: tensor for name, tensor in (made | changes).items() if tensor is not None}


def write(directory, content, *, shards=1, tied=False):
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    if shards == 1:
        save_file(content, directory / "model.safetensors")
        return directory
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(content)}
    for file in files:
        save_file({name: content[name] for name in content if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.fixture
def model(tmp_path):
    return write(tmp_path / "model", tensors())


async def complaint(directory, like):
    with pytest.raises(DataError) as raised:
        await check_snapshot(directory, like)
    line = str(raised.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("shards", [1, 2, 3])
async def test_a_complete_snapshot_passes_however_it_is_split_and_its_layout_comes_back(tmp_path, model, shards):
    snapshot = write(tmp_path / "step", tensors(), shards=shards)
    layout = await check_snapshot(str(snapshot), str(model))
    assert {name: layout[name].shape for name in NAMES} == dict(zip(NAMES, SHAPES, strict=True))


async def test_what_the_trainer_publishes_is_a_snapshot_of_the_model_it_trained(tmp_path, random_model):
    import torch
    from transformers import AutoModelForCausalLM

    for tied in (True, False):
        model = random_model(tie_word_embeddings=tied)
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(
            tmp_path / str(tied), max_shard_size="5KB"
        )
        layout = await check_snapshot(tmp_path / str(tied), model)
        assert {header.dtype for header in layout.values()} == {"BF16"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model.norm.weight": None, "lm_head.weight": None}, "tensor 'lm_head.weight' is missing (2 of 4 in all)"),
        ({"model.extra": np.ones(3, np.float32)}, "tensor 'model.extra' is not one of the served model's (1 in all)"),
        (
            {"model.norm.weight": np.ones((4, 1), np.float32)},
            "tensor 'model.norm.weight' has shape (4, 1), the served model's has (4,)",
        ),
        (
            {"model.layers.0.w.weight": np.ones((4, 6), np.int8)},
            "tensor 'model.layers.0.w.weight' is I8, the served model's is F32",
        ),
    ],
)
@pytest.mark.parametrize("shards", [1, 2])
async def test_the_first_tensor_at_fault_is_named(tmp_path, model, changes, expected, shards):
    assert expected in await complaint(write(tmp_path / "step", tensors(**changes), shards=shards), model)


async def test_servers_cast_floating_point_types_so_they_pass(tmp_path, model):
    snapshot = write(tmp_path / "step", {name: each.astype(np.float16) for name, each in tensors().items()})
    await check_snapshot(snapshot, model)


async def test_a_tied_output_layer_may_be_left_out_on_either_side_and_an_untied_one_may_not(tmp_path):
    without = {"lm_head.weight": None}
    tied, untied = (write(tmp_path / f"like-{t}", tensors(), tied=t) for t in (True, False))
    tied_without = write(tmp_path / "like-without", tensors(**without), tied=True)
    snapshot = write(tmp_path / "step", tensors(**without))
    await check_snapshot(snapshot, tied)
    await check_snapshot(untied, tied_without)
    assert "'lm_head.weight' is missing" in await complaint(snapshot, untied)
    assert "model.norm.weight" in await complaint(write(tmp_path / "no", tensors(**{NAMES[2]: None})), tied)


async def test_frequencies_that_servers_compute_need_not_be_published(tmp_path):
    buffer = {"model.layers.0.rotary_emb.inv_freq": np.ones(2, np.float32)}
    await check_snapshot(write(tmp_path / "step", tensors()), write(tmp_path / "old", tensors(**buffer)))


async def test_files_that_servers_would_load_besides_or_instead_are_refused(tmp_path, model):
    doubled = write(tmp_path / "doubled", tensors())
    shutil.copy(doubled / "model.safetensors", doubled / "consolidated.safetensors")
    assert "consolidated.safetensors: is no part of the weights" in await complaint(doubled, model)

    undecided = write(tmp_path / "undecided", tensors(), shards=2)
    shutil.copy(model / "model.safetensors", undecided)
    assert "holds both" in await complaint(undecided, model)

    twice = write(tmp_path / "twice", tensors(), shards=2)
    first, second = sorted(twice.glob("*.safetensors"))
    save_file(tensors(), second)
    assert f"is in another file of {twice} too" in await complaint(twice, model)
    first.unlink()
    assert f"names {first.name}, which is not there" in await complaint(twice, model)


async def test_a_directory_without_weights_is_refused(tmp_path, model):
    assert "no such weight directory" in await complaint(tmp_path / "nowhere", model)
    (tmp_path / "empty").mkdir()
    assert "holds neither model.safetensors" in await complaint(tmp_path / "empty", model)
    (tmp_path / "empty" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}')
    assert "names files outside its directory" in await complaint(tmp_path / "empty", model)


async def test_a_model_that_was_replaced_under_its_name_is_read_again(tmp_path, model):
    snapshot = write(tmp_path / "step", tensors())
    await check_snapshot(snapshot, model)
    shutil.rmtree(model)
    write(model, tensors(**{"model.norm.weight": np.ones(5, np.float32)}))
    assert "has shape (4,), the served model's has (5,)" in await complaint(snapshot, model)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
async def test_a_file_cut_or_grown_or_damaged_in_its_header_never_passes_as_something_else(tmp_path, data):
    """Whatever happens to bytes before the tensors: the file is refused, or says the same of every tensor."""
    like = tmp_path / "like"
    if not like.exists():
        write(like, tensors())
    whole = (like / "model.safetensors").read_bytes()
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    match data.draw(st.sampled_from(["cut", "grown", "damaged"])):
        case "cut":
            content = whole[: data.draw(st.integers(0, len(whole) - 1))]
        case "grown":
            content = whole + data.draw(st.binary(min_size=1, max_size=64))
        case _:
            at = data.draw(st.integers(0, header_bytes - 1))
            content = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    snapshot = tmp_path / "step"
    snapshot.mkdir(exist_ok=True)
    (snapshot / "model.safetensors").write_bytes(content)
    try:
        layout = await check_snapshot(snapshot, like)
    except DataError as error:
        assert str(snapshot) in str(error)  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert len(content) == len(whole)
        assert {name: header.shape for name, header in layout.items()} == dict(zip(NAMES, SHAPES, strict=True))
