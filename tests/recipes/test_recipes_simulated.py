"""Whatever befalls a run of a recipe, the invariants of a run hold; and `simulate` says how long it takes."""

from __future__ import annotations

import json

import pytest
from faults.run import faulty_run
from recipes import NAMES, RECIPES, simulated_recipe
from typer.testing import CliRunner

from spot_async.cli import app


@pytest.mark.parametrize("max_staleness", [pytest.param(0, marks=pytest.mark.nightly), 2])
@pytest.mark.parametrize("name", NAMES)
def test_the_invariants_hold_whatever_befalls_the_run(name, max_staleness):
    runs = [faulty_run(seed, simulated_recipe(name), max_staleness=max_staleness).run for seed in range(3)]
    trained = [each for run in runs for each in run.trained]
    assert trained
    written_by = {span.version is None for each in trained for span in each.version_spans}
    assert written_by == ({True, False} if name in ("gkd", "guided_prefix", "speculative_kd") else {False})


RATES = """
student: {tokens_per_s: 4000, tokens_per_s_each: 200}
teacher: {tokens_per_s: 4000}
reference: {tokens_per_s: 4000}
trainer: {tokens_per_s: 4000, fixed_s: 0.2}
update_s: 0.3
lengths: {median: 50, sigma: 0.4}
"""


OFTEN = ("kdrl", "rethinking_opd", "speculative_kd")  # a group, chosen tokens, rounds


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[] if each in OFTEN else [pytest.mark.long]) for each in NAMES],
)
def test_simulate_foretells_its_run(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.chdir(RECIPES.parents[1])
    (tmp_path / "rates.yaml").write_text(RATES)
    few = ["training.batch_size=16", "training.mini_batch_size=16"]
    command = ["simulate", str(RECIPES / f"{name}.yaml"), *few, "--rates", str(tmp_path / "rates.yaml")]
    done = CliRunner().invoke(app, [*command, "--max-staleness", "1", "--iterations", "2", "--json"])
    assert done.exit_code == 0, done.output
    strict, stale = json.loads(done.stdout)["outcomes"]
    assert 0 < stale["iteration_s"] <= strict["iteration_s"]
