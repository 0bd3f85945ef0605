"""The types of what fixtures of `tests/conftest.py` make: each is a function that a test calls with what it changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from spot_async.trainer.messages import Batch
from spot_async.trainer.settings import TrainerSettings
from spot_async.types import SoftTargets, Supervision

if TYPE_CHECKING:
    import torch

    from spot_async.trainer.rank import StudentTrainer

MakeModel = Callable[..., Path]
MakeSample = Callable[..., Supervision]
MakeTargets = Callable[..., SoftTargets]
MakeSettings = Callable[..., TrainerSettings]
MakeTrainer = Callable[..., "StudentTrainer"]
MixedBatch = Callable[[], list[Supervision]]
MakeBatch = Callable[[int], Batch]
DenseLoss = Callable[..., "torch.Tensor"]
