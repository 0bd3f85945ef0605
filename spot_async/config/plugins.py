"""Sections that belong to plug-ins: the base of their settings, and fields that read them with a plug-in's own schema.

Plug-ins themselves are found by `base/registry.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self

import pydantic
from pydantic import BaseModel, Field, PrivateAttr, SerializeAsAny, ValidationError
from pydantic_core import ErrorDetails

from spot_async.base import registry
from spot_async.config.base import Section, plain_json

if TYPE_CHECKING:
    from spot_async.spending.account import Account


class Place(NamedTuple):
    """Where a backend's server listens, when its settings say so."""

    setting: str  # that says so, such as `port=8123`
    address: str  # equal for two that cannot be told apart
    is_attached: bool = False  # to a server that runs already


class PluginSettings(Section):
    """Base of the settings of a backend, policy or verifier; `kind` names the plug-in."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()  # names of settings that change no result, only the pace

    kind: str = Field(description="name of an installed plug-in, or `module:Class`")
    _number: int | None = PrivateAttr(None)  # of the server, from 1 on; None where it is its role's only one
    _cores: frozenset[int] | None = PrivateAttr(None)  # of its own; None where it shares them with others

    def that_decide(self) -> dict[str, Any]:
        """Plain values of the settings that may change results, `kind` included."""
        return self.model_dump(mode="json", exclude=set(self.WITHOUT_EFFECT))

    def servers(self) -> Sequence[Self]:
        """One settings object for each server of a backend; several are made by `numbered`."""
        return (self,)

    def open_account(self, role: str) -> Account | None:
        """What all servers of a backend share: limits, prices, a ledger and a budget. None where nothing is counted."""
        return None

    def server_name(self, role: str) -> str:
        """What a server of a backend is called in messages, logs and metrics: its role, numbered if one of several."""
        return role if self._number is None else f"{role}-{self._number}"

    def numbered(self, servers: Sequence[Mapping[str, Any]]) -> Sequence[Self]:
        """For `servers`: these settings with other values for each of several. A single one has no number."""
        copies = [self.model_copy(update=dict(each)) for each in servers]
        if len(copies) > 1:
            for number, each in enumerate(copies, 1):
                each._number = number
        return copies

    @property
    def cores(self) -> frozenset[int] | None:
        """The cores, by number, that a backend's server has to itself; None where it shares them."""
        return self._cores

    def on_cores(self, cores: frozenset[int] | None) -> Self:
        """For one of `servers`: these settings with cores of its own."""
        copy = self.model_copy()
        copy._cores = cores
        return copy

    @property
    def place(self) -> Place | None:
        """Where a backend's server listens; None where each start gets a place of its own."""
        return None

    def check_machine(self, section: str) -> None:
        """Whether this machine has what the settings name, before anything starts; `section` is where they stand.

        Raises ConfigError.
        """

    def check_installed(self, section: str) -> None:
        """Whether the programs that the settings start are there, as `check_machine`; may run their interpreters."""


def backend_section(role: str, server_name: str) -> str:
    """Where a backend's settings stand, for messages; with the server's name where its role has several."""
    return f"{role}.backend" + (f" ({server_name})" if server_name != role else "")


def _is_unknown_key(error: ErrorDetails) -> bool:
    return error["type"] == "extra_forbidden" and len(error["loc"]) == 1


class PluginSettingsError(ValueError):
    """Carries a plug-in section's own validation errors out of the section that holds it."""

    def __init__(self, group: registry.Group, kind: str, schema: type[BaseModel], errors: ValidationError) -> None:
        super().__init__(str(errors))
        self.kind = kind
        self.schema = schema
        self.errors = errors
        self._group = group

    def keys_of_other_kinds(self) -> tuple[Sequence[str], Sequence[str]]:
        """Keys that this kind does not know, and the installed kinds that do: those that know most of them."""
        unknown = [str(each["loc"][0]) for each in self.errors.errors() if _is_unknown_key(each)]
        known: dict[tuple[str, ...], list[str]] = {}
        for name in registry.names(self._group) if unknown else ():
            with contextlib.suppress(ImportError, AttributeError, ValueError):  # another one that is broken
                fields = registry.load(self._group, name).Settings.model_fields
                known.setdefault(tuple(key for key in unknown if key in fields), []).append(name)
        keys = max(known, key=len, default=())
        return keys, known.get(keys, [])


def _resolver(group: registry.Group, default: str | None = None, *, optional: bool = False) -> pydantic.BeforeValidator:
    """Validates a plug-in's section with the plug-in's own schema; without a `kind` it is `default`'s."""

    def resolve(value: Any) -> Any:
        if isinstance(value, PluginSettings) or (optional and value is None):
            return value
        if isinstance(value, str):
            value = {"kind": value}
        if isinstance(value, dict) and default is not None:
            value = {"kind": default} | value
        if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
            raise ValueError(f"needs a `kind`, one of: {', '.join(registry.names(group))}")
        schema = registry.load(group, value["kind"]).Settings
        try:
            return schema.model_validate_json(plain_json(value))
        except ValidationError as errors:
            raise PluginSettingsError(group, value["kind"], schema, errors) from None

    return pydantic.BeforeValidator(resolve)


BackendSettings = Annotated[SerializeAsAny[PluginSettings], _resolver("backends", "local")]
PolicySettings = Annotated[SerializeAsAny[PluginSettings], _resolver("policies")]
TrainingVerifier = Annotated[SerializeAsAny[PluginSettings], _resolver("verifiers", "boxed_match")]
EvaluationVerifier = Annotated[SerializeAsAny[PluginSettings], _resolver("verifiers", "math_verify")]
# No default kind: settings of a benchmark's own verifier would silently be another's than `evaluation.verifier`.
BenchmarkVerifier = Annotated[SerializeAsAny[PluginSettings] | None, _resolver("verifiers", optional=True)]
