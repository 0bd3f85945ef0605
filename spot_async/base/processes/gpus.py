"""What this machine's GPUs are, and what torch can do with them, without importing torch, which would take seconds."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# Devices behind which GPUs cannot be counted so: of AMD, of Windows below Linux, of Jetson boards.
UNCOUNTED = ("kfd", "dxg", "nvgpu")
VISIBLE = "CUDA_VISIBLE_DEVICES"
MIG = "MIG-"  # the names of parts of a divided GPU (multi-instance GPU) begin so
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
WITHOUT_GPUS = "no CUDA"
FIELDS = "index,uuid,memory.total,memory.free,mig.mode.current"
QUERY = ("nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")
QUERY_TIMEOUT_S = 30.0
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}  # by the major version of CUDA (its release notes)
# Dense operations a second in bfloat16, by what drivers call the cards (NVIDIA's data sheets). An A800 computes as an
# A100 does. An H100 for PCIe computes less, and so does a part of a card (MIG).
OPERATIONS_PER_S = {
    r"A[18]00(-SXM4-[48]0GB|-PCIE-40GB| 80GB PCIe)": 312e12,
    r"H100 80GB HBM3|H800": 989e12,
    r"H200": 989e12,
    r"B200": 2250e12,
}


def operations_per_s(name: str) -> float | None:
    """Return what a device of this name computes, by its data sheet; None if it is not known."""
    found = (rate for names, rate in OPERATIONS_PER_S.items() if re.fullmatch(rf"(NVIDIA )?({names})", name))
    return next(found, None)


def gpu_count(devices: Path = Path("/dev")) -> int | None:
    """Return how many GPUs this machine has; None where files do not tell."""
    if any((devices / name).exists() for name in UNCOUNTED):
        return None
    return sum(re.fullmatch(r"nvidia\d+", each.name) is not None for each in devices.glob("nvidia*"))


def named_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """Return the devices that `CUDA_VISIBLE_DEVICES` leaves to this command; None: all."""
    value = environ.get(VISIBLE)
    return None if value is None else [each.strip() for each in value.split(",") if each.strip()]


def visible_gpus(environ: Mapping[str, str], machine: int) -> int:
    """Return how many of the machine's GPUs the environment leaves to a process."""
    named = named_gpus(environ)
    return machine if named is None else min(machine, len(named))


def has_instances(named: Iterable[str]) -> bool:
    """Return whether there are instances of MIG among devices. CUDA shows a process the first of them alone."""
    return any(each.startswith(MIG) for each in named)


def physical_gpus(devices: str, environ: Mapping[str, str]) -> str:
    """Return what a server's `CUDA_VISIBLE_DEVICES` must be, so that its numbers count as those of the ranks do.

    Ranks inherit the variable of this command, and count inside it: device 0 is the first that it names. Raises
    ValueError for a number that it does not reach. Names, such as `GPU-8f3c`, stay as they are.
    """
    named = named_gpus(environ)
    if named is None:
        return devices
    physical = []
    for device in map(str.strip, devices.split(",")):
        if device.isdecimal() and int(device) >= len(named):
            raise ValueError(
                f"names GPU {device}, but {VISIBLE}={environ[VISIBLE]} of this command leaves it "
                + (f"{len(named)}, counted from 0" if named else "none")
                + f": name one of those, or change {VISIBLE}"
            )
        physical.append(named[int(device)] if device.isdecimal() else device)
    return ",".join(physical)


class GpuMemory(NamedTuple):
    """A GPU's memory, and the part of it that no process has."""

    total_gib: float
    free_gib: float
    is_divided: bool = False  # by MIG: a process gets an instance, which has less


@functools.cache
def gpu_memory() -> Mapping[int, GpuMemory]:
    """Return the memory of the GPUs that this command may use, numbered as its ranks and servers count them.

    Asked once, so before anything of ours is there. Empty where `nvidia-smi` is not installed or has no answer.
    """
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return read_gpu_memory(done.stdout, os.environ)


def read_gpu_memory(reply: str, environ: Mapping[str, str]) -> dict[int, GpuMemory]:
    """Read what `nvidia-smi` replies. A line without numbers, as of a MIG device, is left out."""
    found = {}
    for line in reply.splitlines():
        if (values := re.fullmatch(r"(\d+), ([^,]+), (\d+), (\d+)(?:, (.*))?", line.strip())) is not None:
            index, uuid, total_mib, free_mib, mig = values.groups()
            found[index] = found[uuid] = GpuMemory(int(total_mib) / 1024, int(free_mib) / 1024, mig == "Enabled")
    named = named_gpus(environ)
    if named is None:
        named = [each for each in found if each.isdecimal()]
    return {number: found[each] for number, each in enumerate(named) if each in found}


def instance_refusal(ranks: int) -> str:
    """Return why several ranks cannot train on instances of MIG."""
    return (
        f"training.ranks={ranks}: the GPU is divided by MIG, where a process sees one instance and NCCL connects none: "
        f"set training.ranks=1, or give {VISIBLE} whole GPUs"
    )


def torch_has_gpus() -> bool:
    """Return whether torch was built for CUDA or ROCm. Where that is not known, the process that needs it finds out."""
    return _of_torch()[1] != WITHOUT_GPUS


def _of_torch() -> tuple[str, str | None]:
    """Return torch's version, and what it was built for, such as `CUDA 13.0`; None if it is not known."""
    spec = importlib.util.find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin is not None else None
    if path is None or not path.is_file():
        return "unknown", None
    found = dict(re.findall(r"^(__version__|cuda|hip)\b.*= '(.+)'", path.read_text(encoding="utf-8"), re.MULTILINE))
    platforms = [f"{name} {found[key]}" for key, name in (("cuda", "CUDA"), ("hip", "ROCm")) if key in found]
    return found.get("__version__", "unknown"), platforms[0] if platforms else WITHOUT_GPUS


@dataclass(frozen=True)
class GpuSoftware:
    """The versions that decide whether torch can use GPUs."""

    torch: str
    platform: str | None  # such as `CUDA 13.0`
    driver: str | None  # NVIDIA's
    nccl: str | None
    has_varlen: bool = False  # attention to all documents of a row in one call

    @classmethod
    def found(cls, driver: Path = DRIVER_VERSION) -> GpuSoftware:
        """Look at this environment's torch and this machine's driver."""
        text = driver.read_text(encoding="utf-8") if driver.is_file() else ""
        version = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
        spec = importlib.util.find_spec("torch")
        kernels = Path(spec.origin).parent / "nn/attention/varlen.py" if spec and spec.origin else None
        has_varlen = kernels is not None and kernels.is_file()
        return cls(*_of_torch(), version.group(1) if version else None, nccl_version(), has_varlen)

    @property
    def words(self) -> str:
        driver = f"NVIDIA driver {self.driver}" if self.driver else "no NVIDIA driver"
        nccl = f"NCCL {self.nccl}" if self.nccl else "no NCCL"
        return f"torch {self.torch}, {self.platform or 'CUDA unknown'}, {driver}, {nccl}"

    @property
    def remedy(self) -> str:
        """What to do where torch finds no GPU."""
        if self.platform == WITHOUT_GPUS:
            return "install a torch with CUDA"
        oldest = self.oldest_driver
        if oldest is not None and self.driver is not None and int(self.driver.split(".")[0]) < oldest:
            return f"{self.platform} needs driver {oldest} or newer: update it, or install a torch for an older CUDA"
        return f"give it GPUs ({VISIBLE}, the job's request)"

    @property
    def oldest_driver(self) -> int | None:
        """The major version of the oldest driver that torch's CUDA runs on; None if it is not known."""
        found = re.match(r"CUDA (\d+)", self.platform or "")
        return OLDEST_DRIVERS.get(int(found.group(1))) if found else None

    def refusal(self, needs_gpu: str) -> str:
        """Return why training must not begin on the CPU, where `needs_gpu` says what asks for a GPU."""
        return (
            f"{needs_gpu}, but torch finds no GPU for the trainer ({self.words}): {self.remedy}, or set "
            "training.device=cpu"
        )


@functools.cache
def nccl_version() -> str | None:
    """Return the version of the NCCL that is installed beside torch; None if it brings its own, or has none."""
    names = (each for each in importlib.metadata.distributions() if (each.name or "").startswith("nvidia-nccl-cu"))
    return next((each.version for each in names), None)
