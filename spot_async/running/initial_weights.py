"""The student that a run starts from, on a server that holds one knows not what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from spot_async.base.timeouts import WEIGHT_UPDATE_TIMEOUT_S
from spot_async.config import ModelConfig
from spot_async.protocols import WeightSink
from spot_async.types import Capabilities, WeightSnapshot, WeightVersion

SENDING_WEIGHTS = "sending the student's weights to its server"  # the step's name


async def send_initial_weights(
    model: ModelConfig, student: WeightSink, found: Capabilities, announce: Callable[[str], None]
) -> None:
    """Give a student's server that was running already `student.model`: it may hold the weights of another run.

    One that takes no weights (so that it can only be evaluated) is taken at its word.
    """
    if found.version is not None or not found.weight_update:
        return
    announce(SENDING_WEIGHTS)
    deadline = asyncio.get_running_loop().time() + WEIGHT_UPDATE_TIMEOUT_S
    await student.update_weights(initial_weights(model), deadline=deadline)


def initial_weights(model: ModelConfig) -> WeightSnapshot:
    """The model's directory under a name that a server which runs in another one can read."""
    return WeightSnapshot(directory=str(Path(model.model).absolute()), version=WeightVersion(0, 0))
