"""The settings of any server process to start: its interpreter, its environment, and the machine that it runs on."""

from __future__ import annotations

import os
import shutil
from typing import Self

import pydantic
from pydantic import Field

from spot_async.base.addresses import LOOPBACK
from spot_async.base.processes.far_side import is_variable_name
from spot_async.base.processes.gpus import VISIBLE
from spot_async.base.secrets import SHORTEST, is_secret_variable
from spot_async.config import PositiveFloat, Section
from spot_async.errors import ConfigError

from .connection import read_secret, read_variable
from .far_side import FarSide, check_prefix


class ProcessSettings(Section):
    """The settings of a server process, on this machine or on the far side of a prefix."""

    python: str = Field(
        description="interpreter of the environment that the server is installed in, where the server runs"
    )
    prefix: list[str] = Field(
        [],
        description="command that runs another command where the server belongs, such as `[ssh, node2]`, "
        "`[srun, --overlap, -N1, -n1, -w, node2]` or `[docker, run, --rm, -i, IMAGE]`; default: this machine",
    )
    resources: dict[str, PositiveFloat] = Field(
        {},
        description="with `cluster.kind: ray`: what the server takes of a node, by Ray's names, such as "
        "`{GPU: 1, CPU: 4}`; Ray chooses the node",
    )
    host: str = Field(
        LOOPBACK,
        min_length=1,
        description="with prefix: address that the server listens on and is asked at; other than loopback is open to "
        "all who reach it",
    )
    port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="port to listen on; default: a private socket (vLLM without prefix), else a free one",
    )
    environment: dict[str, str] = Field(
        {},
        description="further environment variables; no secrets, since these are saved: see pass_environment",
    )
    pass_environment: list[str] = Field(
        [],
        description="names of this process's variables that the server gets too; by itself it gets all but those that "
        "hold keys, and none with prefix; their values are not saved",
    )
    start_timeout_s: PositiveFloat = Field(600.0, description="longest time until the server answers")
    heartbeat_timeout_s: PositiveFloat = Field(
        60.0, description="with prefix: the server ends when its machine has heard nothing of the run for so long"
    )

    @pydantic.model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.resources:
            for name in ("prefix", "host"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}: Ray chooses the node of a server with resources: remove one of them")
        elif not self.prefix:
            if self.host != LOOPBACK:
                raise ValueError("host: only with prefix: a server on this machine listens on loopback")
        elif not self.prefix[0]:
            raise ValueError("prefix: its first word is empty: name a program")
        if wrong := [name for name in [*self.environment, *self.pass_environment] if not is_variable_name(name)]:
            raise ValueError(f"environment: {wrong[0]!r} is no name of a variable")
        return self

    @property
    def is_elsewhere(self) -> bool:
        """Whether a prefix or Ray starts the server, perhaps on another machine."""
        return bool(self.prefix or self.resources)

    @property
    def address(self) -> str:
        """Return the host as URLs have it."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def interpreter(self) -> str | None:
        """Return the interpreter's path; None if there is none. What the far side has is not known here."""
        if self.is_elsewhere:
            return self.python
        return shutil.which(os.path.expanduser(self.python))  # noqa: PTH111 - no Path: it may be a name in PATH

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables that the settings give the server."""
        return self.environment

    @property
    def far_side(self) -> FarSide | None:
        """Return whom to ask about the far side; None without a prefix."""
        if not self.prefix:
            return None
        return FarSide(tuple(self.prefix), self.interpreter or "", self.environment, self.ray_node)

    @property
    def ray_node(self) -> str | None:
        """Return the address where Ray has placed the server; None if it has not."""
        return self.host if self.prefix and self.resources else None

    def passed_environment(self, section: str) -> dict[str, str]:
        """Return the variables of `pass_environment`. Raises ConfigError for one that is not set."""
        return {
            name: (read_secret if is_secret_variable(name, os.environ.get(name, "")) else read_variable)(section, name)
            for name in self.pass_environment
        }

    @property
    def passed_secrets(self) -> list[str]:
        """Return the values of `pass_environment` that a log must not show."""
        found = ((name, os.environ.get(name, "")) for name in self.pass_environment)
        return [value for name, value in found if len(value) >= SHORTEST and is_secret_variable(name, value)]

    def check_gpus_of_ray(self, needed: int) -> None:
        """Raise ValueError if Ray places the server, which needs GPUs, and is not asked for any."""
        if self.resources and "GPU" not in self.resources:
            raise ValueError(
                f"resources: without GPU Ray hides its node's GPUs from the server: add GPU: {needed}, or for a server "
                f'on the CPU environment: {{{VISIBLE}: ""}}'
            )

    def check_machine(self, section: str) -> None:
        """Check the interpreter or the prefix, as `BackendSettings.check_machine`."""
        if self.interpreter is None:
            raise ConfigError(
                f"{section}.python: no interpreter {self.python!r}; give that of the environment with the server"
            )
        if self.prefix:
            check_prefix(self.prefix, section)
        self.passed_environment(section)
