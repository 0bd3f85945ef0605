"""A student's server that ran before us may hold any weights, but `student.model` is evaluated and trained.

The server has prices too. Responses until its budget is spent are kept, and the evaluation continues with a new budget.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from problem_files import FEW, FOUR
from rich.console import Console
from safetensors.numpy import load_file, save_file

from spot_async.checks.plan import plan_evaluation, plan_training
from spot_async.config.loading import load_config
from spot_async.errors import BudgetSpentError
from spot_async.evaluation.response_log import count_kept
from spot_async.models.files import read_model
from spot_async.run_directory.layout import RunDirectory
from spot_async.running import training as runtime
from spot_async.running.measuring import evaluate_student
from spot_async.running.training import train

pytestmark = pytest.mark.usefixtures("servers_on_threads", "trainer_on_thread")
ROOT = Path(__file__).parents[2]
QUIET = Console(quiet=True)
# Serves other weights than those of its role's model until it is given some, as a server of an earlier run would. A
# response costs 1.
ATTACHED = """
import os
import msgspec
from spot_async.backends.local import LocalBackend
from spot_async.spending.account import Account
from spot_async.spending.prices import Prices, Size

class Attached(LocalBackend):
    account = None

    class Settings(LocalBackend.Settings):
        budget: float = 1000.0

        def open_account(self, role):
            return Account(role, prices=Prices(request=1.0), budget=self.budget)

    def __init__(self, settings, *, role, model, run_directory):
        self.settings = settings
        super().__init__(settings, role=role, model=os.environ["OTHER_MODEL"], run_directory=run_directory)

    async def capabilities(self, *, deadline):
        return msgspec.structs.replace(await super().capabilities(deadline=deadline), version=None)

    async def generate(self, *asked, **settings):
        size = Size(prompt_tokens=1, max_completion_tokens=1)
        account = self.settings.account
        async with account.request("student", size, account.rate_limit) as charge:
            generation = await super().generate(*asked, **settings)
            charge.answered(b"{}")
        return generation
"""
SHORT = [
    "evaluation.samples=2",
    FEW,
    "training.iterations=1",
    *FOUR,
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


@pytest.mark.long
async def test_it_is_given_the_student_before_anything_is_measured_and_what_was_paid_for_is_kept(
    tmp_path, attached, few
):
    def configure(name, *overrides):
        given = [*SHORT, f"evaluation.problems={few}", *overrides]
        config = load_config(Path("configs/quickstart.yaml"), given)
        path = tmp_path / name
        return config, RunDirectory.open(path) if path.exists() else RunDirectory.create(path, config)

    async def evaluated(name, *overrides):
        config, directory = configure(name, *overrides)
        student = read_model("student", config.student.model)
        return await evaluate_student(config, student, plan_evaluation(config, student), directory, QUIET)

    def with_budget(money):
        return f"student.backend={{kind: {attached}, budget: {money}}}"

    def summary(name):
        found = json.loads((tmp_path / name / "summary.json").read_text())
        rows = [json.loads(line) for line in (tmp_path / name / "spending.jsonl").read_text().splitlines()]
        assert rows[-1]["iteration"] is None
        assert rows[-1]["answered"] == found["spending"]["student"]["answered"] == rows[-1]["money"]
        return found["spending"]["student"]["answered"], "ended_early" in found, found

    expected = await evaluated("local")
    with pytest.raises(BudgetSpentError, match=r"student.backend.budget=7 USD is spent: 7 for 7 answers"):
        await evaluated("attached", with_budget(7))
    assert count_kept(tmp_path / "attached" / "evaluation.jsonl") == 7
    assert summary("attached")[:2] == (7, True)
    found = await evaluated("attached", with_budget(12))  # of which 7 are spent
    assert found.responses == expected.responses
    assert summary("attached")[:2] == (12, False)
    written = [json.loads(line) for line in (tmp_path / "attached" / "spending.jsonl").read_text().splitlines()]
    assert [(row["iteration"], row["answered"]) for row in written] == [(None, 7), (0, 7), (None, 12)]  # 0: the start

    config, directory = configure("trained", with_budget(53), "evaluation.eval_every=1")
    outcome = await train(config, plan_training(config), directory, QUIET)
    assert outcome.before.responses == expected.responses
    assert (outcome.iterations, outcome.after) == (1, None)
    assert "student.backend.budget=53 USD is spent" in str(outcome.spent)
    assert len((directory.path / "metrics.jsonl").read_text().splitlines()) == 1
    at_start = json.loads((directory.path / "spending.jsonl").read_text().splitlines()[0])["answered"]
    before, trained_on = 12, 4
    assert count_kept(directory.path / "evaluation-000001.jsonl") == 53 - at_start - before - trained_on
    *spent, written = summary("trained")
    assert (spent, written["iterations"], written["after"]) == ([53, True], 1, None)
    assert "all" in written["before"]["tiers"]


class NoTrainer:
    """In place of one that would not be asked."""

    def __init__(self, *_given, **_where):
        self.watch = asyncio.Event().wait

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc_info):
        pass


async def test_a_budget_that_the_start_spends_leaves_a_summary_too(tmp_path, attached, few, monkeypatch):
    monkeypatch.setattr(runtime, "TrainerProcess", NoTrainer)
    given = [*SHORT, f"evaluation.problems={few}", f"student.backend={{kind: {attached}, budget: 1}}"]
    config = load_config(Path("configs/quickstart.yaml"), given)
    directory = RunDirectory.create(tmp_path / "run", config)
    outcome = await train(config, plan_training(config), directory, QUIET)
    assert (outcome.iterations, outcome.before, outcome.after, outcome.prompts) == (0, None, None, {})
    written = json.loads((directory.path / "summary.json").read_text())
    assert (written["iterations"], written["ended_early"]) == (0, str(outcome.spent))
    assert "student.backend.budget=1 USD is spent" in str(outcome.spent)
