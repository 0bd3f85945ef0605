"""Where torch is not imported, a process of its own judges what is no plain decoder, and says what torch would say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from spot_async.errors import DataError
from spot_async.models.files import softmax_width
from spot_async.models.whole import check_whole

Models = Callable[..., Path]
CALL = """
import sys
from pathlib import Path
from spot_async.errors import DataError
from spot_async.models.whole import check_whole

for directory in sys.argv[1:]:
    try:
        check_whole(Path(directory))
    except DataError as error:
        print(ascii(str(error)))
assert "torch" not in sys.modules
"""


def changed(model: Path, target: Path, config: dict[str, Any], *, lost: str | None = None) -> Path:
    target.mkdir()
    (target / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | config))
    own = load_file(model / "model.safetensors")
    save_file({name: each for name, each in own.items() if name != lost}, target / "model.safetensors")
    return target


def refusal(directory: Path) -> str:
    with pytest.raises(DataError) as refused:
        check_whole(directory)
    return str(refused.value)


@pytest.mark.long
def test_a_child_says_what_is_wrong_in_the_same_words(random_architecture: Models, tmp_path: Path) -> None:
    lost = "transformer.h.1.ln_1.bias"
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    directories = [
        changed(random_architecture("gpt2"), tmp_path / os.fsdecode(b"not UTF-8 \xff"), {}, lost=lost),
        changed(random_architecture("qwen3"), tmp_path / "own", own),
    ]
    done = subprocess.run([sys.executable, "-c", CALL, *directories], capture_output=True, check=True, timeout=300)
    found = done.stdout.decode().splitlines()
    assert found == [ascii(refusal(each)) for each in directories]
    assert f"{lost!r} is missing" in found[0]
    assert "code of its own" in found[1]


def test_a_size_that_config_json_leaves_out_is_the_architecture_s_default(
    random_architecture: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = changed(random_architecture("gemma2"), tmp_path / "model", {})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "vocab_size"}))
    monkeypatch.delitem(sys.modules, "torch")  # as in an orchestrator: nothing below imports it here
    assert softmax_width("student", directory) == 256_000


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a stand-in of the child, from what it does; returns an unusual directory to judge."""

    def make(program: str) -> Path:
        python = tmp_path / "python"
        python.write_text(f"#!{sys.executable}\nimport os, signal, sys\n{program}\n")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        monkeypatch.delitem(sys.modules, "torch")
        (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
        return tmp_path

    return make


def test_the_child_gets_no_key(child: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + 24 * "x")
    monkeypatch.setenv("SOME_PATH", "kept")
    directory = child("print([name for name in ('HF_TOKEN', 'SOME_PATH') if name in os.environ]); sys.exit(4)")
    with pytest.raises(DataError, match=r"^\['SOME_PATH'\]$"):
        check_whole(directory)


def test_the_child_imports_nothing_of_the_working_directory(child: Callable[[str], Path]) -> None:
    with pytest.raises(DataError, match=r"^True$"):
        check_whole(child("print(sys.flags.safe_path); sys.exit(4)"))


def test_what_transformers_makes_no_model_of_is_refused_only_where_it_must_load(child: Callable[[str], Path]) -> None:
    directory = child("print('a warning\\nno such kind'); sys.exit(3)")
    check_whole(directory, must_load=False)
    with pytest.raises(DataError, match=r"^no such kind$"):
        check_whole(directory)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "cannot be judged: exit code -9: "),
        ("raise MemoryError('all is used')", "cannot be judged: exit code 1: MemoryError: all is used"),
    ],
)
def test_a_child_that_does_not_come_to_its_end_is_one_line(
    child: Callable[[str], Path], program: str, said: str
) -> None:
    directory = child(program)
    with pytest.raises(DataError) as refused:
        check_whole(directory, must_load=False)
    assert str(refused.value) == f"{directory}: {said}"
