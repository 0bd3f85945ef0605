"""Checks that running backends offer what a run needs. Pure: what they say of themselves is passed in.

`plan.py` checks what files say before anything starts; `diagnosis.py` asks the servers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

import msgspec

from spot_async.config import Config, teacher_name
from spot_async.errors import ConfigError
from spot_async.models.common_vocabulary import EndTokens
from spot_async.models.files import ModelFiles
from spot_async.types import Capabilities, PolicyNeeds

CANNOT_SUM = (
    "stages.score.end_token=sum: {role}.backend serves no log-probabilities of chosen tokens: set it to replace, or "
    "choose another backend"
)


def check_capabilities(
    config: Config,
    needs: PolicyNeeds,
    found: Mapping[str, Capabilities],
    *,
    sums_ends: Collection[str] = (),
    own_fingerprints: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise ConfigError, with the key to change, unless running backends offer what the policy needs.

    `found` has what they offer, by role. `sums_ends` are the teachers of which the function `sums_ends` says so.
    `own_fingerprints` are of teachers with tokenizers of their own, as their files have them.
    """
    student = found["student"]
    teachers = {role: each for role, each in found.items() if teacher_name(role) is not None}
    for role, other in found.items():
        if (own := own_fingerprints.get(role)) is not None:
            if other.vocab_fingerprint != own:
                raise ConfigError(f"{role}.model: {role}.backend serves another vocabulary ({other.model}) than it has")
        elif student.vocab_fingerprint != other.vocab_fingerprint:
            raise ConfigError(
                f"{role}.model: the vocabularies that student ({student.model}) and {role} ({other.model}) serve differ"
            )
    key, has_top_k = needs.candidates_key, student.max_generation_top_k > 0
    asking = f"policy.{key}={getattr(config.policy, key)}" if key else f"policy {config.policy.kind}"
    lacking = f": it needs {student.weights_need}" if student.weights_need else ""
    reference = found.get("reference", student if needs.reference else None)
    missing = [
        (student.candidate_logprobs == "none" and (needs.candidate_logprobs or (key is not None and not has_top_k)),
         f"student.backend ({student.server}) serves no log-probabilities of chosen tokens, which {asking} "
         "needs: choose another, or another backend"),
        (student.max_generation_top_k < needs.rollout_top_k,
         f"student.backend ({student.server}) gives the top-{student.max_generation_top_k} of sampled tokens, policy "
         f"{config.policy.kind} needs top-{needs.rollout_top_k}: ask for fewer, or choose another backend"),
        (not student.weight_update, f"student.backend takes no new weights{lacking}"),
        (not student.sampled_token_ids, "student.backend does not say which token ids it sampled: it can be evaluated, "
         "but not trained on"),
        (bool(config.environments) and not all(each.token_id_prompts for each in found.values()),
         "environment: a server that reads text would not score the turns as they were sampled: choose backends that "
         "take token ids"),
        (reference is not None and not (
            reference.token_id_prompts and reference.every_position and reference.max_top_k),
         "reference.backend must score token ids at every position: set reference.backend to a server that does"),
        ("truncated" in [each.logprob_convention for each in found.values()],
         "log-probabilities must be those of the untruncated distribution"),
        *_context_too_small(config, needs, found),
        *_at_another_temperature(config, needs, found),
    ]  # fmt: skip
    for role, teacher in teachers.items():
        missing += [
            (role in sums_ends and needs.teacher_top_k > 0 and teacher.candidate_logprobs == "none",
             CANNOT_SUM.format(role=role)),
            (needs.teacher_candidates and teacher.candidate_logprobs == "none",
             f"{role}.backend ({teacher.server}) serves no log-probabilities of chosen tokens, policy "
             f"{config.policy.kind} needs them: choose another backend"),
            (teacher.max_top_k < needs.teacher_top_k, _too_few_candidates(config, needs, role, teacher)),
            (role in config.following and not teacher.weight_update,
             f"{role}.follows: {role}.backend takes no new weights"
             + (f": it needs {teacher.weights_need}" if teacher.weights_need else "")),
            (needs.exact_entropy and not teacher.exact_entropy, f"{role}.backend does not serve exact entropies"),
            (needs.teacher_responses > 0 and not teacher.generation,
             f"{role}.backend writes no responses, policy {config.policy.kind} needs them: set another {role}.backend"),
            (bool(config.environments) and needs.teacher_responses > 0 and not teacher.sampled_token_ids,
             f"environment: {role}.backend does not say which token ids it sampled, so its turns would be read as "
             f"others: set another {role}.backend"),
        ]  # fmt: skip
    refusals = [message for is_missing, message in missing if is_missing]
    if refusals:
        raise ConfigError("\n".join(refusals))


def check_environment(config: Config, needs: PolicyNeeds) -> None:
    """Raise ConfigError for a policy that probes beside an environment that cannot be played again."""
    if needs.probes_per_prompt and not all(each.replayable for each in config.environments.values()):
        raise ConfigError(f"environment: policy {config.policy.kind} probes, which needs environment.replayable")


def check_own_tokenizers(config: Config, needs: PolicyNeeds, vocab_size: int) -> None:
    """Raise ConfigError if the policy asks more of a teacher with its own tokenizer than can be said in the student's.

    `vocab_size` is the width of the student's softmax.
    """
    kind, roles = config.policy.kind, config.own_tokenizers
    if not roles or not needs.teacher:
        return
    if needs.teacher_candidates:
        asked = "about tokens that it chooses"
    elif needs.exact_entropy or (needs.teacher_rows and needs.teacher_top_k >= vocab_size):
        asked = "for its whole distribution over the student's tokens"
    elif needs.renormalised_rows:
        asked = "for a distribution without a tail"
    else:
        return
    raise ConfigError(
        f"{roles[0]}.tokenizer=own: policy {kind} asks it {asked}, and some of its distribution is on no token of the "
        "student: use opd or spot, distill with policy.support=teacher and policy.tail=true, or kd with "
        "policy.forward_kl_weight=0"
    )


def of_student(config: Config, student: Capabilities) -> dict[str, Capabilities]:
    """Return what teachers offer that the student's servers answer for, by role. Of a frozen one they only score."""
    base = msgspec.structs.replace(
        student, generation=False, candidate_logprobs="none", max_position_top_k=0, max_generation_top_k=0
    )
    return {role: student if role in config.following else base for role in config.served_by_student}


def _too_few_candidates(config: Config, needs: PolicyNeeds, role: str, teacher: Capabilities) -> str:
    if teacher.max_top_k == 0:
        return (
            f"{role}.backend ({teacher.server}) scores no given tokens, policy {config.policy.kind} needs that: give "
            f"another {role}.backend, or use policy kd with policy.forward_kl_weight=0"
            + (f" ({teacher.unscored})" if teacher.unscored else "")
        )
    key = f"lower policy.{needs.teacher_top_k_key} to {teacher.max_top_k} or " if needs.teacher_top_k_key else ""
    return (
        f"{role}.backend ({teacher.server}) serves top-{teacher.max_top_k}, policy {config.policy.kind} needs "
        f"top-{needs.teacher_top_k}: {key}raise what the server serves (such as its --max-logprobs, and "
        f"{role}.backend.top_k where that is set)"
    )


def _at_another_temperature(
    config: Config, needs: PolicyNeeds, found: Mapping[str, Capabilities]
) -> list[tuple[bool, str]]:
    """Return the complaints about log-probabilities at temperature 1 beside rollouts at another, likewise."""
    given = [("student", found["student"].generation_temperature, "sampled tokens")]
    if needs.teacher_scores:
        given += [
            (role, each.score_temperature, "given tokens")
            for role, each in found.items()
            if teacher_name(role) is not None
        ]
    if needs.reference or "reference" in found:
        role = "reference" if "reference" in found else "student"  # whose base it is then
        given.append((role, found[role].score_temperature, "given tokens"))
    return [
        (convention == "one" and config.temperature(role) != 1.0,
         f"sampling.temperature={config.temperature(role):g}: {role}.backend "
         f"({found[role].server}) gives log-probabilities of {what} at temperature 1 only: set it to 1")
        for role, convention, what in given
    ]  # fmt: skip


def _context_too_small(config: Config, needs: PolicyNeeds, found: Mapping[str, Capabilities]) -> list[tuple[bool, str]]:
    evaluation = config.evaluation
    asked = [(role, served, *context_needed(config, needs, role)) for role, served in found.items()]
    if evaluation is not None:
        tokens = max(each.max_response_tokens or evaluation.max_response_tokens for each in evaluation.sets().values())
        asked.append(("student", found["student"], tokens + 1, f"evaluation.max_response_tokens={tokens} and a prompt"))
    return [
        (served.max_context_tokens < tokens, f"{role}.backend serves a context of {served.max_context_tokens} tokens, "
         f"fewer than {what}: raise {role}.backend.max_context_tokens or lower those")
        for role, served, tokens, what in asked
    ]  # fmt: skip


def context_needed(config: Config, needs: PolicyNeeds, role: str) -> tuple[int, str]:
    """Return the tokens of a role's longest prompt in training and of a response together, and the keys in words."""
    tokens, words = longest_prompt(config, needs, role)
    response = config.sampling.max_response_tokens
    return tokens + response, f"{words} + sampling.max_response_tokens={response}"


def longest_prompt(config: Config, needs: PolicyNeeds, role: str) -> tuple[int, str]:
    """Return the tokens of the longest prompt that a role reads in training, and the key that says so.

    A teacher may read longer ones than the student: those of `prompt.teacher`, or of the policy's own making.
    """
    given = {"sampling.max_prompt_tokens": config.sampling.max_prompt_tokens}
    if teacher_name(role) is not None:
        given["PolicyNeeds.teacher_prompt_tokens"] = needs.teacher_prompt_tokens
        if (own := config.teacher_prompt(role)) is not None:
            key = f"{role}.prompt" if getattr(config.models[role], "prompt", None) is not None else "prompt.teacher"
            given[f"{key}.max_tokens"] = own.max_tokens
    key = max(given, key=lambda each: given[each])
    return given[key], f"{key}={given[key]}"


def sums_ends(config: Config, needs: PolicyNeeds, student: ModelFiles, teacher: ModelFiles) -> bool:
    """Whether a teacher is asked for its other end tokens too, to sum their probabilities.

    That is so with `stages.score.end_token: sum`, unless both models end responses with the same token.
    """
    if needs.teacher_top_k == 0:
        return False
    ends = (student.vocabulary.end_token_ids, teacher.vocabulary.end_token_ids)
    if student.vocabulary.fingerprint != teacher.vocabulary.fingerprint:  # it has its own tokenizer
        return config.stages.score.end_token == "sum" and len(ends[1]) > 1
    return EndTokens(*ends, config.stages.score.end_token).may_sum
