"""What this machine has for the experiments, and why it has not what one needs.

`python -m gpu_proof.machine` prints it as JSON, from a process of its own: torch's context would take memory of a card.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Machine:
    cards: tuple[str, ...] = ()  # names of those that torch sees
    memory_gib: float = 0.0  # of the first
    torch: str = ""
    cuda: str = ""  # that torch was built for
    driver: str = ""
    nccl: str = ""
    processor: str = ""
    python: str = ""
    commit: str = ""

    @property
    def words(self) -> str:
        cards = f"{len(self.cards)} x {self.cards[0]}, {self.memory_gib:.0f} GiB" if self.cards else "no CUDA device"
        versions = [f"driver {self.driver}" if self.driver else "", f"torch {self.torch}"]
        versions += [f"CUDA {self.cuda}" if self.cuda else "no CUDA", f"NCCL {self.nccl}" if self.nccl else ""]
        return ", ".join([cards, *(each for each in versions if each), f"Python {self.python}"])


def look() -> Machine:
    """Look at this machine. Imports torch."""
    import torch

    from spot_async.base.processes.gpus import GpuSoftware
    from spot_async.base.processes.resources import cpu_type

    software = GpuSoftware.found()
    there = torch.cuda.is_available()
    count = torch.cuda.device_count() if there else 0
    return Machine(
        cards=tuple(torch.cuda.get_device_name(each) for each in range(count)),
        memory_gib=torch.cuda.get_device_properties(0).total_memory / (1 << 30) if count else 0.0,
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        driver=software.driver or "",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if count else "",
        processor=cpu_type(),
        python=platform.python_version(),
        commit=commit(),
    )


def commit() -> str:
    """Return the checkout's commit, with a `+` if files were changed; "unknown" where there is no git."""
    try:
        words = [["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]]
        head, changes = (
            subprocess.run(["git", *each], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for each in words
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changes else "")


def found() -> Machine:
    """Return what `look` sees in a process of its own."""
    command = [sys.executable, "-m", "gpu_proof.machine"]
    said: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return Machine(**{**said, "cards": tuple(said["cards"])})


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dataclasses.asdict(look())))
