"""The files of configs/start: what a person copies can start as it is, on the machine that it is for."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path

import pytest
import start_directory
from typer.testing import CliRunner

from spot_async.cli import app

START = Path(__file__).parents[1] / "configs" / "start"
FILES = (
    *("asynchronous", "lora-24gb", "one-gpu", "python-tool", "remote-teacher", "reward-and-teacher", "self-teacher"),
    *("several-teachers", "sglang", "two-gpus"),
)
HERE = {  # what is another here: the machine, and a data set of a few rows
    "asynchronous": ["evaluation.eval_every=2"],
}
KEY = {"TEACHER_KEY": "a key of the tests"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return start_directory.make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def shown(models, tmp_path, monkeypatch):
    """Runs a command with a copy, on a machine that has neither GPUs nor servers."""

    def run(
        name: str, *overrides: str, command: str = "train --dry-run --brief", environment: dict[str, str] = KEY
    ) -> tuple[int, str]:
        shutil.copy(START / f"{name}.yaml", tmp_path / "mine.yaml")
        words = [*command.split(), "mine.yaml", *HERE.get(name, ()), *overrides]
        done = CliRunner(env={"COLUMNS": "160", **environment}).invoke(app, words)
        return done.exit_code, done.output

    with contextlib.chdir(tmp_path), start_directory.reached(monkeypatch, models, tmp_path / "cache"):
        yield run


def test_there_is_one_for_each_thing_that_people_come_for_and_it_is_short_enough_to_copy():
    assert sorted(path.stem for path in START.iterdir()) == sorted(FILES)
    for path in START.iterdir():
        lines = path.read_text().splitlines()
        assert len(lines) <= 30
        assert lines[0].startswith("# ")
        assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each == "one-gpu" else pytest.mark.long) for each in FILES],
)
def test_a_copy_of_it_can_start_and_fits_the_gpus_that_it_names(name, shown):
    code, output = shown(name)
    assert code == 0, output
    assert "million tokens of the run" in output  # the estimate, whole
    assert "would need" not in output  # memory
    for said in re.findall(r"^warning: (.*)$", output, flags=re.M):
        expected = r"this machine has no GPU|no interpreter '/opt/|the disk of|are in data.train too|block of thinking"
        assert re.search(expected, said)


def test_programs_are_told_too_what_this_machine_lacks(shown):
    _, output = shown("one-gpu", command="check --no-servers --json")
    told = json.loads(output[output.index("{") :])
    assert sum("no interpreter '/opt/vllm/bin/python'" in each for each in told["lacking"]) == 2


@pytest.mark.long
def test_what_a_24_gb_gpu_cannot_hold_is_said_with_the_key_to_change(shown):
    assert shown("lora-24gb", "student.model=Qwen/Qwen3-0.6B")[0] == 0
    assert "would need" in shown("lora-24gb", "training.lora=null")[1]
    code, output = shown("lora-24gb", "teacher.model=Qwen/Qwen3-8B")
    assert (code, output.splitlines()[-1]) == (
        2,
        "error: teacher.backend.launch.memory_fraction=0.47 is 11.3 of 24.0 GiB, and the server's weights and "
        "workspace take 18.3: give it more than 0.76, or more devices (tensor_parallel_size)",
    )


def test_what_is_wrong_in_a_copy_is_one_line_that_names_the_key(shown):
    """An id that the hub does not have, a key that is not set, a column that is not there."""
    for given, said in (
        (("student.model=Qwen/Qwen3-7B",), r"student\.model: .*no public Qwen/Qwen3-7B on the hub"),
        (
            ("data.train.fields.problem=text",),
            r"no column 'text', which data\.train\.fields\.problem names; the row has",
        ),
        (("data.train.fields.answer=gold",), r"no column 'gold', which data\.train\.fields\.answer names; the row has"),
    ):
        code, output = shown("remote-teacher", *given)
        errors = re.findall(r"^error: (.*)$", output, flags=re.M)
        assert (code, len(errors)) == (2, 1), output
        assert re.search(said, errors[0])
    code, output = shown("remote-teacher", environment={})
    assert (code, output.strip()) == (2, "error: teacher.backend: the environment variable TEACHER_KEY is not set")
