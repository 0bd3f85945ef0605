"""Plug-ins' sections of the configuration: the base of their settings, and fields that use a plug-in's own schema.

`base/registry.py` finds the plug-ins themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self

import pydantic
from pydantic import BaseModel, Field, PrivateAttr, SerializeAsAny, ValidationError

from spot_async.base import registry
from spot_async.base.retry import START_TIMEOUT_S
from spot_async.config.base import Section, plain_json
from spot_async.config.suggestions import other_name
from spot_async.config.training import LoraConfig

if TYPE_CHECKING:
    from spot_async.spending.account import Account


class Place(NamedTuple):
    """The address that a backend's settings give its server."""

    setting: str  # what gives it, such as `port=8123`
    address: str  # two servers with equal ones would collide
    is_attached: bool = False  # whether a server runs there already, and is not ours to start


class PluginSettings(Section):
    """Base of the settings of a policy or verifier; `kind` names the plug-in."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()  # names of settings that change the pace, but no result
    # Of a verifier: it compares a response's answer with the problem's. False: it judges without one, by asking.
    JUDGES_ANSWERS: ClassVar[bool] = True
    READS_BOX: ClassVar[bool] = False  # of a verifier: a response's answer is what its last box holds

    _account: Account | None = PrivateAttr(None)  # that its requests are charged to; None: it opens its own

    kind: str = Field(description="name of an installed plug-in, or `module:Class`")

    def that_decide(self) -> dict[str, Any]:
        """Return the settings that may change results as plain values, `kind` included."""
        return self.model_dump(mode="json", exclude=set(self.WITHOUT_EFFECT))

    def open_account(self, role: str) -> Account | None:
        """Return the account that all servers of the role share (rates, prices, budget); None: nothing is counted."""
        return None

    @property
    def account(self) -> Account | None:
        """The account that the run opened for all servers of the role, or None."""
        return self._account

    def charged_to(self, account: Account | None) -> Self:
        """Return a copy of these settings with the role's account."""
        copy = self.model_copy()
        copy._account = account
        return copy

    @property
    def doubts(self) -> Sequence[str]:
        """A line for each thing in a policy's settings that may not be meant, beginning with its key."""
        return ()

    def check_machine(self, section: str) -> None:
        """Raise ConfigError unless this machine has what the settings name. Called before anything starts.

        `section` is the settings' key, for messages.
        """


class RouteConfig(Section):
    """Which of several teachers a problem's prompt asks. A mapping of values is short for `to`, by category."""

    by: str = Field(
        "category", description="what decides: a problem's `category`, its `tier`, or another column of `data.train`"
    )
    to: dict[str, str] = Field(description="a teacher's name for each value")
    default: str | None = Field(None, description="the teacher of all other values, and of problems without one")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _from_values(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.keys() & {"by", "to"}:
            return given
        return {"to": {key: name for key, name in given.items() if key != "default"}, "default": given.get("default")}


class RoutedSettings(PluginSettings):
    """Base of the settings of a policy that asks a teacher, which may be one of several."""

    route: RouteConfig | None = Field(
        None,
        description="which of several `teachers` a prompt asks, by its problem; null: all of them, by their `weight`",
    )


class BackendSettings(PluginSettings):
    """Base of the settings of a backend: of its servers, of which a role may have several."""

    _number: int | None = PrivateAttr(None)  # the server's among its role's, from 1 on; None for an only one
    _cores: frozenset[int] | None = PrivateAttr(None)  # those that the server has to itself; None: it shares them
    _start_timeout_s: float = PrivateAttr(START_TIMEOUT_S)  # how long it may take until the server answers
    _lora: LoraConfig | None = PrivateAttr(None)  # of the adapters that its servers take, where they take some
    _follows: bool = PrivateAttr(False)  # its servers are a teacher's that follows the student

    def servers(self) -> Sequence[Self]:
        """Return one settings object for each server. Backends of several servers make theirs with `numbered`."""
        return (self,)

    def server_name(self, role: str) -> str:
        """Return the server's name in messages, logs and metrics: its role, numbered if it is one of several."""
        return role if self._number is None else f"{role}-{self._number}"

    def numbered(self, servers: Sequence[Mapping[str, Any]]) -> Sequence[Self]:
        """Return a numbered copy of these settings for each of `servers`, with that one's own values.

        An only one gets no number.
        """
        copies = [self.model_copy(update=dict(each)) for each in servers]
        if len(copies) > 1:
            for number, each in enumerate(copies, 1):
                each._number = number
        return copies

    @property
    def cores(self) -> frozenset[int] | None:
        """The cores, by number, that a backend's server has to itself; None where it shares them."""
        return self._cores

    @property
    def start_timeout_s(self) -> float:
        """How long a backend's server may take until it answers (`ServingConfig.start_timeout_s`)."""
        return self._start_timeout_s

    def of_run(
        self,
        cores: frozenset[int] | None = None,
        account: Account | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> Self:
        """Return a copy of one server's settings, with the cores that it has to itself and its role's account."""
        copy = self.charged_to(account)
        copy._cores = cores
        copy._start_timeout_s = start_timeout_s
        return copy

    @property
    def takes_adapters(self) -> bool:
        """Whether a student's servers take adapters alone as new weights."""
        return False

    def with_lora(self, lora: LoraConfig | None) -> Self:
        """Return a student's settings for a run that trains such adapters, or none (`training.lora`).

        Raise ValueError if its servers cannot serve what that run trains.
        """
        if not self.takes_adapters:
            return self
        if lora is None:
            raise ValueError("backend.weights.transport=adapter needs training.lora: otherwise, set it to disk")
        copy = self.model_copy()
        copy._lora = lora
        return copy

    def following(self, lora: LoraConfig | None) -> Self:
        """Return the settings of a teacher that follows the student: its servers take weights as the student's do."""
        copy = self.with_lora(lora).model_copy()
        copy._follows = True
        return copy

    def takes_weights(self, role: str) -> bool:
        """Whether the role's servers are sent weights: the student's, and those of a teacher that follows it."""
        return role == "student" or self._follows

    def adapters(self, role: str) -> LoraConfig | None:
        """What the adapters are like that the role's servers take as their weights; None if they take none."""
        return self._lora if self.takes_weights(role) else None

    @property
    def place(self) -> Place | None:
        """Where the server listens; None where each start makes up an address of its own."""
        return None

    @property
    def runs_here(self) -> bool:
        """Whether the server is ours to start on this machine, and so may have cores of it."""
        return self.place is None or not self.place.is_attached

    def check_installed(self, section: str) -> None:
        """Raise ConfigError unless the programs that the settings start are installed. May run their interpreters."""


def backend_section(role: str, server_name: str) -> str:
    """Return the key of a backend's settings for messages, with the server's name where its role has several."""
    return f"{role}.backend" + (f" ({server_name})" if server_name != role else "")


class PluginSettingsError(ValueError):
    """Carries a plug-in section's own validation errors out of the section that holds it."""

    def __init__(self, group: registry.Group, kind: str, schema: type[BaseModel], errors: ValidationError) -> None:
        super().__init__(str(errors))
        self.kind = kind
        self.schema = schema
        self.errors = errors
        self._group = group

    def keys_of_other_kinds(self) -> tuple[Sequence[str], Sequence[str]]:
        """Return the keys that belong to another kind, and the installed kinds that know them.

        Where no kind knows all keys that this one does not, the largest group that some kind knows is returned.
        """
        extra = [each["loc"] for each in self.errors.errors() if each["type"] == "extra_forbidden"]
        unknown = [str(location[0]) for location in extra if len(location) == 1]
        known: dict[tuple[str, ...], list[str]] = {}
        for name in registry.names(self._group) if unknown else ():
            with contextlib.suppress(ImportError, AttributeError, ValueError):  # this plug-in is broken: not our topic
                fields = registry.load(self._group, name).Settings.model_fields
                known.setdefault(tuple(key for key in unknown if key in fields), []).append(name)
        keys = max(known, key=len, default=())
        return keys, known.get(keys, [])


def _resolver(group: registry.Group, default: str | None = None, *, optional: bool = False) -> pydantic.BeforeValidator:
    """Return a validator that reads a plug-in's section by the plug-in's own schema.

    A section without a `kind` is of kind `default`, where there is one.
    """

    base = BackendSettings if group == "backends" else PluginSettings

    def resolve(value: Any) -> Any:
        if isinstance(value, PluginSettings) or (optional and value is None):
            return value
        if isinstance(value, str):
            value = {"kind": value}
        if isinstance(value, dict) and default is not None:
            value = {"kind": default} | value
        if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
            raise ValueError(f"needs a `kind`, one of: {', '.join(registry.names(group))}")
        kind = value["kind"]
        if kind not in registry.names(group) and (meant := other_name(kind.lower(), group)) is not None:
            raise ValueError(f"{registry.unknown(group, kind)}; {meant.answer}")
        schema = registry.load(group, kind).Settings
        if not issubclass(schema, base):
            raise ValueError(f"kind={kind}: its Settings are no spot_async.{base.__name__}: derive them from that")
        try:
            return schema.model_validate_json(plain_json(value))
        except ValidationError as errors:
            raise PluginSettingsError(group, value["kind"], schema, errors) from None

    return pydantic.BeforeValidator(resolve)


BackendSection = Annotated[SerializeAsAny[BackendSettings], _resolver("backends", "local")]
PolicySettings = Annotated[SerializeAsAny[PluginSettings], _resolver("policies")]
TrainingVerifier = Annotated[SerializeAsAny[PluginSettings], _resolver("verifiers", "boxed_match")]
EvaluationVerifier = Annotated[SerializeAsAny[PluginSettings], _resolver("verifiers", "math")]
# No default kind: a benchmark's verifier settings without one could be meant for the kind of `evaluation.verifier`.
BenchmarkVerifier = Annotated[SerializeAsAny[PluginSettings] | None, _resolver("verifiers", optional=True)]
