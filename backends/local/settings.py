"""The settings of our own servers, and the command that starts one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from spot_async.base.processes.gpus import torch_has_gpus
from spot_async.config import OneOrMore, Place, PositiveInt, Section, as_list
from spot_async.errors import ConfigError
from spot_async.serving.api import Credentials
from spot_async.serving.settings import EngineSettings

from ..shared.connection import Url
from ..shared.launch import Command, Doorway, check_installed, is_free
from ..shared.launch_settings import ProcessSettings
from ..shared.settings import PlacedSettings

PACKAGE = "spot_async"


class LocalLaunch(ProcessSettings):
    """The settings of a server of ours to start on the far side of a prefix."""

    python: str = Field(
        "", description="interpreter of an environment with spot-async, where the server runs; default: as the run's"
    )

    @property
    def interpreter(self) -> str | None:
        return super().interpreter if self.python else sys.executable

    def _check(self) -> None:
        super()._check()
        if not self.is_elsewhere:
            raise ValueError("prefix: required here, or resources: without launch the server starts on this machine")


class LocalWeights(Section):
    """How new weights reach the servers of a student."""

    transport: Literal["disk", "adapter"] = Field(
        "disk",
        description="disk: servers read the published directory; adapter: they read the adapter alone (needs "
        "`training.lora`)",
    )


class LocalSettings(EngineSettings, PlacedSettings):
    """The settings of one or several of our own servers."""

    kind: str = "local"
    replicas: PositiveInt = Field(1, description="servers to start, all alike")
    port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="loopback port, with $SPOT_ASYNC_API_KEY or a random key; default: a private Unix socket",
    )
    url: OneOrMore[Url] | None = Field(
        None,
        description="address of a running `spot-async serve`, such as http://10.0.0.5:8000; a list for several; "
        "its key is $SPOT_ASYNC_API_KEY",
    )
    launch: OneOrMore[LocalLaunch] | None = Field(
        None, description="where a server is started if not on this machine; a list for several"
    )
    weights: LocalWeights = Field(LocalWeights(), description="how new weights reach a student's server")

    @property
    def takes_adapters(self) -> bool:
        return self.weights.transport == "adapter"

    @property
    def _here(self) -> bool:
        """Whether the servers are started on this machine, without `launch`."""
        return self.url is None and self.launch is None

    @property
    def _places(self) -> list[str | ProcessSettings]:
        return (super()._places or [ProcessSettings(python=sys.executable, port=self.port)]) * self.replicas

    def servers(self) -> Sequence[Self]:
        if self.is_attached or isinstance(self.launch, list):
            return super().servers()
        return self.numbered([{"replicas": 1}] * self.replicas)

    @property
    def place(self) -> Place | None:
        found = super().place
        return found and found._replace(setting=found.setting.removeprefix("launch.")) if self._here else found

    def check_machine(self, section: str) -> None:
        super().check_machine(section)
        if not self._here:
            return
        if self.device.startswith("cuda") and not torch_has_gpus():
            raise ConfigError(
                f"{section}.device={self.device}: the torch installed here was built without CUDA: set it to cpu, or "
                "install torch from an index with CUDA builds"
            )
        if self.port is not None and not is_free(self.port):
            raise ConfigError(f"{section}.port={self.port}: in use by another process: choose another")

    def check_installed(self, section: str) -> None:
        for key, each in self._launches():
            check_installed(each, f"{section}.{key}", PACKAGE)

    def _check(self) -> None:
        super()._check()
        if self.port is not None and self.replicas > 1:
            raise ValueError(
                f"port={self.port}: one port for {self.replicas} servers (replicas): remove it, for private sockets"
            )
        if self.launch is not None and self.port is not None:
            raise ValueError(f"port={self.port}: with launch it is launch.port")
        if self.replicas > 1 and (len(as_list(self.launch)) > 1 or any(each.port for each in as_list(self.launch))):
            raise ValueError(f"replicas={self.replicas}: with several launches, or a launch.port, each is one server")
        if self.device.startswith("cuda"):
            for each in as_list(self.launch):
                each.check_gpus_of_ray(1)
        if self.url is not None:
            for name in ("replicas", "port", "launch", *EngineSettings.model_fields):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}: says how a server is started, but that at url runs already: remove one")


def local_command(
    launch: ProcessSettings, model: Path, doorway: Doorway, *, settings: LocalSettings, credentials: Credentials
) -> Command:
    """Return the command for a server on a Unix socket, or on a port if one is given or a prefix starts it."""
    is_here = not launch.is_elsewhere
    uds = doorway.uds if is_here and launch.port is None else None
    engine = {f"--{name.replace('_', '-')}": getattr(settings, name) for name in EngineSettings.model_fields}
    return Command(
        [
            *(launch.python, "-m", "spot_async.serving", str(model)),
            *(("--host", doorway.host, "--port", str(doorway.port)) if uds is None else ("--uds", uds)),
            *(text for option, value in engine.items() if value is not None for text in (option, str(value))),
        ],
        {"OMP_NUM_THREADS": str(settings.threads), **credentials.environment},
        package=None if is_here else PACKAGE,
        uds=uds,
        is_ours=is_here,
    )
