"""Checks which models a run serves: by backends that can do what the policy asks, and each at a place of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spot_async.base import registry
from spot_async.base.addresses import is_loopback
from spot_async.checks.device_shares import shares_gpu_time, sleeps_while_training
from spot_async.config import Config, ModelConfig, Place, TeacherConfig
from spot_async.errors import ConfigError
from spot_async.models.files import ModelFiles
from spot_async.models.weight_files import same_weights
from spot_async.protocols import BaseScorer, CandidateScorer, Generator, Scorer, WeightSink
from spot_async.types import PolicyNeeds

# Settings of a backend whose requests cost money or are counted.
PAID_KEYS = ("prices", "budget", "token_budget", "requests_per_minute", "tokens_per_minute")


def check_roles(config: Config, needs: PolicyNeeds) -> None:
    """Raise ConfigError unless every model that the policy needs is given, with a backend that can do what it asks."""
    kind = config.policy.kind
    if needs.teacher and not config.teachers_by_role:
        raise ConfigError(f"teacher: required by policy {kind}, but not given; name a model in teacher.model")
    _check_names(config, needs)
    if config.training.reference_kl > 0 and not needs.reference:
        raise ConfigError(
            f"training.reference_kl={config.training.reference_kl:g}: policy {kind} asks no reference; set it to 0"
        )
    reference = served_models(config, needs).get("reference")
    asked = [
        ("student", config.student, Generator, "generate", True),
        ("student", config.student, WeightSink, "update_weights", True),
        ("student", config.student, CandidateScorer, "candidate_logprobs", needs.candidate_logprobs),
        *(
            (role, teacher, protocol, method, is_needed)
            for role, teacher in config.teachers_by_role.items()
            if teacher.served_by == "teacher"
            for protocol, method, is_needed in (
                (Scorer, "score", needs.teacher_top_k > 0),
                (Generator, "generate", needs.teacher_responses),
                (CandidateScorer, "candidate_logprobs", needs.teacher_candidates),
                (WeightSink, "update_weights", teacher.follows is not None),
            )
        ),
        ("reference", reference, Scorer, "score", needs.reference),
        ("student", config.student, BaseScorer, "score_base", needs.reference and reference is None),
        ("student", config.student, Scorer, "score", bool(config.served_by_student)),
    ]
    for role, model, protocol, method, is_needed in asked:
        if is_needed and model is not None and not offers(model, protocol):
            raise ConfigError(
                f"{role}.backend.kind={model.backend.kind}: policy {kind} needs a {role} that can `{method}`; "
                "choose another backend"
            )


def check_selves(config: Config, student: ModelFiles, teachers: Mapping[str, ModelFiles]) -> None:
    """Raise ConfigError unless teachers that are the student begin as it, and its servers can answer for them."""
    for role, teacher in config.teachers_by_role.items():
        is_students = teacher.served_by == "student"
        if is_students and teacher.follows is None and not config.student.backend.takes_adapters:
            raise ConfigError(
                f"{role}.served_by=student: without follows it is the frozen student, which its servers have only "
                "beside adapters (training.lora with student.backend.weights.transport=adapter): set "
                f"{role}.follows={{every: 1}} for the live one, or {role}.served_by=teacher"
            )
        is_student = is_students or teacher.follows is not None
        if is_student and not same_weights(student.directory, teachers[role].directory):
            raise ConfigError(
                f"{role}.model={teacher.model}: it is to be the student, and so begins with its weights: set it to "
                f"student.model={config.student.model}"
            )


def _check_names(config: Config, needs: PolicyNeeds) -> None:
    """Raise ConfigError unless the policy asks its teachers by names that are given."""
    kind, given = config.policy.kind, " and ".join(config.teachers) or "one without a name (`teacher`)"
    if lacking := [name for name in needs.teachers if name not in config.teachers]:
        raise ConfigError(
            f"teachers: policy {kind} asks for {' and '.join(lacking)}, and given is only {given}: name a model in "
            f"teachers.{lacking[0]}.model"
        )
    if not needs.teacher or not config.teachers:
        return
    if config.route is not None:
        if weighted := [name for name, each in config.teachers.items() if each.weight != 1.0]:
            raise ConfigError(
                f"teachers.{weighted[0]}.weight={config.teachers[weighted[0]].weight:g}: a prompt asks one "
                "teacher by policy.route, so that its weight counts for nothing: leave one of the two out"
            )
        return
    if not needs.teachers:
        raise ConfigError(
            f"teachers: policy {kind} asks one teacher of each prompt, and given are {given}: say which in "
            "policy.route, give that one as `teacher`, or let the policy name those that it asks (PolicyNeeds.teachers)"
        )
    if idle := [name for name in config.teachers if name not in needs.teachers]:
        raise ConfigError(f"teachers.{idle[0]}: policy {kind} does not ask it: remove it")


def offers(model: ModelConfig, protocol: type) -> bool:
    """Whether the model's kind of backend has the methods of `protocol`."""
    return issubclass(registry.load("backends", model.backend.kind), protocol)


def check_places(config: Config, needs: PolicyNeeds) -> None:
    """Raise ConfigError unless each needed server has its own address, and this machine what its settings name."""
    fixed = next(filter(None, places(config.student)), None)
    is_served_twice = needs.reference and config.reference is None and not config.student.backend.takes_adapters
    if is_served_twice and fixed is not None:
        raise ConfigError(
            f"reference: required when student.backend.{fixed.setting} is fixed, since the initial student is served "
            "once more; name its model and backend"
        )
    first_at: dict[str, str] = {}
    for role, model in served_models(config, needs).items():
        model.backend.check_machine(f"{role}.backend")
        for place in filter(None, places(model)):
            if (other := first_at.setdefault(place.address, role)) == role:
                continue
            if other == "student":
                raise ConfigError(
                    f"{role}.backend.{place.setting}: the student is served there, whose weights change; give the "
                    f"{role} a server of its own"
                )
            if not place.is_attached:
                raise ConfigError(f"{role}.backend.{place.setting}: the {other} is served there; give another port")
    _check_weights_directory(config)
    _check_sleep(config)


def answering(config: Config) -> dict[str, str]:
    """Return the role whose servers answer for each teacher: the first one with the same model, backend and serving.

    The student's answer for one that is `served_by` them. One that follows the student has servers of its own.
    Raises ConfigError where these differ in a price or a limit alone, such as a budget for one of the two.
    """
    found: dict[str, str] = {}
    for role, teacher in config.teachers_by_role.items():
        if teacher.served_by == "student":
            found[role] = "student"
            continue
        served = {other: config.teachers_by_role[other] for other, first in found.items() if other == first}
        alike = [] if teacher.replay else [other for other, each in served.items() if _same_servers(teacher, each)]
        first = found[role] = alike[0] if alike else role
        for key in PAID_KEYS:
            own, others = (getattr(config.teachers_by_role[each].backend, key, None) for each in (role, first))
            if own != others:
                raise ConfigError(
                    f"{role}.backend.{key}={own}: the servers of {first} answer for both, and there it is {others}: "
                    "give both the same, which counts for them together, or servers of their own"
                )
    return found


def _same_servers(one: TeacherConfig, other: TeacherConfig) -> bool:
    first, second = (each.model_dump(exclude={"backend": {*PAID_KEYS}}) for each in (one, other))
    same = all(first[key] == second[key] for key in ("model", "backend", "serving"))
    return same and not other.replay and one.follows is None and other.follows is None


def served_models(config: Config, needs: PolicyNeeds) -> dict[str, ModelConfig]:
    """Return the models to serve, by role.

    A replayed teacher is not served, nor is one for which another's servers answer. The reference is the initial
    student unless the configuration names another. Where the student's servers take adapters it is there already, as
    their base.
    """
    initial = None if config.student.backend.takes_adapters else config.student
    teachers = config.teachers_by_role if needs.teacher else {}
    reference = (config.reference or initial) if needs.reference else None
    return {
        "student": config.student,
        **{role: each for role, each in teachers.items() if not each.replay and answering(config)[role] == role},
        **({} if reference is None else {"reference": reference}),
    }


def places(model: ModelConfig) -> Sequence[Place | None]:
    """Return where each of the model's servers listens; None for a server whose settings do not say."""
    return [each.place for each in model.backend.servers()]


def _check_weights_directory(config: Config) -> None:
    """Raise ConfigError if a server on another machine would have to read what is published on this one alone."""
    parent = config.training.weights_directory
    if parent is None:
        return
    for role, model in config.models.items():
        transport = getattr(getattr(model.backend, "weights", None), "transport", "")
        takes_weights = role == "student" or role in config.following
        for each in model.backend.servers() if takes_weights and transport != "distributed" else ():
            place, launch = each.place, getattr(each, "launch", None)
            there = "launch.prefix or launch.resources" if getattr(launch, "is_elsewhere", False) else None
            if place is not None and place.is_attached:
                host = place.address.partition("/")[0].rpartition(":")[0]
                there = None if is_loopback(host) else place.setting
            if there is not None:
                raise ConfigError(
                    f"training.weights_directory={parent}: it is private to this machine, and the server of "
                    f"{role}.backend.{there} may not see it: set training.weights_directory=null, or "
                    f"{role}.backend.weights.transport=distributed (vLLM and SGLang)"
                )


def _check_sleep(config: Config) -> None:
    """Raise ConfigError where servers sleep that have to answer, or that others could not take the place of."""
    shares_time = [role for role, model in config.models.items() if shares_gpu_time(model)]
    for role, model in config.models.items():
        if sleeps_while_training(model) and config.max_staleness > 0:
            raise ConfigError(
                f"{role}.backend.sleep_while_training: with max_staleness={config.max_staleness} it is asked while the "
                "trainer trains; set max_staleness to 0, or give them devices of their own"
            )
        takes_weights = role == "student" or role in config.following
        starts_all = all(each.runs_here for each in model.backend.servers())
        if role in shares_time and (takes_weights or len(shares_time) < 2 or not starts_all):
            raise ConfigError(
                f"{role}.backend.sleep_while_others_answer: is for two or more servers that the run starts (launch), "
                "and that get no new weights; remove it"
            )
