"""A run that is stopped during an evaluation makes it when it continues, whether training was over or not."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
from problem_files import FOUR
from rich.console import Console

from spot_async.checks.plan import plan_training
from spot_async.config import Config
from spot_async.config.loading import load_config
from spot_async.errors import ConfigError
from spot_async.evaluation.response_log import ResponseLog
from spot_async.loop.resuming import StopRequest
from spot_async.run_directory.layout import RunDirectory
from spot_async.running.resuming import open_run
from spot_async.running.training import Start, train

KEYS = (
    *FOUR,
    "training.iterations=2",
    "training.checkpoint_every=2",
    "evaluation.eval_every=1",
    "evaluation.samples=1",
    "policy=opd",
)


def screen() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture
def config(tmp_path: Path) -> Config:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(Path("examples/running_sum/data/heldout.jsonl").read_text().splitlines(keepends=True)[:12]))
    keys = [f"run.directory={tmp_path / 'run'}", f"evaluation.problems={few}", *KEYS]
    return load_config(Path("configs/quickstart.yaml"), keys)


@pytest.mark.long
@pytest.mark.usefixtures("servers_on_threads", "trainer_on_thread")
async def test_an_evaluation_that_was_cut_off_is_made_when_the_run_goes_on(config, monkeypatch):
    directory = RunDirectory.create(Path(config.run.directory), config)
    stop = StopRequest()
    append = ResponseLog.append

    async def append_and_stop(log, response):
        await append(log, response)
        if (directory.path / "weights" / "step-000001").exists():  # that before training is complete
            stop.say()
            await asyncio.Event().wait()  # until it is cancelled: the others must not end the evaluation first

    monkeypatch.setattr(ResponseLog, "append", append_and_stop)
    outcome = await train(config, plan_training(config), directory, screen(), Start(stop=stop))
    assert outcome.stopped
    assert outcome.iterations == 1
    assert not (directory.path / "evaluation-000001.json").exists()
    assert not directory.has_summary
    monkeypatch.undo()

    async def go_on():
        run = open_run(directory.path)
        return await train(run.config, run.plan, run.directory, screen(), Start(checkpoint=run.checkpoint))

    outcome = await go_on()
    assert (outcome.iterations, outcome.stopped) == (2, False)
    assert (directory.path / "evaluation-000001.json").exists()
    first, _ = (json.loads(line) for line in (directory.path / "metrics.jsonl").read_text().splitlines())
    assert "time/evaluate_s" not in first, "it was not complete"
    assert directory.has_summary

    # One that was stopped in its last evaluation.
    for name in ("summary.json", "evaluation-after.json", "evaluation-after.jsonl", "evaluation-000002.json"):
        (directory.path / name).unlink()
    again = await go_on()
    assert again.iterations == 2
    assert again.after.rows["all"].avg == outcome.after.rows["all"].avg
    assert directory.has_summary

    # Further than was planned, its learning rate would rise again.
    said: list[str] = []
    open_run(directory.path, ["training.iterations=8"], said.append)
    assert [line.split(",")[0] for line in said] == ["learning rate: 0.0001 in iteration 2 and 0.00017 in iteration 3"]
    with pytest.raises(ConfigError, match=r"training\.schedule_iterations=2: .* raise it to 4 or more"):
        open_run(directory.path, ["training.iterations=4", "training.schedule_iterations=2"])

    # A dry run starts no server, so that none has to be installed.
    elsewhere = ["training.iterations=4", "student.backend={kind: vllm, launch: {python: /no/python}}"]
    open_run(directory.path, elsewhere, weights=())
    with pytest.raises(ConfigError, match="no interpreter '/no/python'"):
        open_run(directory.path, elsewhere)
