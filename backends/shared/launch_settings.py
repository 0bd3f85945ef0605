"""The settings of servers to start: interpreter, environment, the machine that they run on, and its devices."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import Annotated, Any, Self

import pydantic
from pydantic import Field

from spot_async.base.addresses import LOOPBACK
from spot_async.base.processes.far_side import is_variable_name
from spot_async.base.processes.gpus import VISIBLE, has_instances, physical_gpus
from spot_async.base.secrets import SHORTEST, is_secret_variable
from spot_async.config import PositiveFloat, PositiveInt, Probability, Section
from spot_async.errors import ConfigError

from .connection import read_secret, read_variable
from .far_side import FarSide, check_prefix

GIB = 1 << 30


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

    def _check(self) -> None:
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
    def far_side(self) -> FarSide:
        """Return whom to ask before a start: the interpreter on the far side of the prefix, or here without one."""
        variables = tuple(sorted(self.environment.items()))
        return FarSide(tuple(self.prefix), self.interpreter or "", variables, self.ray_node)

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
        """Check the prefix and the environment, as `BackendSettings.check_machine`."""
        if self.prefix:
            check_prefix(self.prefix, section)
        self.passed_environment(section)

    def check_interpreter(self, section: str) -> None:
        """Raise ConfigError where this machine does not have the interpreter."""
        if self.interpreter is None:
            raise ConfigError(
                f"{section}.python: no interpreter {self.python!r}; give that of the environment with the server "
                "(docs/servers.md), or the url of one that runs, or kind: local for our own engine"
            )


def _numbers_too(value: Any) -> Any:
    return str(value) if type(value) is int else value  # `devices: 0` is a number to YAML


class LaunchSettings(ProcessSettings):
    """The settings of a server to start. Its environment does not need this package."""

    devices: Annotated[str | None, pydantic.BeforeValidator(_numbers_too)] = Field(
        None,
        description="GPUs of the server, such as `0,1`, counted as the trainer's ranks are: among those that this "
        "command's CUDA_VISIBLE_DEVICES leaves; default: all",
    )
    tensor_parallel_size: PositiveInt = Field(1, description="devices that share the model")
    replicas: PositiveInt = Field(
        1,
        description="so many servers alike, each on its own `tensor_parallel_size` of the `devices`; by default these "
        "are the first ones",
    )
    memory_fraction: Probability | None = Field(
        None,
        description="share of each device's memory that the server takes: weights, workspace and cache; default: the "
        "server's own",
    )
    cache_gib: PositiveFloat | None = Field(
        None,
        description="GiB of each device for keys and values; default: what memory_fraction leaves, where the devices "
        "have numbers, else as the server measures it",
    )
    dtype: str = Field("auto", description="type of weights and activations, as the server spells it")
    arguments: list[str] = Field([], description="further command-line arguments, as the server spells them")

    @property
    def device_names(self) -> list[str]:
        """The devices that the settings name; empty if they name none."""
        return [] if self.devices is None else [each.strip() for each in self.devices.split(",")]

    @property
    def is_narrow(self) -> bool:
        """Whether the server may compute in 16 bits. Its logits, rounded to those, would be up to 0.25 nats off.

        A server in 32 bits changes nothing when it is told to compute them in float32, so `auto` may be either.
        """
        return self.dtype not in ("float32", "float")

    @property
    def variables(self) -> dict[str, str]:
        if self.devices is None:
            return super().variables
        # The far side of a prefix has a variable of its own, which is not known here.
        devices = self.devices if self.is_elsewhere else physical_gpus(self.devices, os.environ)
        return {VISIBLE: devices, **super().variables}

    def check_machine(self, section: str) -> None:
        super().check_machine(section)
        try:
            _ = self.variables
        except ValueError as error:
            raise ConfigError(f"{section}.devices={self.devices} {error}") from None

    def _check(self) -> None:
        super()._check()
        if self.resources and self.devices is not None:
            raise ValueError("devices: Ray chooses the devices of a server with resources: remove one of them")
        if self.environment.get(VISIBLE) != "":  # so a server on the CPU may say
            self.check_gpus_of_ray(self.tensor_parallel_size)
        if self.resources and self.resources.get("GPU", self.tensor_parallel_size) < self.tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} takes as many devices: set resources.GPU to that"
            )
        named = self.device_names
        if twice := next((each for each in named if named.count(each) > 1), None):
            raise ValueError(f"devices={self.devices} names {twice} twice: name each device once")
        if self.tensor_parallel_size > 1 and has_instances(named):
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size}: a process sees one instance of MIG: set it to 1, "
                "or name whole GPUs in devices"
            )
        taken = self.replicas * self.tensor_parallel_size
        if named and 1 < taken != len(named):
            each = f"tensor_parallel_size={self.tensor_parallel_size} takes as many devices"
            words = each if self.replicas == 1 else f"replicas={self.replicas} take {taken} devices"
            raise ValueError(f"{words}, but devices={self.devices} names {len(named)}")

    def servers(self) -> list[Self]:
        """Return the settings of each of the `replicas`, with its own devices. Ray chooses those of `resources`."""
        if self.replicas == 1:
            return [self]
        size = self.tensor_parallel_size
        names = self.device_names or [*map(str, range(self.replicas * size))]
        shares = [",".join(names[first : first + size]) for first in range(0, len(names), size)]
        return [
            self.model_copy(update={"replicas": 1, "devices": None if self.resources else share}) for share in shares
        ]


def check_together(launches: Sequence[LaunchSettings]) -> None:
    """Raise ValueError, with the keys at fault, if one machine has no room for all of the servers.

    If several servers name a device, each must give its share, and the shares may sum to at most 1. Which devices the
    machine has is not known here. So servers pass if none of them names a device. Those of another prefix are taken to
    run on another machine, and Ray gives those that it places their own devices.
    """
    ports = [(each.host, each.port) for each in launches if each.port is not None]
    if twice := sorted({port for host, port in ports if ports.count((host, port)) > 1}):
        raise ValueError(f"port={twice[0]} is given twice: give each server a port of its own, or none for free ones")
    chosen = [each for each in launches if not each.resources]
    for prefix in dict.fromkeys(tuple(each.prefix) for each in chosen):
        _check_devices_of([each for each in chosen if tuple(each.prefix) == prefix])


def _check_devices_of(launches: Sequence[LaunchSettings]) -> None:
    """Check the servers of one machine."""
    names = [each.device_names for each in launches]
    if [] in names and any(names):
        raise ValueError("devices: a server without this key uses all devices: set it for each server, or for none")
    for device in sorted({device for each in names for device in each}):
        shares = [each.memory_fraction for each in launches if device in each.device_names]
        if len(shares) > 1 and sum(share if share is not None else 1.0 for share in shares) > 1.0:
            raise ValueError(
                f"devices: {device} is given to {len(shares)} servers: give each its own devices, or each a "
                "memory_fraction, with a sum of at most 1"
            )
