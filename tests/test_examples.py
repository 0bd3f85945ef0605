"""The examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_one_iteration_goes_from_prompts_to_a_gradient_step(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "one_iteration.py", tmp_path / "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    *probed, step = done.stdout.splitlines()
    assert any(" at " in line and "->" in line for line in probed)
    assert step.startswith("16 trajectories: policy ")
    assert "nan" not in step


def test_one_iteration_fits_a_page_to_begin_from() -> None:
    lines = (ROOT / "examples" / "one_iteration.py").read_text().splitlines()
    assert len(lines) < 150
    imports = [line for line in lines if line.startswith("from spot_async")]
    public = {
        "spot_async",
        "spot_async.backends.local",
        "spot_async.policies.spot",
        "spot_async.trainer.loss",
        "spot_async.verification",
    }
    assert {line.split()[1] for line in imports} == public
