"""Runs a policy over simulated services on virtual time, from prompts to trained batches.

    run = simulated_run(make_policy(MyPolicy, temperature=2.0), iterations=3)
    assert len(run.batches) == 3

Orchestrator and stages are the real ones. Everything else has a default; a test gives only what it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar

import numpy as np

from spot_async.base.events import Event
from spot_async.config import SamplingConfig, StageConfig, StagesConfig
from spot_async.errors import RequestError
from spot_async.loop.events import Evaluated, IterationFinished, PromptEnded
from spot_async.loop.orchestrator import Orchestrator, OrchestratorSettings
from spot_async.loop.publishing import LiveEvaluation
from spot_async.loop.resuming import Checkpoints, PromptLedger, Resumption
from spot_async.models.vocabulary import Vocabulary
from spot_async.protocols import BaseScorer, Policy, Scorer, Sleeper, Trainer, WeightSink
from spot_async.running.library import stages_for
from spot_async.stages.stages import Stages
from spot_async.testing.services import (
    END_TOKEN,
    VOCAB_SIZE,
    SimulatedStudent,
    SimulatedTeacher,
    SimulatedTrainer,
    SimulatedVerifier,
)
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.types import Capabilities, PolicyContext, Problem, Prompt, Sample, Supervision

PROBLEMS = 32
MAX_RESPONSE_TOKENS = 64


class SimulatedTokenizer:
    """What policies and stages ask of a tokenizer. `text` returns an id's text, which is its number by default."""

    all_special_ids = (0, END_TOKEN)
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def __init__(self, vocab_size: int = VOCAB_SIZE, text: Callable[[int], str] = str) -> None:
        self._vocab_size = vocab_size
        self._text = text

    def get_vocab(self) -> dict[str, int]:
        return {f"token-{token_id}": token_id for token_id in range(self._vocab_size)}

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids. Special tokens have one too, so that two responses never have the same text."""
        return " ".join(self._text(int(token_id)) for token_id in token_ids)


def simulated_vocabulary(end_token_ids: tuple[int, ...] = (END_TOKEN,), text: Callable[[int], str] = str) -> Vocabulary:
    tokenizer: Any = SimulatedTokenizer(text=text)
    return Vocabulary(tokenizer, end_token_ids)


def policy_context(**changes: Any) -> PolicyContext:
    """Return what a policy is told about a simulated run."""
    return PolicyContext(**{"vocab_size": VOCAB_SIZE, "tokenizer": SimulatedTokenizer(), **changes})


def make_policy(policy: Any, context: PolicyContext | None = None, **settings: Any) -> Any:
    """Make a policy of this class with these settings. `kind` may be left out, unlike in a configuration."""
    kind = {"kind": policy.__name__} if policy.Settings.model_fields["kind"].is_required() else {}
    return policy(policy.Settings(**kind, **settings), context or policy_context())


def simulated_prompts(limit: int | None = None, *, problems: int = PROBLEMS, answer: str = "1") -> Iterator[Prompt]:
    """Return prompts, without end by default. Each epoch has every problem, and the n-th has 5 + n tokens."""
    for ordinal in count() if limit is None else range(limit):
        index = ordinal % problems
        problem = Problem(id=f"p{index}", text=f"problem {index}", answer=answer)
        token_ids = (2 + np.arange(5 + index) % (VOCAB_SIZE - 2)).astype(np.int32)
        yield Prompt(ordinal=ordinal, problem=problem, token_ids=token_ids)


def same_limits(**limits: Any) -> StagesConfig:
    """Return settings that give every stage these limits."""
    return StagesConfig.model_validate(dict.fromkeys(StagesConfig.model_fields, StageConfig(**limits)))


@dataclass
class Journal:
    """A listener that keeps finished iterations, evaluations, and the prompts that were given up."""

    results: list[IterationFinished] = field(default_factory=list)
    evaluated: list[Evaluated] = field(default_factory=list)
    dead: dict[int, RequestError] = field(default_factory=dict)  # by the prompt's ordinal

    def on(self, event: Event) -> None:
        match event:
            case IterationFinished():
                self.results.append(event)
            case Evaluated():
                self.evaluated.append(event)
            case PromptEnded(prompt=prompt, error=RequestError() as error):
                self.dead[prompt.ordinal] = error


@dataclass(frozen=True, eq=False, repr=False)
class SimulatedRun:
    """A run that was made or has ended: its parts, and its results so far."""

    orchestrator: Orchestrator
    trainer: Any
    journal: Journal

    @property
    def stages(self) -> Stages:
        return self.orchestrator.stages

    @property
    def batches(self) -> list[list[Supervision]]:
        """What the trainer got, as a list for each iteration."""
        batches: list[list[Supervision]] = self.trainer.batches
        return batches

    @property
    def trained(self) -> list[Supervision]:
        """What the trainer got, as one list."""
        return [supervision for batch in self.batches for supervision in batch]

    @property
    def samples(self) -> list[Sample]:
        """The samples of finished iterations, including those that were left out of training."""
        return [sample for result in self.journal.results for sample in result.samples]

    def finish(self) -> SimulatedRun:
        """Run on virtual time to the end, and return this run. Raises what ended it early."""
        run_on_virtual_time(self.orchestrator.run())
        return self


def make_run(
    policy: Policy,
    *,
    student: Any = None,
    teacher: Scorer | None = None,
    reference: Scorer | BaseScorer | None = None,
    reference_is_base: bool = False,
    verifier: Any = None,
    trainer: Trainer | None = None,
    weight_sinks: Sequence[WeightSink] | None = None,
    evaluate: LiveEvaluation | None = None,
    sleepers: Sequence[Sleeper] = (),
    ledger: PromptLedger | None = None,
    checkpoints: Checkpoints | None = None,
    resumption: Resumption | None = None,
    prompts: Iterable[Prompt] | None = None,
    vocabulary: Vocabulary | None = None,
    teacher_vocabulary: Vocabulary | None = None,
    capabilities: Mapping[str, Capabilities] | None = None,
    kept_scores: Any = None,
    config: StagesConfig | None = None,
    sampling: SamplingConfig | None = None,
    seed: int = 0,
    **settings: Any,
) -> SimulatedRun:
    """Make a run that has not begun. With real services it runs in real time: `await run.orchestrator.run()`.

    `settings` are fields of `OrchestratorSettings`. By default, there are a teacher and a reference if the policy needs
    them, and the student takes the weights. `run.stages.events.subscribe(listener)` lets others listen too.
    """
    needs, journal = policy.needs, Journal()
    student = SimulatedStudent() if student is None else student
    trainer = SimulatedTrainer() if trainer is None else trainer
    sampling = sampling or SamplingConfig(max_response_tokens=MAX_RESPONSE_TOKENS)
    batch_size = settings.get("batch_size", 16)
    numbers = OrchestratorSettings(
        **{
            "iterations": 2,
            "batch_size": batch_size,
            "max_staleness": 0,
            "capacity_prompts": (1 + settings.get("max_staleness", 0)) * batch_size,
            "capacity_bytes": 1 << 30,
            "max_response_tokens": sampling.max_response_tokens,
            "vocab_size": VOCAB_SIZE,
            "weight_update_timeout_s": 60.0,
            "max_dead_share": 0.1,
            **settings,
        }
    )
    stages = stages_for(
        policy,
        vocabulary or simulated_vocabulary(),
        student=student,
        teacher=SimulatedTeacher() if teacher is None and needs.teacher else teacher,
        reference=SimulatedTeacher() if reference is None and needs.reference else reference,
        reference_is_base=reference_is_base,
        verifier=SimulatedVerifier() if verifier is None else verifier,
        teacher_vocabulary=teacher_vocabulary,
        capabilities=capabilities,
        kept_scores=kept_scores,
        sampling=sampling,
        config=config,
        seed=seed,
        max_prompts=numbers.capacity_prompts,
        weights_may_change=numbers.max_staleness > 0,
    )
    stages.events.subscribe(journal)
    orchestrator = Orchestrator(
        numbers,
        prompts=simulated_prompts() if prompts is None else prompts,
        policy=policy,
        stages=stages,
        trainer=trainer,
        weight_sinks=[student] if weight_sinks is None else weight_sinks,
        evaluate=evaluate,
        sleepers=sleepers,
        ledger=ledger,
        checkpoints=checkpoints,
        resumption=resumption,
    )
    return SimulatedRun(orchestrator, trainer, journal)


def simulated_run(policy: Policy, **changes: Any) -> SimulatedRun:
    """Make a run with these `changes`, and run it on virtual time."""
    return make_run(policy, **changes).finish()
