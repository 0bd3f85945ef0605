"""The settings of servers that may serve a student: they can sleep while the trainer works, and accept new weights."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import httpx
import pydantic
from pydantic import Field

from spot_async.base.processes.gpus import nccl_version
from spot_async.config import as_list
from spot_async.errors import ConfigError

from .adapter_settings import AdapterSettings
from .launch import installed_nccl
from .sleeping import SleepSettings
from .weight_transport import WeightSettings, check_reachable


class StudentServerSettings(AdapterSettings, SleepSettings):
    """The settings that the backends for vLLM and SGLang have in common."""

    weights: WeightSettings = Field(WeightSettings(), description="how new weights reach a student's server")

    @pydantic.model_validator(mode="after")
    def _check_weights(self) -> Self:
        hosts = [httpx.URL(url).host for url in as_list(self.url)] + [each.host for each in as_list(self.launch)]
        check_reachable(self.weights, hosts, servers=len(self.servers()))
        if self.weights.by_nccl:
            self._check_sender()
        return self

    def _check_sender(self) -> None:
        """Raise ValueError if the sender would be on a device of a server's: NCCL takes each device once."""
        device = self.weights.sender_device
        _, _, number = device.partition(":")
        remedy = "set weights.device to a GPU that no server uses, or weights.transport=disk"
        if self.sleep_while_training and self.weights.device is None:
            raise ValueError(
                f"weights.transport=distributed with sleep_while_training: the servers share the trainer's GPUs, and "
                f"NCCL refuses a sender on one of theirs, as {device} would be: {remedy}"
            )
        for launch in as_list(self.launch):
            if launch.is_elsewhere:
                continue
            devices = launch.devices or ",".join(map(str, range(launch.tensor_parallel_size)))
            if (number or "0") in map(str.strip, devices.split(",")):
                raise ValueError(
                    f"weights.device={device}: the server on launch.devices={devices} uses this GPU, and NCCL takes "
                    f"each once: {remedy}"
                )

    def check_installed(self, section: str) -> None:
        """Also compare NCCL of the sender, which is this environment's, with NCCL of the servers."""
        super().check_installed(section)
        ours = nccl_version()
        if not self.weights.by_nccl or ours is None:
            return
        for key, each in self._launches():
            theirs = None if each.resources and not each.prefix else installed_nccl(each)
            if theirs is not None and theirs != ours:
                raise ConfigError(
                    f"{section}.weights.backend=nccl: the sender has NCCL {ours}, and the server of {section}.{key} "
                    f"has {theirs} ({each.python}), which refuse each other: install the same version in both "
                    "environments, or set weights.transport=disk"
                )

    @property
    def takes_adapters(self) -> bool:
        return self.weights.transport == "adapter"

    def reads(self, role: str, run_directory: Path) -> Path | None:
        """Return the directory that a server must see because its new weights are written there, if there is one."""
        return run_directory if role == "student" and self.weights.transport != "distributed" else None
