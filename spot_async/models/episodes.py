"""What an environment is told and answers, turn by turn. Plain records, in JSON's types, since they cross processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Tools = Sequence[Mapping[str, Any]]  # JSON schemas, as chat templates show them to a model
# `error`: what a tool raised. `unreadable`: a call that could not be read. `killed`: what took too long or too much.
ObservationKind = Literal["answer", "error", "unreadable", "killed"]


class Call(msgspec.Struct, frozen=True):
    """A tool's name and the arguments that a turn gives it."""

    name: str
    arguments: dict[str, Any] = {}


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the model's, as an environment gets it."""

    text: str  # the whole turn, without the token that ends it
    calls: tuple[Call, ...] = ()  # of tools, in their order; empty for an environment that reads the text


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment answers to an action."""

    texts: tuple[str, ...]  # one for each call; of an environment that reads the text there is one
    kind: ObservationKind = "answer"
    is_done: bool = False  # no further turn is wanted
    reward: float | None = None  # of this step, where the environment gives one


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """An action with what was answered to it."""

    action: Action
    observation: Observation
