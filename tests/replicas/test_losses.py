"""What a lost server leaves in the run: nothing. Its weights can be deleted, and its objects are gone at once."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import soon
from random_adapters import random_adapter

from spot_async.backends.local.backend import LocalBackend
from spot_async.base.tasks import watched
from spot_async.config import LoraConfig, ServingConfig
from spot_async.errors import ProcessDiedError, TransientError
from spot_async.models.weight_files import ADAPTER, delete_weights
from spot_async.replicas.leasing import LeaseRequest
from spot_async.replicas.life_cycle import State
from spot_async.replicas.pool import ReplicaPool
from spot_async.replicas.replica import Trouble
from spot_async.types import SamplingSettings, WeightSnapshot, WeightVersion

pytestmark = pytest.mark.usefixtures("servers_on_threads", "quiet")
LORA = LoraConfig(rank=4, alpha=8.0, targets="all")
LOSSES = 4


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is in a cycle stays, as it does for hours in a run, where collections are rare."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def opened_below(directory: Path) -> list[str]:
    """Return the directories of weights that this process has opened."""
    opened = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed by a thread meanwhile
            opened.append(each.readlink())
    return [each.name for each in opened if each.is_relative_to(directory / "weights")]


async def ask(pool: ReplicaPool[Any], seed: int, tokens: int = 4, request: LeaseRequest | None = None) -> None:
    sampling = SamplingSettings(max_tokens=tokens, stop_token_ids=(), seed=seed)
    async with await pool.lease(request or LeaseRequest("rollout", (seed,))) as backend:
        await backend.generate(np.array([5, 9, 2], np.int32), sampling, deadline=soon())


async def test_a_student_lost_again_and_again_leaves_no_object_no_open_file_and_no_weights(
    random_model: Callable[..., Path], tmp_path: Path, no_collector: None
) -> None:
    base = random_model(initializer_range=0.2)
    settings = LocalBackend.Settings.model_validate({"weights": {"transport": "adapter"}}).with_lora(LORA)
    made: list[weakref.ref[LocalBackend]] = []
    opened: list[list[str]] = []

    def make() -> LocalBackend:
        backend = LocalBackend(settings, role="student", model=str(base), run_directory=tmp_path)
        made.append(weakref.ref(backend))
        return backend

    pool = ReplicaPool("student", {"student": make}, ServingConfig(restarts=LOSSES))

    async def losses() -> None:
        for step in range(1, LOSSES + 1):
            directory = tmp_path / "weights" / f"step-{step:06d}"
            random_adapter(directory / ADAPTER, base, LORA, seed=step)
            snapshot = WeightSnapshot(directory=str(directory), version=WeightVersion(0, step))
            await pool.update_weights(snapshot, deadline=soon())
            await ask(pool, step)
            replica = pool._replicas[0]
            replica.report(Trouble.ENDED, ProcessDiedError("student was killed"))
            lost = LeaseRequest("rollout", (step,))
            with pytest.raises(TransientError):  # sent just before the loss was noticed
                await ask(pool, step, tokens=1000, request=lost)  # takes longer than that, on a busy machine too
            assert lost.losses == 1, "after a second one it is suspected to end servers"
            await ask(pool, step)  # waits until it is back
            assert (replica.life.state, replica.restarts) == (State.SERVING, step)
            opened.append(opened_below(tmp_path))
            for older in (tmp_path / "weights").glob("step-*"):
                delete_weights(older)  # as the trainer does; the newest is in use
            assert [each.name for each in (tmp_path / "weights").glob("step-*")] == [f"step-{step:06d}"]

    async with pool:
        await watched(losses(), [pool.watch])
        assert [each() is not None for each in made] == [*[False] * LOSSES, True]
    assert opened == [[f"step-{step:06d}"] for step in range(1, LOSSES + 1)]
    assert [each.name for each in (tmp_path / "weights").glob("step-*")] == [f"step-{LOSSES:06d}"]
    delete_weights(tmp_path / "weights" / f"step-{LOSSES:06d}")
    assert not [*(tmp_path / "weights").glob("step-*")]  # nobody holds it any more
