"""The settings of inference servers that talk JSON: where they run, what they cost, and how a student's get weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Self

import httpx
import pydantic
from pydantic import Field

from spot_async.base.processes.gpus import nccl_version
from spot_async.config import (
    BackendSettings,
    NonNegativeFloat,
    OneOrMore,
    Place,
    PluginSettings,
    PositiveFloat,
    PositiveInt,
    as_list,
)
from spot_async.errors import ConfigError
from spot_async.spending.account import Account
from spot_async.spending.prices import Prices

from .connection import (
    Url,
    access,
    address_of,
    check_different,
    check_headers,
    check_proxy,
    read_secret,
    tls_context,
)
from .http import HttpEndpoint, ReadError, Route
from .launch import Assignment, check_installed
from .launch_settings import LaunchSettings, ProcessSettings, check_together
from .weight_transport import WeightSettings, check_reachable


class EndpointSettings(PluginSettings):
    """How requests reach a server that is running, and how many of them, at which price, a run may send."""

    requests_per_minute: PositiveFloat | None = Field(
        None, description="most requests that all stages and servers of the role may send together"
    )
    prices: Prices | None = Field(
        None, description="what requests cost, for spending.jsonl, the estimate and the budget"
    )
    budget: PositiveFloat | None = Field(
        None, description="money that the run may spend here; it ends cleanly before a request that might cost more"
    )

    api_key_env: str | None = Field(
        None, description="environment variable with the server's key; default under launch: a random one"
    )
    headers: dict[str, str] = Field({}, description="further request headers; no secrets here")
    secret_headers: dict[str, str] = Field(
        {}, description="request headers, each with the environment variable that holds its value"
    )
    proxy: str | None = Field(None, description="proxy's URL; default: that of HTTPS_PROXY or HTTP_PROXY")
    ca_certificates: str | None = Field(
        None, description="file of the certificates to trust; default: SSL_CERT_FILE, else the usual ones"
    )

    def api_key(self, section: str) -> str | None:
        """Return the key that the environment holds; None if no variable is named. `section` is for errors."""
        return None if self.api_key_env is None else read_secret(section, self.api_key_env)

    def endpoint(
        self,
        name: str,
        section: str,
        url: str,
        *,
        route: Route,
        api_key: str | None,
        headers: Mapping[str, str] = MappingProxyType({}),
        read_error: ReadError | None = None,
    ) -> HttpEndpoint:
        """Return the connection pool to a server, to be entered, with `headers` besides those of the settings.

        `name` is the server's in messages, and `section` the key of these settings.
        """
        return HttpEndpoint(
            name,
            url,
            route=dataclasses.replace(
                route,
                verify=tls_context(section, self.ca_certificates),
                access=access(section, url, self.api_key_env, self.secret_headers),
            ),
            api_key=api_key,
            headers={**self.headers, **headers},
            secret_headers={name: read_secret(section, each) for name, each in self.secret_headers.items()},
            read_error=read_error,
        )

    def check_machine(self, section: str) -> None:
        super().check_machine(section)
        for variable in filter(None, [self.api_key_env, *self.secret_headers.values()]):
            read_secret(section, variable)

    def _check(self) -> None:
        if self.budget is not None and self.prices is None:
            raise ValueError(f"budget={self.budget:g} needs prices: without them nothing is known to cost anything")

    _check_proxy = pydantic.field_validator("proxy")(check_proxy)
    _check_headers = pydantic.field_validator("headers")(check_headers)


class PlacedSettings(BackendSettings):
    """The settings of servers that run at a url or, where there is a key `launch`, that we start."""

    url: OneOrMore[Url] | None = Field(
        None, description="address of a running server, such as http://10.0.0.5:8000; a list for several"
    )

    @property
    def where(self) -> str | ProcessSettings:
        """Where the only server is: its address, or how to start it. Raises `ConfigError` if there are several."""
        places = self._places
        if len(places) != 1:
            raise ConfigError(f"url, launch: {len(places)} servers in place of one: give one, or each its own settings")
        return places[0]

    @property
    def _places(self) -> list[str | ProcessSettings]:
        return [*as_list(self.url), *(each for _, each in self._launches())]

    def _launches(self) -> Iterator[tuple[str, ProcessSettings]]:
        """Yield each server to start, with its key."""
        launch = getattr(self, "launch", None)
        for number, each in enumerate(as_list(launch)):
            yield f"launch.{number}" if isinstance(launch, list) else "launch", each

    @property
    def is_attached(self) -> bool:
        """Whether the servers were already running, so that they may hold any weights."""
        return self.url is not None

    def servers(self) -> Sequence[Self]:
        key = "url" if self.is_attached else "launch"
        return self.numbered([{key: each} for each in self._places])

    @property
    def place(self) -> Place | None:
        where = self.where
        if isinstance(where, str):
            return Place(f"url={where}", address_of(where), is_attached=True)
        return Place(f"launch.port={where.port}", f"{where.address}:{where.port}") if where.port is not None else None

    @property
    def runs_here(self) -> bool:
        return super().runs_here and not (isinstance(self.where, ProcessSettings) and self.where.is_elsewhere)

    def assignment(self, role: str, section: str, model: Path, run_directory: Path) -> Assignment:
        """Return what the only server is started for, if it is. `section` is the key of what starts it."""
        name = self.server_name(role)
        return Assignment(
            role,
            section,
            name,
            model,
            run_directory / "logs" / f"{name}.log",
            reads=self.reads(role, run_directory),
            cores=self.cores,
            start_timeout_s=self.start_timeout_s,
        )

    def reads(self, role: str, run_directory: Path) -> Path | None:
        """Return the directory that a server must see because its new weights are written there, if there is one."""
        return run_directory if self.takes_weights(role) else None

    def check_machine(self, section: str) -> None:
        super().check_machine(section)
        for key, each in self._launches():
            each.check_machine(f"{section}.{key}")

    @pydantic.field_validator("url")
    @classmethod
    def _check_urls(cls, url: str | list[str] | None) -> str | list[str] | None:
        check_different(as_list(url))
        return url


class AttachedSettings(EndpointSettings, PlacedSettings):
    """The settings of servers that are already running, for any API. All of a role share one account."""

    tokens_per_minute: PositiveFloat | None = Field(
        None,
        description="most tokens of prompts and responses; until it is there, a response counts as its limit",
    )
    token_budget: PositiveInt | None = Field(None, description="a budget in tokens, of prompts and responses")
    served_model: str | None = Field(None, description="model name in requests; default: the only model that it serves")
    top_k: PositiveInt | None = Field(
        None, description="log-probabilities asked for at each scored position; more tighten entropy bounds"
    )
    logprob_noise_nats: NonNegativeFloat | None = Field(
        None,
        description=("99.9 % of log-probabilities differ by less between two computations of a row; default: measured"),
    )

    def open_account(self, role: str) -> Account:
        return Account(
            role,
            prices=self.prices,
            budget=self.budget,
            token_budget=self.token_budget,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
        )


class StudentServerSettings(AttachedSettings):
    """The settings of servers that are running or that we start, and that may serve a student."""

    PACKAGE: ClassVar[str | None] = None  # module that a started server's interpreter must be able to import

    launch: OneOrMore[LaunchSettings] | None = Field(
        None, description="a server to start; a list for several; exclusive with url"
    )
    sleep_while_training: bool = Field(
        False,
        description="the server frees its device memory while the trainer, on the same devices, trains",
    )
    sleep_while_others_answer: bool = Field(
        False,
        description="a teacher's server frees its device memory while another's, on the same devices, answers",
    )
    weights: WeightSettings = Field(WeightSettings(), description="how new weights reach a student's server")

    @property
    def sleeps(self) -> bool:
        return self.sleep_while_training or self.sleep_while_others_answer

    @pydantic.field_validator("launch")
    @classmethod
    def _check_launches(
        cls, launch: LaunchSettings | list[LaunchSettings] | None
    ) -> LaunchSettings | list[LaunchSettings] | None:
        servers = [server for each in as_list(launch) for server in each.servers()]
        check_together(servers)
        return servers if len(servers) > 1 else launch

    def _check(self) -> None:
        super()._check()
        if (self.url is None) == (self.launch is None):
            raise ValueError("give exactly one of url (a running server) and launch (one to start)")
        hosts = [httpx.URL(url).host for url in as_list(self.url)] + [each.host for each in as_list(self.launch)]
        check_reachable(self.weights, hosts, servers=len(self.servers()))
        if self.weights.by_nccl:
            self._check_sender()

    def _check_sender(self) -> None:
        """Raise ValueError if the sender would be on a device of a server's: NCCL takes each device once."""
        device = self.weights.device
        _, _, number = device.partition(":")
        remedy = "set weights.device to a GPU that no server uses, or weights.transport=disk"
        if self.sleep_while_training and "device" not in self.weights.model_fields_set:
            raise ValueError(
                f"weights.transport=distributed with sleep_while_training: the servers share the trainer's GPUs, and "
                f"NCCL refuses a sender on one of theirs, as {device} would be: {remedy}"
            )
        for launch in as_list(self.launch):
            if launch.is_elsewhere:
                continue
            devices = launch.device_names if launch.devices else [*map(str, range(launch.tensor_parallel_size))]
            if (number or "0") in devices:
                raise ValueError(
                    f"weights.device={device}: the server on launch.devices={','.join(devices)} uses this GPU, and "
                    f"NCCL takes each once: {remedy}"
                )

    def check_installed(self, section: str) -> None:
        """Also compare NCCL of the sender, which is this environment's, with NCCL of the servers."""
        ours = nccl_version() if self.weights.by_nccl else None
        for key, each in self._launches():
            found = check_installed(each, f"{section}.{key}", self.PACKAGE)
            theirs = found.nccl if found is not None else None
            if None not in (ours, theirs) and theirs != ours:
                raise ConfigError(
                    f"{section}.weights.device={self.weights.device}: the sender has NCCL {ours}, and the server of "
                    f"{section}.{key} has {theirs} ({each.python}), which refuse each other: install the same version "
                    "in both environments, or set weights.transport=disk"
                )

    @property
    def takes_adapters(self) -> bool:
        return self.weights.transport == "adapter"

    def reads(self, role: str, run_directory: Path) -> Path | None:
        return super().reads(role, run_directory) if self.weights.transport != "distributed" else None
