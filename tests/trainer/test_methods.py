"""All five methods from policy to gradient: what the trainer does with what a policy asked its stages for.

Stages answer with real numbers of two small random models; the reference computes each method's loss
from those models' full logits in float64 and shares no code with the package.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from makers import MakeModel, MakeTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from spot_async.policies.eopd import EopdPolicy
from spot_async.policies.grpo import GrpoPolicy
from spot_async.policies.kd import KdPolicy
from spot_async.policies.opd import OpdPolicy
from spot_async.policies.spot import SpotPolicy
from spot_async.testing.services import generation, whole_scores
from spot_async.testing.simulation import ScriptedStages
from spot_async.trainer.messages import Batch
from spot_async.types import (
    Generation,
    Judgement,
    PolicyContext,
    Problem,
    Prompt,
    TokenScores,
    Verdict,
    VersionSpan,
    WeightVersion,
)

VOCAB = 40
SPECIAL = 5  # ids below are special: no position of theirs may be probed
FAR_NATS = (95.0, 5.0, -20.0)  # the reference's first tokens are off: an overflow, and verl's limit on either side
TAU_NATS = 2.9  # of these random teachers' entropies some are above, some below


@pytest.fixture(scope="module")
def folders(random_model: MakeModel) -> tuple[Path, Path]:
    """Student and teacher."""
    choices = {"vocab_size": VOCAB, "special_tokens": SPECIAL, "initializer_range": 0.2}
    return random_model(seed=0, **choices), random_model(seed=1, hidden_size=48, **choices)


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()


def rows(model: Any, prompt: np.ndarray, response: np.ndarray) -> torch.Tensor:
    """(T, V) log-probabilities that decide the response's tokens."""
    logits = model(torch.tensor([[*prompt.tolist(), *response.tolist()]])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


class ModelStages(ScriptedStages):
    """`PromptStages` of one prompt over real models; served log-probabilities are a little off, as after an update."""

    def __init__(self, prompt: Prompt, student: Any, teacher: Any) -> None:
        super().__init__()
        self.prompt, self.models = prompt, (student, teacher)
        self.rollouts: list[Generation] = []
        self.rewards: dict[tuple[int, int], float | None] = {}  # of each probed position and candidate

    async def rollout(self, *, n: int = 0) -> Generation:
        generation = self._sample(self.models[0], self.prompt.token_ids, 4 + 3 * self.prompt.ordinal + n, seed=n)
        self.rollouts.append(generation)
        return generation

    async def teacher_response(self, *, teacher: str = "") -> Generation:
        self.rollouts.append(self._sample(self.models[1], self.prompt.token_ids, 4 + 3 * self.prompt.ordinal, seed=0))
        return self.rollouts[-1]

    async def score(self, response_ids: np.ndarray, *, top_k: int, teacher: str = "") -> TokenScores:
        logprobs = rows(self.models[1], self.prompt.token_ids, response_ids).detach().numpy()
        return whole_scores(logprobs, response_ids, top_k)

    async def reference_logprobs(self, response_ids: np.ndarray) -> np.ndarray:
        logprobs = (await self.score(response_ids, top_k=1)).logprobs  # any other model than the student shows a KL
        return logprobs + np.array([*FAR_NATS, *[0.0] * (len(response_ids) - len(FAR_NATS))], np.float32)

    async def candidate_logprobs(
        self, response_ids: np.ndarray, positions: np.ndarray, candidate_ids: np.ndarray, *, version: WeightVersion
    ) -> np.ndarray:
        logprobs = rows(self.models[0], self.prompt.token_ids, response_ids).detach().numpy()
        return logprobs[positions[:, None], candidate_ids].astype(np.float32)

    async def probe(self, response_ids: np.ndarray, position: int, candidate_id: int, *, n: int) -> Generation:
        prefix = np.concatenate([self.prompt.token_ids, response_ids[:position], [candidate_id]])
        generation = self._sample(self.models[0], prefix, 3, seed=n)
        branch = np.concatenate([response_ids[:position], [candidate_id], generation.token_ids])
        self.rewards[position, candidate_id] = None if branch.sum() % 13 == 0 else float(branch.sum() % 3 == 0)
        return generation

    async def verify(self, response_ids: np.ndarray) -> Judgement:
        total = int(response_ids.sum())
        return Judgement(Verdict.TIMEOUT if total % 13 == 0 else Verdict.CORRECT if total % 3 == 0 else Verdict.WRONG)

    def _sample(self, model: Any, prefix: np.ndarray, tokens: int, *, seed: int) -> Generation:
        draw = torch.Generator().manual_seed(1000 * self.prompt.ordinal + seed)
        ids: list[int] = []
        for _ in range(tokens):
            logits = model(torch.tensor([[*prefix.tolist(), *ids]])).logits[0, -1]
            ids.append(int(torch.multinomial(logits.softmax(-1), 1, generator=draw)))
        token_ids = np.array(ids, np.int32)
        served = rows(model, prefix, token_ids)[range(tokens), ids].detach().numpy()
        off = np.random.default_rng(seed).normal(0.0, 0.2, tokens)
        return generation(token_ids, served + off, finish_reason="length")


def dense_reference(
    kind: str, prompts: list[ModelStages], student: Any, teacher: Any, token_mean: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """Each method straight from full logits: loss and gradients of one mini-batch."""
    trained = []  # prompt's stages, response, served log-probabilities, GRPO's advantage
    for stages in prompts:
        outcome = [sum(g.token_ids.tolist()) for g in stages.rollouts]
        known = [float(total % 3 == 0) for total in outcome if total % 13]
        for response, total in zip(stages.rollouts, outcome, strict=True):
            advantage = 0.0
            if kind == "grpo":
                if total % 13 == 0:
                    continue  # the verifier timed out
                if len(known) > 1:
                    advantage = (float(total % 3 == 0) - statistics.mean(known)) / (statistics.stdev(known) + 1e-6)
            trained.append((stages, response.token_ids, torch.tensor(response.logprobs).double(), advantage))
    all_tokens = sum(len(response) for _, response, _, _ in trained)
    total_loss = torch.zeros((), dtype=torch.float64)
    for stages, response, served, group_advantage in trained:
        s = rows(student, stages.prompt.token_ids, response)
        t = rows(teacher, stages.prompt.token_ids, response).detach()
        at = torch.arange(len(response)), torch.tensor(response).long()
        advantage = torch.full_like(served, group_advantage) if kind == "grpo" else t[at] - served
        ratio = (s[at] - served).exp()
        gain = torch.minimum(ratio * advantage, ratio.clip(0.8, 1.2) * advantage)
        if kind == "grpo":
            gain = torch.where(advantage < 0, torch.maximum(gain, 3.0 * advantage), gain)
            log_ratio = t[at] - s[at]
            log_ratio = torch.cat([log_ratio[: len(FAR_NATS)] + torch.tensor(FAR_NATS), log_ratio[len(FAR_NATS) :]])
            gain = gain - 0.3 * torch.minimum(log_ratio.exp() - log_ratio - 1, torch.full_like(served, 10.0))
        top = t.topk(16)
        p = top.values.softmax(-1)
        forward_kl = (p * (p.log() - s.gather(1, top.indices))).sum(-1)
        entropy = -(t.exp() * t).sum(-1)
        per_token = -gain
        if kind == "eopd":
            per_token = per_token + 0.7 * (entropy > TAU_NATS) * forward_kl
        if kind == "kd":
            per_token = 0.5 * -s[at] + 0.5 * forward_kl
        loss = per_token.mean()
        if kind.startswith("spot"):
            q = s.detach().gather(1, top.indices)
            a, q = q.exp().sum(-1), q.softmax(-1)
            js = ((p * (2 * p / (p + q)).log2()).sum(-1) + (q * (2 * q / (p + q)).log2()).sum(-1)) / 2
            score = entropy / math.log(VOCAB) * top.values.exp().sum(-1) * (0.5 * (1 - a) + 0.5 * js)
            allowed = [i for i in range(len(response)) if response[i] >= SPECIAL]
            branches = []
            for i in sorted(allowed, key=lambda i: -score[i])[:2]:
                candidates, logprobs = top.indices[i, :4], top.values[i, :4]
                alpha = 0.6 if kind == "spot with a baseline" else 0.0
                prior = logprobs.softmax(-1)
                if kind != "spot without guidance":
                    rewards = [stages.rewards[i, v] for v in candidates.tolist()]
                    if None in rewards or not any(rewards):
                        continue
                    logprobs = logprobs + 1.5 * torch.tensor(rewards)
                branches.append(-((logprobs.softmax(-1) - alpha * prior) * s[i, candidates]).sum())
            loss = loss + 0.1 * sum(branches) / max(1, len(branches))
        total_loss = total_loss + loss * (len(response) / all_tokens if token_mean else 1 / len(trained))
    total_loss.backward()
    return total_loss.item(), {name: parameter.grad for name, parameter in student.named_parameters()}


POLICIES: dict[str, Callable[[PolicyContext], Any]] = {
    "opd": lambda context: OpdPolicy(OpdPolicy.Settings(), context),
    "eopd": lambda context: EopdPolicy(EopdPolicy.Settings(tau_nats=TAU_NATS, alpha=0.7), context),
    "grpo": lambda context: GrpoPolicy(GrpoPolicy.Settings(samples=4), context),
    "kd": lambda context: KdPolicy(KdPolicy.Settings(), context),
    "spot": lambda context: SpotPolicy(SpotPolicy.Settings(gamma=1.5), context),
    "spot with a baseline": lambda context: SpotPolicy(SpotPolicy.Settings(gamma=1.5, baseline=0.6), context),
    "spot without guidance": lambda context: SpotPolicy(SpotPolicy.Settings(verifier_guidance=False), context),
}


# Aggregation is the trainer's: two of the others show it.
LONG = [
    pytest.param(kind, "sequence_mean", marks=pytest.mark.long) for kind in ("grpo", "spot", "spot with a baseline")
]


@pytest.mark.parametrize(
    ("kind", "aggregation"),
    [
        *((kind, "token_mean") for kind in POLICIES),
        *((kind, "sequence_mean") for kind in ("opd", "eopd", "kd", "spot without guidance")),
        *LONG,
    ],
)
async def test_first_loss_and_gradient_of_each_method_equal_a_dense_reference(
    folders: tuple[Path, Path], make_trainer: MakeTrainer, tmp_path: Path, kind: str, aggregation: str
) -> None:
    student, teacher = map(load, folders)
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    policy = POLICIES[kind](PolicyContext(vocab_size=VOCAB, tokenizer=tokenizer, reference_kl=True))
    prompts, samples = [], []
    for ordinal in range(5):
        token_ids = np.arange(SPECIAL, SPECIAL + 3 + ordinal % 3, dtype=np.int32) + ordinal
        problem = Problem(id=f"p{ordinal}", text="?", answer="1")
        stages = ModelStages(Prompt(ordinal=ordinal, problem=problem, token_ids=token_ids), student, teacher)
        samples += await policy.supervise(stages.prompt, stages)
        prompts.append(stages)
    batch = [sample.supervision for sample in samples if sample.supervision is not None]
    assert_unequal(kind, batch, len(samples))
    expected_loss, expected = dense_reference(kind, prompts, student, teacher, aggregation == "token_mean")

    grpo = {"dual_clip": 3.0, "reference_kl": 0.3} if kind == "grpo" else {}
    trainer = make_trainer(
        folders[0], tmp_path, loss_aggregation=aggregation, micro_batch_tokens=40, max_grad_norm=1e9, **grpo
    )
    metrics = trainer.train(Batch(0, tuple(batch))).metrics

    assert metrics["loss"] == pytest.approx(expected_loss, abs=1e-5)
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), expected[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", POLICIES)
async def test_supervision_names_the_weights_of_each_token(folders: tuple[Path, Path], kind: str) -> None:
    class UpdatedInFlight(ModelStages):
        async def rollout(self, *, n: int = 0) -> Generation:
            rollout = await super().rollout(n=n)
            newer = VersionSpan(2, len(rollout.token_ids), WeightVersion(0, 8))
            spans = (VersionSpan(0, 2, WeightVersion(0, 7)), newer)
            return msgspec.structs.replace(rollout, version_spans=spans)

    student, teacher = map(load, folders)
    policy = POLICIES[kind](PolicyContext(vocab_size=VOCAB, tokenizer=AutoTokenizer.from_pretrained(folders[0])))
    prompt = Prompt(ordinal=1, problem=Problem(id="p", text="?", answer="1"), token_ids=np.arange(5, 8, dtype=np.int32))
    samples = await policy.supervise(prompt, UpdatedInFlight(prompt, student, teacher))
    for each in (sample.supervision for sample in samples if sample.supervision is not None):
        if kind == "kd":  # the teacher's response
            assert (each.version, {span.version for span in each.version_spans}) == (None, {None})
            continue
        assert each.version == WeightVersion(0, 7)
        older, newer = WeightVersion(0, 7), WeightVersion(0, 8)
        assert each.version_spans == (VersionSpan(0, 2, older), VersionSpan(2, len(each.response_ids), newer))


def assert_unequal(kind: str, batch: list[Any], rollouts: int) -> None:
    """The comparison means something: lengths, |B+| and gates differ, and some responses are left out."""
    assert len({len(s.response_ids) for s in batch}) > 3
    targets = {sum(len(each.positions) for each in s.soft_targets) for s in batch}
    if kind in ("eopd", "kd", "spot", "spot with a baseline"):
        assert len(targets) > 1
    if kind == "eopd":
        assert 0 < sum(len(s.soft_targets[0].positions) for s in batch) < sum(len(s.response_ids) for s in batch)
    if kind == "grpo":
        assert len(batch) < rollouts
