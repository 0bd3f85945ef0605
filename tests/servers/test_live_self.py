"""The live student as its own teacher, on its own servers: without a context of its own it pulls nowhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import TinyModels
from parity import PARITY_NATS
from test_runs import problems, read_lines, run, write_config

from spot_async.backends.shared.launch_settings import LaunchSettings

__all__ = ["problems"]  # a fixture


@pytest.mark.nightly
@pytest.mark.parametrize("server", ["vllm", pytest.param("sglang", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("max_staleness", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_the_pull_of_the_live_self_is_noise(
    server: str,
    max_staleness: int,
    request: pytest.FixtureRequest,
    models: TinyModels,
    problems: Path,
    tmp_path: Path,
) -> None:
    launch: LaunchSettings = request.getfixturevalue(f"{server}_launch")
    path = write_config(tmp_path, models, problems, {"kind": server, "launch": launch.model_dump()}, {})
    config = yaml.safe_load(path.read_text())
    config["teacher"] = {"model": config["student"]["model"], "follows": {"every": 1}, "served_by": "student"}
    moves = {"kind": "distill", "pull": 1.0, "reward": 1.0, "samples": 4}  # by rewards: the pull alone moves nothing
    path.write_text(yaml.safe_dump(config | {"policy": moves, "evaluation": None, "max_staleness": max_staleness}))
    run("train", str(path))

    assert not (tmp_path / "run/logs/teacher.log").exists()
    rows = read_lines(tmp_path / "run/metrics.jsonl")
    samples = read_lines(tmp_path / "run/samples.jsonl")
    assert {row["iteration"] for row in rows} == {1, 2, 3}
    if max_staleness == 0:  # otherwise newer weights may score what older ones wrote
        pulls = [row["train/pull_mean"] for row in rows]
        assert max(map(abs, pulls)) < PARITY_NATS
        differences = [np.subtract(each["teacher_logprobs"], each["behavior_logprobs"]) for each in samples]
        assert max(np.abs(each).max() for each in differences) < PARITY_NATS
    assert all(row["train/grad_norm"] > 0 for row in rows)
