"""On virtual time a seed replays a run exactly, faults and all, in any process and whatever that did before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest


@pytest.mark.long
def test_a_seed_replays_a_run_exactly_in_another_process():
    """Sets of texts are ordered by the process's hash seed, those of objects by address, which follows from all that
    was made before: so the other process takes the seeds in the reverse order."""
    script = Path(__file__).parents[1] / "support" / "event_traces.py"
    seeds = [str(seed) for seed in range(60)]
    processes = [
        subprocess.Popen(
            [sys.executable, script, *order],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
        )
        for hash_seed, order in (("1", seeds), ("2", seeds[::-1]))
    ]
    first, second = (json.loads(process.communicate()[0]) for process in processes)
    assert first.keys() == second.keys() == set(seeds)
    assert sum(map(len, first.values())) > 10_000
    parted = {
        seed: next(pair for pair in zip_longest(first[seed], second[seed]) if pair[0] != pair[1])
        for seed in seeds
        if first[seed] != second[seed]
    }
    assert parted == {}
