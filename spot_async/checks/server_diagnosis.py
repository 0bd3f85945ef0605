"""Finds out what one server of a run does, and what of it is unsafe. `discovery.py` knows how to ask.

A fact that could not be asked for is None, never a guess.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from spot_async.base.retry import CAPABILITIES_TIMEOUT_S, no_room
from spot_async.checks import discovery
from spot_async.checks.agreement import TOP_K
from spot_async.checks.capabilities import context_needed
from spot_async.checks.discovery import Asked, Noise
from spot_async.checks.plan import TrainPlan, chat_template
from spot_async.checks.score_rows import MOST_MASKED, check_score_rows
from spot_async.config import Config, ModelConfig, backend_section, teacher_name
from spot_async.errors import FailureClass, RequestError
from spot_async.models.files import ModelFiles
from spot_async.models.hub import local_path
from spot_async.models.precision import FLOAT32, NOISE_MARGIN, noise_nats, precision
from spot_async.models.vocabulary import Vocabulary
from spot_async.protocols import Generator, Scorer, SharedAddress
from spot_async.types import Capabilities, FloatArray, LogprobTemperature

RESPONSE_TOKENS = 24
SLOW_ROUND_TRIP_S = 0.25
# How much less likely the student's tokens may be behind a teacher's own prompt. On the running sum a wrong template
# costs the first token 5 to 14 nats; another problem costs the other tokens 2.5 to 5 nats, and the first one nothing.
TEMPLATE_NATS = 3.0
CONTEXT_NATS = 1.5
UNLIKELY = 1e-6  # a p-value by which an honest server is never refused

AS_SAID = (  # of `Capabilities`, facts by the same name
    *("server", "model", "vocab_size", "vocab_fingerprint", "exact_entropy", "candidate_logprobs", "token_id_prompts"),
    *("logprob_convention", "prefix_caching", "abort", "weight_update", "in_flight_updates", "weight_transport"),
)

Fact: TypeAlias = str | int | float | bool | None
T = TypeVar("T")


@dataclass
class ServerDiagnosis:
    """One server's facts while they are gathered."""

    role: str
    name: str
    backend: Any
    said: Capabilities
    config: Config
    plan: TrainPlan
    asked: Asked
    facts: dict[str, Fact] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    noise_nats: float = 0.0  # between readings of the same row
    is_full: bool = False  # it throttled a question until its deadline

    async def unless_full(self, ask: Callable[[], Awaitable[None]]) -> None:
        """Do `run` or `time`. A server that has no room for a question is refused, and asked no more."""
        if self.is_full:
            return
        try:
            await ask()
        except RequestError as error:
            self.is_full = True
            self.refusals.append(no_room(self.section, error))

    async def run(self) -> None:
        self._state_what_is_said()
        self._judge_model()
        self._judge_candidates()
        if isinstance(self.backend, SharedAddress):
            await self._discover_behind(self.backend)
        if self._scores:
            await self._discover_scores()
        if self._samples and self.said.sampled_token_ids:
            await self._discover_generations()
        self._judge_temperatures()

    def _state_what_is_said(self) -> None:
        said, needs = self.said, self.plan.policy.needs
        files = self._files
        student = self.plan.student
        self.facts |= {
            "role": self.role,
            "backend": self._model.backend.kind,
            **{name: getattr(said, name) for name in AS_SAID},
            "vocab_rows_left_out": self.plan.common.left_out(self.role),
            "vocab_as_students": said.vocab_fingerprint == student.vocabulary.fingerprint,
            "context_tokens": said.max_context_tokens,
            "context_tokens_needed": context_needed(self.config, needs, self.role)[0],
            "score_top_k": said.max_top_k,
            "score_top_k_needed": needs.teacher_top_k if self._is_teacher else int(self.role == "reference"),
            "generation_top_k": said.max_generation_top_k,
            "position_top_k": said.max_position_top_k,
            "sampled_token_ids": said.sampled_token_ids if self._samples else None,
            "score_temperature": said.score_temperature if self._scores else None,
            "generation_temperature": said.generation_temperature if self._samples else None,
            "seeds": said.seeds if self._samples else None,
            "weights_checked": said.weights_checked if said.weight_update else None,
            "round_trip_s": None,
            "version": None if said.version is None else str(said.version),
            "end_tokens": ", ".join(_end_tokens(files.vocabulary)),
            "end_token_scores": self.config.stages.score.end_token,
            "end_tokens_as_students": files.vocabulary.end_token_ids[0] == student.vocabulary.end_token_ids[0],
            "chat_template_as_students": chat_template(files) == chat_template(student),
            "chat_template_used": self.config.prompt.template == self.role,
        }

    def _judge_candidates(self) -> None:
        """Warn of a teacher that answers for one position at a time, since a policy may ask for all."""
        if not self._is_teacher or self.said.candidate_logprobs != "single":
            return
        if self.plan.policy.needs.teacher_candidates:
            self.warnings.append(
                f"{self.section}: log-probabilities of chosen tokens take it one request a position, so up to "
                f"{self.config.sampling.max_response_tokens} requests a response: compare on the teacher's own top-k "
                "instead"
            )

    def _judge_model(self) -> None:
        """Warn of a server that serves another model than the role's.

        A server that runs already may have been started with the student's model, say. If the vocabularies are equal,
        nothing else shows that. The student's server is left out, since it is sent its weights; so are servers
        elsewhere, whose model is no directory on this machine.
        """
        served, meant = self.said.model, self._model.model
        if self.role == "student" or not os.path.isdir(served) or os.path.samefile(served, local_path(meant)):  # noqa: PTH112, PTH121
            return
        self.warnings.append(
            f"{self.section}: the server serves {served}, but {self.role}.model is {meant}: scores are those of the "
            "former; give the server that is meant, or its directory"
        )

    async def _discover_behind(self, backend: SharedAddress) -> None:
        """Refuse a student whose weights would reach one of several servers; warn where these are not alike."""
        deadline = asyncio.get_running_loop().time() + CAPABILITIES_TIMEOUT_S
        found = await backend.behind_url(deadline=deadline)
        if found is None:
            return
        self.facts["servers_behind_url"] = found.servers
        self.facts["session_header"] = found.session_header
        self.facts["session_keeps_server"] = found.session_keeps
        if found.servers is None or found.servers == 1:
            return
        line = f"{self.section}: at least {found.servers} servers answer at one url"
        if self.role == "student":
            self.refusals.append(
                f"{line}, and new weights would reach one of them: give a list of urls, each server's own"
            )
        elif unlike := [what for what in found.differing if what != "process"]:
            self.warnings.append(f"{line}, which differ in their {' and '.join(unlike)}: scores are those of either")

    async def _discover_scores(self) -> None:
        top_k = min(TOP_K, self.said.max_top_k) if self.said.every_position else self._run_top_k
        noise = await self._ask("scores again", discovery.score_noise(self.backend, self.asked, top_k))
        self._note_noise(noise)
        await self._check_rows(noise)
        if self._is_teacher and self.asked.teacher_prompts:
            await self._compare_prompts()
        self.facts["score_temperature_probed"] = await self._ask(
            "scores at two temperatures", discovery.score_temperature(self.backend, self.asked, self.noise_nats)
        )

    async def _check_rows(self, noise: Noise | None) -> None:
        """Refuse scores that are no log-probabilities of the given tokens, or of too few; warn if nobody can tell."""
        are_used = not self._is_teacher or self.plan.policy.needs.teacher_top_k > 0
        run_top_k = self._run_top_k
        top_k = max(run_top_k, min(TOP_K, self.said.max_top_k) if self.said.every_position else 1)
        checking = check_score_rows(
            self.backend,
            self.asked,
            vocab_size=self.said.vocab_size,
            top_k=top_k,
            noise_nats=0.0 if noise is None else noise.largest,
            special={*self._files.vocabulary.tokenizer.all_special_ids, *self.asked.stop_token_ids},
            run_top_k=top_k if self.said.every_position else run_top_k,
        )
        found = await self._ask("scores of two texts that differ in a token", checking, decides=are_used)
        self.facts["masked_share"] = None if found is None else found.masked
        self.facts["score_rows"] = None if found is None else found.order
        if found is None:
            return
        lines = [f"{self.section}: {fault}" for fault in found.faults]
        if found.masked is not None and found.masked > MOST_MASKED:
            line = (
                f"{self.section}: {found.masked:.0%} of the positions of the student's responses are masked: they "
                f"would teach nothing{self._why_masked}; use a server that takes and names tokens by id"
            )
            if self.plan.policy.needs.teacher_responses:  # these are trained on, and perhaps easier to read
                self.warnings.append(line)
            else:
                lines.append(line)
        if found.alike is not None and self._is_teacher:
            lines.append(f"{self.section}: {found.alike}: it has nothing to teach; serve the model that was trained")
        elif found.alike is not None:  # a student may start so
            self.warnings.append(f"{self.section}: {found.alike}")
        (self.refusals if are_used else self.warnings).extend(lines)
        self.warnings += [f"{self.section}: {note}" for note in found.notes]
        if found.order is None and found.alike is None and not found.faults:
            self.warnings.append(
                f"{self.section}: it could not be checked that scores are of the rows that predict their tokens"
                f"{self._why_masked}: compare some with the model's own"
            )

    async def _compare_prompts(self) -> None:
        """Compare how well the teacher's own prompts explain what the student wrote with how well the student's do.

        The first token shows another template or thinking mode. Behind a context that is another problem's the first
        token may be as likely as ever, and only the other tokens do not follow.
        """
        asking = discovery.explained(self.backend, self.asked, self.asked.teacher_prompts)
        own = await self._ask("responses behind its own prompts", asking)
        asking = discovery.explained(self.backend, self.asked, self.asked.prompts)
        students = await self._ask("responses behind the student's prompts", asking)
        if own is None or students is None:
            return
        self.facts |= {
            "first_token_logprob": own.first,
            "first_token_logprob_students_prompt": students.first,
            "other_tokens_logprob": own.rest,
            "other_tokens_logprob_students_prompt": students.rest,
        }
        if own.first is not None and students.first is not None and students.first - own.first > TEMPLATE_NATS:
            self.warnings.append(
                f"prompt.teacher: the first token of responses has log-probability {own.first:.3g} behind the "
                f"teacher's prompt, and {students.first:.3g} behind the student's: another template or "
                "thinking mode does that, or a text that asks for another beginning; compare them with those of prompt"
            )
        elif own.rest is not None and students.rest is not None and students.rest - own.rest > CONTEXT_NATS:
            self.warnings.append(
                f"prompt.teacher: tokens after the first have log-probability {own.rest:.3g} behind the teacher's "
                f"prompt, and {students.rest:.3g} behind the student's: responses do not follow from what it reads: "
                "it is another problem's, or of a form that the teacher does not know"
            )

    @property
    def _why_masked(self) -> str:
        if not self.said.token_id_prompts:
            return " (the server reads text, and cuts it into other tokens or names some by a text that several have)"
        return "" if self.said.every_position else " (the server names tokens by text, and several have the same)"

    async def _discover_generations(self) -> None:
        backend, asked = self.backend, self.asked
        if self.said.max_generation_top_k:
            top_k = min(TOP_K, self.said.max_generation_top_k)
            if self.facts.get("noise_alone_nats") is None:
                self._note_noise(await self._ask("samples again", discovery.generation_noise(backend, asked, top_k)))
            counting = discovery.truncation_p_value(backend, asked, RESPONSE_TOKENS, top_k)
            self._judge_samples(await self._ask("samples to count", counting, decides=self.role == "student"))
            self.facts["generation_temperature_probed"] = await self._ask(
                "samples at two temperatures", discovery.generation_temperature(backend, asked, self.noise_nats)
            )
        honours = await self._ask("a seed twice", discovery.honours_seeds(backend, asked, RESPONSE_TOKENS))
        self.facts["seeds_probed"] = honours
        if honours is False and self.role == "student":
            self.warnings.append(
                f"{self.section} does not honour seeds: a run cannot be repeated (vLLM does; SGLang needs "
                "--enable-deterministic-inference)"
            )
        if self._scores:
            # In 16 bits a few tokens tell little, since most are sure: the likeliest beside them are compared as well.
            beside = min(TOP_K, self.said.max_top_k, self.said.max_generation_top_k)
            top_k = 0 if precision(self.said.dtype) is FLOAT32 else beside
            comparing = discovery.spoken_and_scored(backend, backend, asked, RESPONSE_TOKENS, top_k=top_k)
            self._note_disagreement(await self._ask("its own samples", comparing))

    async def time(self) -> None:
        if not (self._scores or self._samples):
            return
        asking = discovery.round_trip_s(self.backend, self.asked, scores=self._scores)
        seconds = await self._ask("small requests", asking)
        self.facts["round_trip_s"] = seconds
        is_near = all(each.runs_here for each in self._model.backend.servers())  # then it is the machine that is slow
        if seconds is not None and seconds > SLOW_ROUND_TRIP_S and not is_near:
            self.warnings.append(
                f"{self.section} answers the smallest request after {seconds:.2f} s: place it nearer, or raise "
                "the concurrency of its stages"
            )

    def _note_noise(self, noise: Noise | None) -> None:
        self.facts["noise_alone_nats"] = None if noise is None else noise.alone
        self.facts["noise_together_nats"] = None if noise is None else noise.largest
        if noise is None:
            return
        self.noise_nats = noise.largest
        served = precision(self.said.dtype)
        if (nats := served.judged_nats(noise.ranges)) > served.largest_nats:
            self.warnings.append(
                f"{self.section}: the same row differs by up to {nats:.2g} nats between requests: serve "
                "it in a wider type, or without what batches requests differently"
            )
        stated = getattr(self._model.backend, "logprob_noise_nats", None)
        if stated is not None and noise.largest > stated:
            self.warnings.append(
                f"{self.role}.backend.logprob_noise_nats={stated:g} is less than was measured: raise it to "
                f"{noise_nats(noise.ranges):.2g} or leave it out"
            )

    def _judge_samples(self, p_value: float | None) -> None:
        """Refuse a student that samples only the top of the distributions that it states; warn of another model."""
        self.facts["truncation_p_value"] = p_value
        if p_value is not None and p_value < UNLIKELY:
            line = (
                f"{self.section}: it samples only the likeliest tokens of the distributions that it states (by chance "
                f"with p < {UNLIKELY:g}): it, or a proxy before it, sets a top-k or temperature over the request's; "
                "start it without"
            )
            (self.refusals if self.role == "student" else self.warnings).append(line)

    def _note_disagreement(self, pair: tuple[FloatArray, FloatArray] | None) -> None:
        """Refuse a server whose samples are not of the distribution that it scores.

        What differs as much between readings of one row, or is stated to be noise, counts as noise.
        """
        served = precision(self.said.dtype)
        stated = getattr(self._model.backend, "logprob_noise_nats", None)
        noise = max(NOISE_MARGIN * self.noise_nats, stated or 0.0)
        self.facts["disagreement_nats"], self.facts["disagreement_limit_nats"] = None, max(served.largest_nats, noise)
        if pair is None or not pair[0].size:
            return
        spoken, scored = pair
        self.facts["disagreement_nats"] = served.judged_nats(spoken[:, 0] - scored[:, 0])
        beside = discovery.in_common([spoken[:, 1:]], [scored[:, 1:]])
        fault = served.fault(scored[:, 0], spoken[:, 0], noise_nats=noise) or served.fault(
            *beside[::-1], noise_nats=noise
        )
        if fault is not None:
            self.refusals.append(
                f"{self.section}: log-probabilities of tokens as they were sampled and as they are scored differ "
                f"{fault}: these are not the same rows, or the server bends what it samples (penalties, biases, "
                "processors of logits); start it without, or use another "
                f"{self.role}.backend.kind, or version"
            )

    def _judge_temperatures(self) -> None:
        """Compare what servers say of temperatures with what was seen. It is unsafe only if the run's is not 1."""
        temperature = self.config.temperature(self.role)
        for name in ("score_temperature", "generation_temperature"):
            said, seen = self.facts[name], self.facts.get(f"{name}_probed")
            if said is None or seen is None or said == seen:
                continue
            line = (
                f"{self.section} says that its log-probabilities are at {_words(said)}, but they are at {_words(seen)}"
            )
            if temperature != 1.0:
                self.refusals.append(f"{line}: set sampling.temperature={temperature:g} to 1")
            else:
                self.warnings.append(f"{line}: keep sampling.temperature at 1")

    async def _ask(self, what: str, asking: Awaitable[T], *, decides: bool = False) -> T | None:
        """Return the answer; None if the request fails: a refusal where the answer `decides`, else a warning.

        Raises the `RequestError` of a server that had no room for it until its deadline.
        """
        try:
            return await asking
        except RequestError as error:
            if error.failure_class is FailureClass.THROTTLED:
                raise
            lines = self.refusals if decides else self.warnings
            lines.append(f"{self.section} could not be asked for {what}: {error}")
            return None

    @property
    def section(self) -> str:
        """The key of the server's settings, for messages."""
        return backend_section(self.role, self.name)

    @property
    def _scores(self) -> bool:
        return self.said.max_top_k > 0 and isinstance(self.backend, Scorer)

    @property
    def _samples(self) -> bool:
        """Whether it generates. A teacher's backend may have no such method, and yet say that it can."""
        return self.said.generation and isinstance(self.backend, Generator)

    @property
    def _model(self) -> ModelConfig:
        return role_model(self.config, self.plan, self.role)

    @property
    def _files(self) -> ModelFiles:
        """The role's model directory; a reference has the student's."""
        return self.plan.teachers.get(self.role, self.plan.student)

    @property
    def _run_top_k(self) -> int:
        """What the run asks this server's scores for."""
        needs = self.plan.policy.needs
        asked = needs.teacher_top_k if needs.asked_top_k is None else needs.asked_top_k
        return min(self.said.max_top_k, asked) if self._is_teacher else 1

    @property
    def _is_teacher(self) -> bool:
        return teacher_name(self.role) is not None


def role_model(config: Config, plan: TrainPlan, role: str) -> ModelConfig:
    others = config.teachers_by_role | ({} if plan.reference is None else {"reference": plan.reference})
    return others.get(role, config.student)


def _words(convention: Fact | LogprobTemperature) -> str:
    return "the request's temperature" if convention == "request" else "temperature 1"


def _end_tokens(vocabulary: Vocabulary) -> Iterator[str]:
    for token_id in vocabulary.end_token_ids:
        yield f"{vocabulary.tokenizer.convert_ids_to_tokens(token_id)} ({token_id})"
