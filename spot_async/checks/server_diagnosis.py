"""Finds out what one server of a run does, and what of it is unsafe. `questions.py` knows how to ask.

`_probes` is the list of what is asked. The answers are `ServerFacts`, and the lines that are written here follow from
them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType

from spot_async.base.retry import CAPABILITIES_TIMEOUT_S, no_room
from spot_async.checks import questions
from spot_async.checks.agreement import TOP_K
from spot_async.checks.capabilities import context_needed
from spot_async.checks.own_tokenizers import read_responses
from spot_async.checks.plan import TrainPlan
from spot_async.checks.plan_inputs import chat_template
from spot_async.checks.questions import Asked
from spot_async.checks.score_rows import MOST_MASKED, RowFindings, check_score_rows
from spot_async.checks.server_facts import Disagreement, ServerFacts, known
from spot_async.config import Config, ModelConfig, backend_section, teacher_name
from spot_async.errors import FailureClass, RequestError
from spot_async.models.files import ModelFiles
from spot_async.models.hub import local_path
from spot_async.models.precision import FLOAT32, NOISE_MARGIN, noise_nats, precision
from spot_async.models.vocabulary import Vocabulary
from spot_async.protocols import Generator, Scorer, SharedAddress
from spot_async.types import BehindUrl, Capabilities

RESPONSE_TOKENS = 24
SLOW_ROUND_TRIP_S = 0.25
# How much less likely the student's tokens may be behind a teacher's own prompt. On the running sum a wrong template
# costs the first token 5 to 14 nats; another problem costs the other tokens 2.5 to 5 nats, and the first one nothing.
TEMPLATE_NATS = 3.0
CONTEXT_NATS = 1.5
UNLIKELY = 1e-6  # a p-value by which an honest server is never refused


class Probe(NamedTuple):
    """A question to a server."""

    fact: str  # of `ServerFacts`, which the answer is
    what: str  # it is asked for, in words
    asking: Awaitable[Any]
    decides: bool = False  # a server that does not answer is refused


@dataclass
class ServerDiagnosis:
    """Asks one server, and says what follows from its answers."""

    role: str
    name: str
    backend: Any
    said: Capabilities
    config: Config
    plan: TrainPlan
    asked: Asked
    facts: ServerFacts = field(init=False)
    refusals: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    is_full: bool = False  # it throttled a question until its deadline

    def __post_init__(self) -> None:
        said, needs, student, files = self.said, self.plan.policy.needs, self.plan.student, self._files
        self.facts = ServerFacts(
            role=self.role,
            backend=self._model.backend.kind,
            said=said,
            scores=said.max_top_k > 0 and isinstance(self.backend, Scorer),
            # A teacher's backend may have no such method, and yet say that it can.
            samples=said.generation and isinstance(self.backend, Generator),
            context_tokens_needed=context_needed(self.config, needs, self.role)[0],
            score_top_k_needed=needs.teacher_top_k if self._is_teacher else int(self.role == "reference"),
            vocab_rows_left_out=self.plan.common.left_out(self.role),
            vocab_as_students=said.vocab_fingerprint == student.vocabulary.fingerprint,
            end_tokens=", ".join(_end_tokens(files.vocabulary)),
            end_token_scores=self.config.stages.score.end_token,
            end_tokens_as_students=files.vocabulary.end_token_ids[0] == student.vocabulary.end_token_ids[0],
            chat_template_as_students=chat_template(files) == chat_template(student),
            chat_template_used=self.config.prompt.template == self.role and self.role not in self.plan.own_tokens,
        )

    async def ask(self, probes: Iterator[Probe]) -> None:
        """Learn the answers. A server that has no room for a question is refused, and asked no more."""
        if self.is_full:
            return
        for probe in probes:
            learned: dict[str, Any] = {probe.fact: None}
            try:
                learned[probe.fact] = await probe.asking
            except RequestError as error:
                if error.failure_class is FailureClass.THROTTLED:
                    self.is_full = True
                    self.refusals.append(no_room(self.section, error))
                    return
                lines = self.refusals if probe.decides else self.warnings
                lines.append(f"{self.section} could not be asked for {probe.what}: {error}")
            self.facts = replace(self.facts, **learned)

    def probes(self) -> Iterator[Probe]:
        """Yield the questions in their order. What was answered decides which come next, and how they are asked."""
        backend, asked, said = self.backend, self.asked, self.said
        if isinstance(backend, SharedAddress):
            yield Probe("behind", "which servers answer at its url", self._servers_behind(backend), decides=True)
        if self.facts.scores:
            top_k = min(TOP_K, said.max_top_k) if said.every_position else self._run_top_k
            yield Probe("noise", "scores again", questions.score_noise(backend, asked, top_k))
            what = "scores of two texts that differ in a token"
            yield Probe("rows", what, self._rows(), decides=self._scores_are_used)
            if (own_tokens := self.plan.own_tokens.get(self.role)) is not None:
                least = int(said.every_position)  # as `BoundTeacher.score` asks
                reading = read_responses(own_tokens, backend, asked, self._run_top_k, least=least)
                yield Probe("responses", "scores of the student's responses", reading)
            if self._is_teacher and asked.teacher_prompts:
                asking = questions.explained(backend, asked, asked.teacher_prompts)
                yield Probe("own_prompts", "responses behind its own prompts", asking)
                asking = questions.explained(backend, asked, asked.prompts)
                yield Probe("students_prompts", "responses behind the student's prompts", asking)
            temperature = questions.score_temperature(backend, asked, self._noise_nats)
            yield Probe("score_temperature_probed", "scores at two temperatures", temperature)
        if not (self.facts.samples and said.sampled_token_ids):
            return
        top_k = min(TOP_K, said.max_generation_top_k)
        if top_k:
            if known(self.facts.noise) is None:
                yield Probe("noise", "samples again", questions.generation_noise(backend, asked, top_k))
            counting = questions.truncation_p_value(backend, asked, RESPONSE_TOKENS, top_k)
            yield Probe("truncation_p_value", "samples to count", counting, decides=self.role == "student")
            temperature = questions.generation_temperature(backend, asked, self._noise_nats)
            yield Probe("generation_temperature_probed", "samples at two temperatures", temperature)
        yield Probe("seeds_probed", "a seed twice", questions.honours_seeds(backend, asked, RESPONSE_TOKENS))
        if self.facts.scores:
            yield Probe("disagreement", "its own samples", self._disagreement(min(top_k, said.max_top_k)))

    def time(self) -> Iterator[Probe]:
        """Yield what is timed, for which a server must have the machine to itself."""
        if self.facts.scores or self.facts.samples:
            asking = questions.round_trip_s(self.backend, self.asked, scores=self.facts.scores)
            yield Probe("round_trip_s", "small requests", asking)

    async def _servers_behind(self, backend: SharedAddress) -> BehindUrl | UnsetType:
        deadline = asyncio.get_running_loop().time() + CAPABILITIES_TIMEOUT_S
        return await backend.behind_url(deadline=deadline) or UNSET  # one that we started is not asked

    async def _rows(self) -> RowFindings:
        said, run_top_k = self.said, self._run_top_k
        top_k = max(run_top_k, min(TOP_K, said.max_top_k) if said.every_position else 1)
        return await check_score_rows(
            self.backend,
            self.asked,
            vocab_size=said.vocab_size,
            top_k=top_k,
            noise_nats=self._noise_nats,
            special={*self._files.vocabulary.tokenizer.all_special_ids, *self.asked.stop_token_ids},
            run_top_k=top_k if said.every_position else run_top_k,
        )

    async def _disagreement(self, beside: int) -> Disagreement:
        """Compare its samples with their scores, and the `beside` likeliest tokens of each.

        What differs as much between readings of one row, or is stated to be noise, counts as noise.
        """
        served = precision(self.said.dtype)
        noise = max(NOISE_MARGIN * self._noise_nats, self._stated_noise_nats or 0.0)
        spoken, scored = await questions.spoken_and_scored(
            self.backend,
            self.backend,
            self.asked,
            RESPONSE_TOKENS,
            # In 16 bits a few tokens tell little, since most are sure.
            top_k=0 if served is FLOAT32 else beside,
        )
        likeliest = questions.in_common([scored[:, 1:]], [spoken[:, 1:]])
        fault = served.fault(scored[:, 0], spoken[:, 0], noise_nats=noise) or served.fault(*likeliest, noise_nats=noise)
        nats = served.judged_nats(spoken[:, 0] - scored[:, 0]) if spoken.size else None
        return Disagreement(nats, max(served.largest_nats, noise), fault)

    def judge(self) -> None:
        """Note what follows from the facts."""
        self._judge_candidates()
        self._judge_model()
        self._judge_address()
        self._judge_noise()
        self._judge_rows()
        self._judge_prompts()
        self._judge_samples()
        self._judge_temperatures()
        self._judge_round_trip()

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

    def _judge_address(self) -> None:
        """Refuse a student whose weights would reach one of several servers; warn where these are not alike."""
        behind = known(self.facts.behind)
        if behind is None or behind.servers is None or behind.servers == 1:
            return
        line = f"{self.section}: at least {behind.servers} servers answer at one url"
        if self.role == "student":
            self.refusals.append(
                f"{line}, and new weights would reach one of them: give a list of urls, each server's own"
            )
        elif unlike := [what for what in behind.differing if what != "process"]:
            self.warnings.append(f"{line}, which differ in their {' and '.join(unlike)}: scores are those of either")

    def _judge_noise(self) -> None:
        noise, served, stated = known(self.facts.noise), precision(self.said.dtype), self._stated_noise_nats
        if noise is None:
            return
        if (nats := served.judged_nats(noise.ranges)) > served.largest_nats:
            self.warnings.append(
                f"{self.section}: the same row differs by up to {nats:.2g} nats between requests: serve "
                "it in a wider type, or without what batches requests differently"
            )
        if stated is not None and noise.largest > stated:
            self.warnings.append(
                f"{self.role}.backend.logprob_noise_nats={stated:g} is less than was measured: raise it to "
                f"{noise_nats(noise.ranges):.2g} or leave it out"
            )

    def _judge_rows(self) -> None:
        """Refuse scores that are no log-probabilities of the given tokens, or of too few; warn if nobody can tell."""
        found = known(self.facts.rows)
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
        (self.refusals if self._scores_are_used else self.warnings).extend(lines)
        self.warnings += [f"{self.section}: {note}" for note in found.notes]
        if found.order is None and found.alike is None and not found.faults:
            self.warnings.append(
                f"{self.section}: it could not be checked that scores are of the rows that predict their tokens"
                f"{self._why_masked}: compare some with the model's own"
            )

    def _judge_prompts(self) -> None:
        """Judge how well the teacher's own prompts explain what the student wrote, beside how well the student's do.

        The first token shows another template or thinking mode. Behind a context that is another problem's the first
        token may be as likely as ever, and only the other tokens do not follow.
        """
        own, students = known(self.facts.own_prompts), known(self.facts.students_prompts)
        if own is None or students is None:
            return
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

    def _judge_samples(self) -> None:
        """Refuse a student that samples only the top of what it states, and a server that scores something else.

        The former is a warning of another model.
        """
        p_value, disagreement = known(self.facts.truncation_p_value), known(self.facts.disagreement)
        if p_value is not None and p_value < UNLIKELY:
            line = (
                f"{self.section}: it samples only the likeliest tokens of the distributions that it states (by chance "
                f"with p < {UNLIKELY:g}): it, or a proxy before it, sets a top-k or temperature over the request's; "
                "start it without"
            )
            (self.refusals if self.role == "student" else self.warnings).append(line)
        if known(self.facts.seeds_probed) is False and self.role == "student":
            self.warnings.append(
                f"{self.section} does not honour seeds: a run cannot be repeated (vLLM does; SGLang needs "
                "--enable-deterministic-inference)"
            )
        if disagreement is not None and disagreement.fault is not None:
            self.refusals.append(
                f"{self.section}: log-probabilities of tokens as they were sampled and as they are scored differ "
                f"{disagreement.fault}: these are not the same rows, or the server bends what it samples (penalties, "
                f"biases, processors of logits); start it without, or use another {self.role}.backend.kind, or version"
            )

    def _judge_temperatures(self) -> None:
        """Compare what servers say of temperatures with what was seen. It is unsafe only if the run's is not 1."""
        temperature = self.config.temperature(self.role)
        for said, seen in (
            (self.said.score_temperature, known(self.facts.score_temperature_probed)),
            (self.said.generation_temperature, known(self.facts.generation_temperature_probed)),
        ):
            if seen is None or said == seen:
                continue
            line = (
                f"{self.section} says that its log-probabilities are at {_words(said)}, but they are at {_words(seen)}"
            )
            if temperature != 1.0:
                self.refusals.append(f"{line}: set sampling.temperature={temperature:g} to 1")
            else:
                self.warnings.append(f"{line}: keep sampling.temperature at 1")

    def _judge_round_trip(self) -> None:
        seconds = self.facts.round_trip_s
        is_near = all(each.runs_here for each in self._model.backend.servers())  # then it is the machine that is slow
        if seconds is not None and seconds > SLOW_ROUND_TRIP_S and not is_near:
            self.warnings.append(
                f"{self.section} answers the smallest request after {seconds:.2f} s: place it nearer, or raise "
                "the concurrency of its stages"
            )

    @property
    def section(self) -> str:
        """The key of the server's settings, for messages."""
        return backend_section(self.role, self.name)

    @property
    def _scores_are_used(self) -> bool:
        return not self._is_teacher or self.plan.policy.needs.teacher_top_k > 0

    @property
    def _noise_nats(self) -> float:
        noise = known(self.facts.noise)
        return 0.0 if noise is None else noise.largest

    @property
    def _stated_noise_nats(self) -> float | None:
        stated: float | None = getattr(self._model.backend, "logprob_noise_nats", None)
        return stated

    @property
    def _why_masked(self) -> str:
        if not self.said.token_id_prompts:
            return " (the server reads text, and cuts it into other tokens or names some by a text that several have)"
        return "" if self.said.every_position else " (the server names tokens by text, and several have the same)"

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


def _words(convention: str) -> str:
    return "the request's temperature" if convention == "request" else "temperature 1"


def _end_tokens(vocabulary: Vocabulary) -> Iterator[str]:
    for token_id in vocabulary.end_token_ids:
        yield f"{vocabulary.tokenizer.convert_ids_to_tokens(token_id)} ({token_id})"
