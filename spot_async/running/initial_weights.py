"""Sends the weights that a run starts from to a student's server that may hold others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from spot_async.base.retry import WEIGHT_UPDATE_TIMEOUT_S
from spot_async.config import ModelConfig
from spot_async.models.hub import local_path
from spot_async.protocols import WeightSink
from spot_async.types import Capabilities, WeightSnapshot, WeightVersion

SENDING_WEIGHTS = "sending the student's weights to its server"  # the step's name


async def send_initial_weights(
    model: ModelConfig, student: WeightSink, found: Capabilities, announce: Callable[[str], None]
) -> None:
    """Send `student.model` to a student's server that was running already, as it may hold the weights of another run.

    A server that takes no weights can only be evaluated. It gets none, and is trusted to hold the right ones.
    """
    if found.version is not None or not found.weight_update:
        return
    announce(SENDING_WEIGHTS)
    deadline = asyncio.get_running_loop().time() + WEIGHT_UPDATE_TIMEOUT_S
    await student.update_weights(initial_weights(model), deadline=deadline)


def initial_weights(model: ModelConfig, lineage: int = 0) -> WeightSnapshot:
    """Return the model's directory as step 0. Its path is absolute, since servers may run in another directory."""
    return WeightSnapshot(directory=str(Path(local_path(model.model)).absolute()), version=WeightVersion(lineage, 0))
