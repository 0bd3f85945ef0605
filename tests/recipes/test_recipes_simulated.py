"""Whatever befalls a run of a recipe, the invariants of a run hold; and a run that crashes continues where it was."""

from __future__ import annotations

import pytest
from faults.run import faulty_run
from recipes import NAMES, simulated_recipe


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_the_invariants_hold_whatever_befalls_the_run(name, max_staleness):
    runs = [faulty_run(seed, simulated_recipe(name), max_staleness=max_staleness).run for seed in range(3)]
    trained = [each for run in runs for each in run.trained]
    assert trained
    written_by = {span.version is None for each in trained for span in each.version_spans}
    assert written_by == ({True, False} if name in ("gkd", "guided_prefix", "speculative_kd") else {False})
