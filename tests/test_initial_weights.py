"""A student's server that ran before us may hold any weights: what is evaluated and trained is `student.model`."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

from spot_async.config_loading import load_config
from spot_async.model_files import read_model
from spot_async.preflight import plan_evaluation, plan_training
from spot_async.run_directory import RunDirectory
from spot_async.runtime import train
from spot_async.student_evaluation import evaluate_student

pytestmark = pytest.mark.usefixtures("servers_on_threads")
ROOT = Path(__file__).parents[1]
QUIET = Console(quiet=True)
# Serves other weights than those of its role's model until it is given some, as a server of an earlier run would.
ATTACHED = """
import os
import msgspec
from spot_async.backends.local import LocalBackend

class Attached(LocalBackend):
    def __init__(self, settings, *, role, model, run_directory):
        super().__init__(settings, role=role, model=os.environ["OTHER_MODEL"], run_directory=run_directory)

    async def capabilities(self, *, deadline):
        return msgspec.structs.replace(await super().capabilities(deadline=deadline), version=None)
"""
SHORT = [
    "evaluation.samples=2",
    "training.iterations=1",
    "training.warmup_iterations=0",
    "training.batch_size=4",
    "training.mini_batch_size=4",
    "sampling.max_response_tokens=48",
    "policy=opd",
]


@pytest.fixture
def attached(tmp_path, monkeypatch):
    """The backend's name. Its server starts with the student's weights in reverse order."""
    monkeypatch.chdir(ROOT)
    other = tmp_path / "other"
    shutil.copytree("examples/running_sum/student", other)
    weights = load_file(other / "model.safetensors")
    save_file({name: np.ascontiguousarray(each[::-1]) for name, each in weights.items()}, other / "model.safetensors")
    (tmp_path / "attached_server.py").write_text(ATTACHED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OTHER_MODEL", str(other))
    return "attached_server:Attached"


@pytest.fixture
def few(tmp_path):
    """Some problems."""
    lines = (ROOT / "examples" / "running_sum" / "data" / "heldout.jsonl").read_text().splitlines()
    (tmp_path / "few.jsonl").write_text("\n".join(lines[:6]))
    return tmp_path / "few.jsonl"


async def test_it_is_given_the_student_before_anything_is_measured(tmp_path, attached, few):
    def configure(name, *overrides):
        given = [*SHORT, f"evaluation.problems={few}", *overrides]
        config = load_config(Path("configs/quickstart.yaml"), given)
        return config, RunDirectory.create(tmp_path / name, config)

    async def evaluated(name, *overrides):
        config, directory = configure(name, *overrides)
        student = read_model("student", config.student.model)
        return await evaluate_student(config, student, plan_evaluation(config, student), directory, QUIET)

    expected = await evaluated("local")
    found = await evaluated("attached", f"student.backend={attached}")
    assert found.responses == expected.responses

    config, directory = configure("trained", f"student.backend={attached}")
    outcome = await train(config, plan_training(config), directory, QUIET)
    assert outcome.before.responses == expected.responses
