"""Starts a node's ranks as child processes of the orchestrator or of a joined node, and ends them together.

It tells ranks their places by variables, as `torchrun` would. Nothing listens on the network. When a rank ends, the
others are ended too, and the log's last line says which one was first, and how.

Nodes do not meet here. Each knows its own ranks. They are never restarted: then all nodes begin again (`nodes/`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from spot_async.base.addresses import LOOPBACK, group_interfaces, own_address_towards
from spot_async.base.processes.child import ChildProcess
from spot_async.base.tasks import Opened, gather, settle
from spot_async.errors import ProcessDiedError
from spot_async.trainer.messages import NODES_VARIABLE, STORE_PORT_VARIABLE
from spot_async.trainer.nodes.topology import Topology
from spot_async.trainer.settings import TrainerSettings

# Of torch's allocator: with either the user has decided. torch before 2.9 reads the first alone.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"  # where torch's `record` writes what a rank raised


@dataclass(frozen=True)
class Meeting:
    """How the ranks of this node meet those of others."""

    topology: Topology
    store_port: int  # of loopback, where ranks reach the process group's store

    @property
    def variables(self) -> dict[str, str]:
        """Return what ranks are told of it."""
        return {
            NODES_VARIABLE: str(self.topology.nodes),
            STORE_PORT_VARIABLE: str(self.store_port),
            **group_interfaces(own_address_towards(self.topology.address)),
        }


@dataclass(eq=False)
class RankProcesses(Opened):
    """The ranks of this node. Entering starts them, and leaving ends them."""

    settings: TrainerSettings
    settings_path: Path
    channel_directory: str
    log_path: Path
    _: KW_ONLY
    cores: Collection[int] | None = None
    meeting: Meeting | None = None  # None: all ranks of the run are on this node
    _ranks: list[ChildProcess] = field(default_factory=list, init=False)
    _first_end: str | None = field(default=None, init=False)

    async def _open(self, stack: AsyncExitStack) -> None:
        ranks = count = self.settings.training.ranks
        first, places = 0, group_interfaces(LOOPBACK)
        if self.meeting is not None:
            count = ranks // self.meeting.topology.nodes
            first, places = count * self.meeting.topology.node_rank, self.meeting.variables
        common = {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),  # as `torchrun`
            **of_allocator(os.environ),
            **places,
            "OMP_NUM_THREADS": str(self.settings.training.threads),
            "WORLD_SIZE": str(ranks),
        }
        stack.push_async_callback(self._stop)
        for number in range(count):
            own = {"RANK": str(first + number), "LOCAL_RANK": str(number)}
            own[ERROR_FILE_VARIABLE] = str(self._error_file(number))
            child = await ChildProcess.start(
                f"rank {first + number}",
                [sys.executable, "-m", "spot_async.trainer", str(self.settings_path), self.channel_directory],
                log_path=self.log_path,
                environment=common | own,
                cores=self.cores,
            )
            self._ranks.append(child)

    async def watch(self) -> None:
        """Return when the ranks were stopped on purpose. Raises `ProcessDiedError` once one has ended by itself."""
        try:
            await gather(each.watch() for each in self._ranks)
        except ProcessDiedError:
            if self._first_end is None:
                self._first_end = self._describe_first()
                with suppress(OSError), self.log_path.open("a") as log:
                    log.write(f"{self._first_end}\n")
            await self._stop()
        if self._first_end is not None:  # also for whoever asks later, when all were stopped
            raise ProcessDiedError(self._first_end)

    async def _stop(self) -> None:
        """End all ranks at once. Whatever they have published is complete, and a frozen one hears no other signal."""
        await settle(each.stop(grace_s=0.0) for each in self._ranks)

    def _describe_first(self) -> str:
        """Say in one line which rank failed first, and how.

        A killed rank makes the others raise. So of several that have ended one that was killed was first.
        """
        ended = [(number, code) for number, each in enumerate(self._ranks) if (code := each.returncode) is not None]
        number, code = min(ended, key=lambda each: each[1] >= 0)
        return self._ranks[number].describe_end(code, self._raised(number))

    def _raised(self, number: int) -> str | None:
        """Return the first line of what a rank raised: in the log others may have written after it."""
        with suppress(FileNotFoundError):
            text: str = json.loads(self._error_file(number).read_bytes())["message"]["message"]
            return text.splitlines()[0]
        return None

    def _error_file(self, number: int) -> Path:
        return Path(self.channel_directory) / f"error-{number}.json"


def of_allocator(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which ranks keep little of a GPU that they do not use: segments grow, without gaps.

    It is theirs alone. Servers that sleep have memory pools of their own, with which such segments may conflict.
    """
    if any(name in environ for name in ALLOCATOR_VARIABLES):
        return {}
    return {ALLOCATOR_VARIABLES[0]: "expandable_segments:True"}
