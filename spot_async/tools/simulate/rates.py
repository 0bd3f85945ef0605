"""Holds what a simulation must know of a cluster: the rates of its servers, the trainer's, and lengths of responses.

A rate is stated, or measured by a run or by `tune`. All have the same keys, so sources are laid over each other. Rates
of servers that generate and of the trainer count response tokens, and what prompts cost is part of the rate. Servers
that score have a request's prompt to score as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from spot_async.checks.served import served_models
from spot_async.config import ROLES, Config, teacher_name, teacher_role
from spot_async.config.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section
from spot_async.config.loading import laid_over, validate_as
from spot_async.errors import ConfigError
from spot_async.stages.services import requests_per_prompt
from spot_async.tools.simulate.lengths import EnvironmentRates, LogNormal
from spot_async.types import PolicyNeeds

Tree = dict[str, Any]
RATES = ("tokens_per_s", "tokens_per_s_each")
Levels = Annotated[dict[PositiveInt, PositiveFloat], Field(min_length=1)]  # a server's speed by requests in flight


def of_one(levels: Mapping[int, float], requests: int) -> float:
    """Return the part of a server's speed that each of so many requests has."""
    places, speeds = zip((0, 0.0), *sorted(levels.items()), strict=True)
    return float(np.interp(requests, places, speeds)) / requests


class ServerRates(Section):
    """One server of a role. All servers of a role are alike."""

    replicas: PositiveInt | None = Field(None, description="servers of the role; default: as configured")
    tokens_per_s: PositiveFloat | None = Field(None, description="tokens a second of one server at most")
    tokens_per_s_each: PositiveFloat | None = Field(None, description="tokens a second of one request at most")
    request_s: NonNegativeFloat = Field(0.0, description="seconds of a request besides its time at the server")
    slots: PositiveInt | None = Field(None, description="requests that one server works on at a time; default: all")
    levels: Levels | None = Field(
        None, description="tokens a second by requests in flight, where `tune` measured them; in place of both rates"
    )

    def whole(self, configured: int | None) -> ServerRates:
        """Return these rates with those that levels stand for.

        Of a role with `configured` servers nothing is left out but the slots.
        """
        at_most, each = self.tokens_per_s, self.tokens_per_s_each
        if self.levels is not None:
            at_most = max(self.levels.values())
            each = max(speed / requests for requests, speed in self.levels.items())
        if configured is not None:
            each = each or at_most
        replicas = self.replicas or configured
        return self.model_copy(update={"tokens_per_s": at_most, "tokens_per_s_each": each, "replicas": replicas})

    def tokens_per_s_of_one(self, requests: int) -> float:
        """Return the tokens a second of each of so many requests. Beyond what was measured nothing is gained."""
        if self.levels is not None:
            return of_one(self.levels, requests)
        return min(self.tokens_per_s_each or 0.0, (self.tokens_per_s or 0.0) / requests)

    @property
    def requests_at_whole_rate(self) -> float:
        """How many requests a server works on before they slow each other down."""
        if self.tokens_per_s is None or self.tokens_per_s_each is None:
            return 1.0
        return max(1.0, self.tokens_per_s / self.tokens_per_s_each)


class TrainerRates(Section):
    """The trainer, with all of its ranks."""

    tokens_per_s: PositiveFloat | None = Field(None, description="response tokens trained a second, without read ones")
    fixed_s: NonNegativeFloat = Field(0.0, description="seconds of an iteration besides its tokens")


class ClusterRates(Section):
    """Everything that a simulation is told of a cluster."""

    student: ServerRates = ServerRates()
    teacher: ServerRates = ServerRates()
    teachers: dict[str, ServerRates] = Field({}, description="of several by name; one left out is as `teacher`")
    reference: ServerRates = ServerRates()
    trainer: TrainerRates = TrainerRates()
    environment: EnvironmentRates | None = Field(None, description="of all training sets together")
    update_s: NonNegativeFloat = Field(0.0, description="seconds of sending new weights to all student servers")
    in_flight_updates: bool = Field(
        True, description="whether student servers load weights while they have requests; else these end first"
    )
    candidates_s: NonNegativeFloat = Field(0.0, description="seconds in which the student scores candidates")
    verdict_s: NonNegativeFloat = Field(0.0, description="seconds of a verdict")
    verdicts: Levels | None = Field(
        None, description="verdicts a second by requests in flight, where `tune` measured them; in place of verdict_s"
    )
    lengths: LogNormal = LogNormal()

    def of(self, role: str) -> ServerRates:
        name = teacher_name(role)
        rates: ServerRates = self.teachers.get(name, self.teacher) if name else getattr(self, role)
        return rates


def cluster_rates(sources: list[Tree], config: Config, needs: PolicyNeeds, *, knows_lengths: bool) -> ClusterRates:
    """Return the rates of all sources, of which the later ones win, after the slots that are configured.

    A role's own speed of a request is that of the server where nobody says. Raises ConfigError for a source that
    cannot be read, and one line for what the run needs and no source has.
    """
    tree: Tree = {}
    for source in (_configured_slots(config, needs), *sources):
        tree = laid_over(source, laid_over(_no_levels(source), tree))
    rates = validate_as(ClusterRates, tree)
    roles = served_roles(config, needs)
    servers = {
        role: rates.of(role).whole(roles.get(role)) for role in (*ROLES, *map(teacher_role, rates.teachers), *roles)
    }
    lacking = [f"{role}.tokens_per_s" for role in roles if servers[role].tokens_per_s is None]
    if "student" in roles and rates.student.tokens_per_s_each is None and rates.student.levels is None:
        lacking.append("student.tokens_per_s_each")
    lacking += ["trainer.tokens_per_s"] if rates.trainer.tokens_per_s is None else []
    lacking += ["lengths.median"] if rates.lengths.median is None and not knows_lengths else []
    played = config.environments.values()
    environment = (rates.environment or EnvironmentRates()) if played else None
    if environment is not None:
        workers = sum({each.model_dump_json(): each.workers for each in played}.values())  # equal ones share them
        environment = environment.model_copy(update={"workers": environment.workers or workers})
        lacking += [f"environment.{name}" for name in ("answer_s", "turns") if getattr(environment, name) is None]
    if lacking:
        is_tuned = environment is None and any(key.split(".")[0] in (*ROLES, "teachers") for key in lacking)
        raise ConfigError(
            f"{', '.join(lacking)}: not known: give --from RUN, a run of this configuration that has measured it, or "
            f"state it, for example --rate {lacking[0]}={1 if lacking[0] == 'environment.answer_s' else 1000}"
            f"{'; spot-async tune measures servers' if is_tuned else ''}"
        )
    teachers = {name: own for role, own in servers.items() if (name := teacher_name(role))}
    found = {role: servers[role] for role in ROLES}
    return rates.model_copy(update={**found, "teachers": teachers, "environment": environment})


def _no_levels(source: Tree) -> Tree:
    """Return what a source says of others' levels by stating a speed: that there are none."""
    speeds = {*RATES, "levels"}
    stated = [role for role in ROLES if isinstance(own := source.get(role), dict) and speeds & own.keys()]
    return {role: {"levels": None} for role in stated} | ({"verdicts": None} if "verdict_s" in source else {})


def served_roles(config: Config, needs: PolicyNeeds) -> Mapping[str, int]:
    """Return the number of servers of each role that the policy asks, as configured.

    The student's servers may answer for the reference, with their adapters off, and for teachers. A student that writes
    nothing only takes weights.
    """
    models = served_models(config, needs)
    if needs.reference:
        models.setdefault("reference", config.student)
    models |= dict.fromkeys(config.served_by_student if needs.teacher else (), config.student)
    if "student" not in writers(needs):
        del models["student"]
    return {role: len(model.backend.servers()) for role, model in models.items()}


def writers(needs: PolicyNeeds) -> list[str]:
    """Return the roles whose servers generate."""
    asked = requests_per_prompt(needs)
    teachers = map(teacher_role, needs.teachers or ("",))
    return [*(["student"] if asked["rollout"] else []), *(teachers if asked["teacher_response"] else [])]


def _configured_slots(config: Config, needs: PolicyNeeds) -> Tree:
    """Return the slots of servers that generate, where the configuration names them. Scores need none."""
    slots = {role: getattr(config.models[role].backend, "slots", None) for role in writers(needs)}
    return by_section({role: {"slots": number} for role, number in slots.items() if number})


def by_section(of_roles: Mapping[str, Any]) -> Tree:
    """Return the sections of `ClusterRates` from what is known of each role: `teachers.math` stands in `teachers`."""
    tree: Tree = {}
    for role, own in of_roles.items():
        name = teacher_name(role)
        tree = laid_over({"teachers": {name: own}} if name else {role: own}, tree)
    return tree
