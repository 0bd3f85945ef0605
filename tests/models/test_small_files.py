"""What lies beside published weights: the student's own files, but for what training changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spot_async.errors import DataError
from spot_async.models.small_files import publish_small_files, read_json
from spot_async.models.vocabulary import Vocabulary, load_tokenizer

HUBS_CONFIG = {  # as transformers 4 wrote it; version 5 would write rope_theta in a form that 4 reads as 10000
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "unknown_to_us": {"ü": [1, None]},
}


def published(student: Path, tmp_path: Path, **choices: Any) -> Path:
    (target := tmp_path / "published").mkdir()
    defaults = {"architecture": "Qwen3ForCausalLM", "dtype": "bfloat16", "end_token_ids": (2,)}
    publish_small_files(student, target, **{**defaults, **choices})
    return target


@pytest.fixture
def given(tmp_path: Path) -> Callable[..., Path]:
    def make(**files: Any) -> Path:
        (directory := tmp_path / "student").mkdir()
        (directory / "config.json").write_text(json.dumps(HUBS_CONFIG, ensure_ascii=False, indent=3))
        for name, content in files.items():
            path = directory / name.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return directory

    return make


def test_files_that_training_does_not_change_are_the_students_bytes(given: Callable[..., Path], tmp_path: Path) -> None:
    files = {
        "generation_config.json": {"eos_token_id": 2, "pad_token_id": -1, "temperature": 0.6, "top_p": 0.9},
        "additional_chat_templates__tool_use.jinja": "{{ tools }}",
        "chat_template.jinja": "{{ messages }}\n\n",
        "tokenizer.json": "{ }",
        "tokenizer.model.v3": "bytes",
        "merges.txt": "a b",
        "vocab.bpe": "a b",
        "LICENSE": "yes",
    }
    others = {"model.safetensors": "w", "model.safetensors.index.json": "{}", "own.py": "1", "README.md": "# It"}
    student = given(**files, **others, **{"checkpoint__config.json": "{}", "additional_chat_templates__x.py": "1"})
    target = published(student, tmp_path)
    found = {each.relative_to(target).as_posix(): each.read_bytes() for each in target.rglob("*") if each.is_file()}
    assert found.keys() == {name.replace("__", "/") for name in files} | {"config.json"}
    assert all(each == (student / name).read_bytes() for name, each in found.items())


def test_the_type_of_the_weights_their_class_and_the_end_tokens_are_what_training_changes(
    given: Callable[..., Path], tmp_path: Path
) -> None:
    student = given(**{"generation_config.json": {"eos_token_id": 2, "temperature": 0.6}})
    nested = HUBS_CONFIG | {"text_config": {"dtype": "bfloat16", "rope_theta": 5.0}, "vision_config": {"depth": 2}}
    (student / "config.json").write_text(json.dumps(nested))
    target = published(student, tmp_path, dtype="float32", architecture="Qwen3Other", end_token_ids=(2, 7))
    config = json.loads((target / "config.json").read_text())
    assert config == nested | {
        "architectures": ["Qwen3Other"],
        "torch_dtype": "float32",
        "text_config": {"dtype": "float32", "rope_theta": 5.0},
    }
    assert list(config) == list(nested), "in their order"
    generation = json.loads((target / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [2, 7], "temperature": 0.6}


def test_a_student_that_names_no_end_token_gets_those_of_the_run(given: Callable[..., Path], tmp_path: Path) -> None:
    target = published(given(), tmp_path, end_token_ids=(2, 7))
    assert json.loads((target / "generation_config.json").read_text()) == {"eos_token_id": [2, 7]}


def test_a_pointer_in_place_of_a_tokenizer_is_named(given: Callable[..., Path]) -> None:
    student = given(**{"tokenizer.json": "version https://git-lfs.github.com/spec/v1\noid sha256:7\nsize 9\n"})
    with pytest.raises(DataError, match=r"tokenizer\.json: is a Git LFS pointer.*git lfs pull"):
        load_tokenizer(student)


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [5, 2]}, {"eos_token_id": 4}, (1, 5, 2)),
        (None, {"eos_token_id": [2, 5]}, (1, 2, 5)),
        ({"temperature": 0.6}, {"eos_token_id": 0}, (1, 0)),
        ({"eos_token_id": None}, {"eos_token_id": [], "text_config": {"eos_token_id": [7]}}, (1, 7)),
        (None, {"eos_token_id": None, "text_config": {"eos_token_id": 1}}, (1,)),
        (None, {"text_config": None}, (1,)),
    ],
)
def test_a_response_ends_where_config_json_says_if_the_generation_config_does_not(
    random_model: Callable[..., Path],
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    ends: tuple[int, ...],
) -> None:
    directory = random_model()
    own = {key: each for key, each in read_json(directory / "config.json").items() if key != "eos_token_id"}
    (directory / "config.json").write_text(json.dumps(own | config))
    (directory / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    assert Vocabulary.load(directory).end_token_ids == ends


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"eos_token_id": "2"}', "is no token id"),
        ('{"eos_token_id": [[2]]}', "is no token id"),
        ('{"eos_token_id": -1}', "is no token id"),
        ("[2]", "cannot be read as a JSON object"),
    ],
)
def test_a_generation_config_that_names_no_token_is_one_clear_line(
    random_model: Callable[..., Path], content: str, said: str
) -> None:
    directory = random_model()
    (directory / "generation_config.json").write_text(content)
    with pytest.raises(DataError, match=rf"generation_config\.json.* {said}"):
        Vocabulary.load(directory)
