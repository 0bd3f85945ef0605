"""Runs a policy on simulated services and virtual time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from spot_async.config import SamplingConfig, StageConfig, StagesConfig
from spot_async.loop.admission import AdmissionBook
from spot_async.loop.orchestrator import Orchestrator, OrchestratorSettings
from spot_async.policies.kd import KdPolicy
from spot_async.stages.stages import Services, Stages
from spot_async.testing.services import (
    END_TOKEN,
    VOCAB_SIZE,
    SimulatedStudent,
    SimulatedTeacher,
    SimulatedTrainer,
    SimulatedVerifier,
)
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.types import (
    PolicyContext,
    Problem,
    Prompt,
    Verdict,
)

PROBLEMS = 32


class PlainVocabulary:
    """What `Stages` needs of a vocabulary. Text is the ids, or the same `token` for each."""

    def __init__(self, end_token_ids=(END_TOKEN,), token=None):
        self.end_token_ids = end_token_ids
        self.token = token

    def decode(self, token_ids):
        return " ".join(map(str, token_ids.tolist())) if self.token is None else self.token * len(token_ids)


class PlainTokenizer:
    all_special_ids = (0, 1)
    added_tokens_decoder: ClassVar = {}
    prefix = "token"

    def get_vocab(self):
        return {f"{self.prefix}-{i}": i for i in range(VOCAB_SIZE)}

    def decode(self, token_ids):
        return f"word{token_ids[0]}"


@dataclass
class Journal:
    results: list = field(default_factory=list)
    dead: list = field(default_factory=list)
    book: AdmissionBook | None = None

    def iteration_finished(self, result):
        self.results.append(result)

    def prompt_died(self, prompt, reason):
        self.dead.append((prompt.ordinal, reason))


class Counting(SimulatedStudent):
    """A student that counts how often it was asked for each prompt."""

    def __init__(self):
        super().__init__()
        self.asked = Counter()

    async def generate(self, prompt_ids, sampling, **rest):
        self.asked[prompt_ids.tobytes()] += 1
        return await super().generate(prompt_ids, sampling, **rest)


class Undecided(SimulatedVerifier):
    """A verifier that never decides one response in six, however often it is asked."""

    async def verify(self, problem, response_text, *, deadline):
        verdict = await super().verify(problem, response_text, deadline=deadline)
        return Verdict.TIMEOUT if sum(map(int, response_text.split())) % 6 == 0 else verdict


def context(**settings):
    return PolicyContext(vocab_size=VOCAB_SIZE, tokenizer=PlainTokenizer(), **settings)


def prompts(answer="1"):
    """Return prompts; every epoch has every problem."""
    for ordinal in range(100 * PROBLEMS):
        index = ordinal % PROBLEMS
        problem = Problem(id=f"p{index}", text=f"problem {index}", answer=answer)
        yield Prompt(ordinal=ordinal, problem=problem, token_ids=np.arange(2, 2 + 5 + index, dtype=np.int32))


def run(
    policy,
    *,
    iterations=2,
    batch_size=16,
    capacity=16,
    capacity_bytes=1 << 30,
    max_staleness=0,
    narrow=None,
    verifier=None,
    end_token=END_TOKEN,
    token=None,
    answer="1",
    **services,
):
    """Run on virtual time; return trainer, journal and stages.

    The stage `narrow` has one request in flight at a time. `end_token` is the student's, `token` every token's text.
    """
    student = SimulatedStudent()
    needs = policy.needs
    offered = {
        "scorer": SimulatedTeacher() if needs.teacher_top_k else None,
        "teacher_generator": SimulatedStudent() if needs.teacher_responses else None,
        "reference": SimulatedTeacher() if needs.reference else None,
        **services,
    }
    limits = dict.fromkeys(StagesConfig.model_fields, StageConfig(timeout_s=600.0))
    limits |= {narrow: StageConfig(concurrency=1, timeout_s=600.0)} if narrow else {}
    stages = Stages(
        Services(generator=student, candidate_scorer=student, verifier=verifier or SimulatedVerifier(), **offered),
        StagesConfig(**limits),
        SamplingConfig(max_response_tokens=64),
        student=PlainVocabulary((end_token,), token),
        teacher=PlainVocabulary(),
        run_seed=0,
        max_running_prompts=capacity,
        max_probes_per_prompt=needs.probes_per_prompt,
        max_samples_per_prompt=needs.samples_per_prompt,
    )
    journal, trainer = Journal(), SimulatedTrainer()
    orchestrator = Orchestrator(
        OrchestratorSettings(
            iterations=iterations,
            batch_size=batch_size,
            max_staleness=max_staleness,
            capacity_prompts=capacity,
            capacity_bytes=capacity_bytes,
            max_response_tokens=64,
            vocab_size=VOCAB_SIZE,
            weight_update_timeout_s=60.0,
            max_dead_share=0.1,
        ),
        prompts=prompts(answer),
        policy=policy,
        stages=stages,
        trainer=trainer,
        weight_sinks=[student],
        observer=journal,
    )
    journal.book = orchestrator.book
    run_on_virtual_time(orchestrator.run())
    return trainer, journal, stages


def kd(**settings):
    return KdPolicy(KdPolicy.Settings(**settings), context())
