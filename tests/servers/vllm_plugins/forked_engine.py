"""A vLLM plugin: the engine's process is forked from the server's, as it is on a GPU, and not spawned.

A spawned one imports all of vLLM a second time, which is half of what a server of a tiny model costs to start.
"""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    from vllm.platforms.cpu import CpuPlatform

    settle = CpuPlatform.check_and_update_config.__func__

    def settle_and_fork(cls: type[CpuPlatform], config: Any) -> None:
        settle(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # it has set this to "spawn"

    CpuPlatform.check_and_update_config = classmethod(settle_and_fork)
