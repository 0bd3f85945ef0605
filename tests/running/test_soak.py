"""The soak of `make kill-soak`, for some iterations: a bad teacher, killed replicas, and a run that ends clean."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak import soak


@pytest.mark.nightly
async def test_a_run_on_a_bad_teacher_ends_with_every_prompt_trained_although_its_replicas_are_killed(tmp_path: Path):
    looks = await soak(tmp_path, iterations=30, kill_every_s=20.0)
    assert looks[-1].iteration == 30
    assert looks[-1].directories < 25  # those of old versions are deleted
