"""The presets of `policy.kind: distill` against the losses of the programs that they are named after.

Value and gradient of a mini-batch are those of the peer's own function on the same logits. `make test-peers` runs
these. SPOT_PEERS_PYTHON is the interpreter of an environment with torch, trl, verl, ms-swift and prime-rl.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import peer_losses
import pytest
import torch
from torch import Tensor

from spot_async.policies.distill import PRESETS, DistillPolicy
from spot_async.testing import ScriptedStages, generation, make_policy, policy_context, simulated_prompts
from spot_async.testing.services import whole_scores
from spot_async.trainer.batching import collate
from spot_async.trainer.divergence import soft_target_losses
from spot_async.trainer.loss import (
    LossTerms,
    clipped_policy_loss,
    minibatch_share,
    reference_kl,
    truncated_importance_weights,
)
from spot_async.trainer.model import ResponseLogprobs

PYTHON = os.environ.get("SPOT_PEERS_PYTHON", "")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason="SPOT_PEERS_PYTHON names no interpreter with the peers"),
]
VOCAB, LENGTHS = 50, (9, 4)
Found = Mapping[str, Any]


def log_softmax(logits: Any) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = torch.as_tensor(logits).log_softmax(-1).numpy()
    return found


def numbers(off_nats: float) -> dict[str, np.ndarray[Any, Any]]:
    """Return what two responses are made of. The server is at most `off_nats` away from the student in training."""
    draw = np.random.default_rng(0)
    shape = len(LENGTHS), max(LENGTHS), VOCAB
    student = draw.normal(0, 2, shape)
    sampled = (student + draw.gumbel(size=shape)).argmax(-1)
    served = np.take_along_axis(log_softmax(student), sampled[..., None], -1)[..., 0]
    return {
        "student": student,
        "teacher": student + draw.normal(0, 1, shape),
        "sampled": sampled,
        "served": served + draw.uniform(-off_nats, off_nats, served.shape),
        "mask": np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None],
    }


@pytest.fixture(scope="module")
def of_peers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], Found]:
    """Return a function that gives the losses and gradients that the peers find on `numbers`."""
    known: dict[float, Found] = {}

    def find(off_nats: float) -> Found:
        if off_nats not in known:
            given, found = (tmp_path_factory.mktemp("peers") / f"{name}.npz" for name in ("given", "found"))
            np.savez(given, **numbers(off_nats))
            subprocess.run([PYTHON, peer_losses.__file__, given, found], check=True)
            known[off_nats] = np.load(found)
        return known[off_nats]

    return find


class LogitsAsStudent:
    """A student whose hidden states are its logits, so that their gradient can be seen."""

    def __init__(self, logits: Tensor, prompt_tokens: int) -> None:
        self.logits = logits  # (B, T, V) float32
        self._prompt_tokens = prompt_tokens

    def base_model(self, **inputs: Any) -> Any:
        before = self.logits.new_zeros(len(self.logits), self._prompt_tokens - 1, VOCAB)
        return SimpleNamespace(last_hidden_state=torch.cat([before, self.logits], dim=1))

    def get_output_embeddings(self) -> Any:
        return SimpleNamespace(weight=torch.eye(VOCAB), bias=None)


def ours(
    keys: dict[str, Any], sampling_temperature: float = 1.0, off_nats: float = 0.0
) -> tuple[float, np.ndarray[Any, Any]]:
    """Return the loss and gradient (B, T, V) that the trainer computes at an iteration's first update, with
    `behavior: recomputed`, `importance_cap: 2.0` and `loss_aggregation: token_mean`, of what the policy hands it.
    """
    given = numbers(off_nats)
    (prompt,) = simulated_prompts(1)
    policy = make_policy(DistillPolicy, policy_context(vocab_size=VOCAB), **keys)
    samples = []
    for b, tokens in enumerate(LENGTHS):
        response = generation(given["sampled"][b, :tokens], given["served"][b, :tokens])
        teacher = log_softmax(given["teacher"][b, :tokens] / sampling_temperature)
        stages = ScriptedStages(response, whole_scores(teacher, response.token_ids, VOCAB))
        (sample,) = asyncio.run(policy.supervise(prompt, stages))
        samples.append(sample.supervision)
    student = torch.tensor(given["student"], dtype=torch.float32, requires_grad=True)
    model = LogitsAsStudent(student, len(prompt.token_ids))
    batch = collate(samples, is_packed=False)
    sampled, _, *of_soft_targets = ResponseLogprobs(cast(Any, model), sampling_temperature)(batch)
    logprobs = batch.in_places(sampled)
    batch = batch.with_behavior(logprobs.detach())
    weights = truncated_importance_weights(batch.behavior_logprobs, batch.served_logprobs, 2.0)
    terms = LossTerms(
        mask=batch.mask,
        policy=weights * clipped_policy_loss(logprobs, batch.behavior_logprobs, batch.advantages, clip=0.2),
        reference_coefficient=0.0,
        branch=soft_target_losses(batch, *of_soft_targets),
        branch_weights=batch.soft.weights,
        branch_rows=batch.soft.trajectories,
    )
    loss = minibatch_share(
        terms, aggregation="token_mean", minibatch_trajectories=len(LENGTHS), minibatch_tokens=sum(LENGTHS)
    ).total
    loss.backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    return loss.item(), student.grad.numpy()


def hold(found: Found, name: str, loss: float, gradient: np.ndarray[Any, Any]) -> None:
    """Compare with a peer. The bounds are those of float32."""
    if f"{name}: loss" not in found:
        pytest.skip(f"{PYTHON} has not the program of {name}")
    theirs = found[f"{name}: gradient"]
    off = np.linalg.norm(gradient - theirs) / np.linalg.norm(theirs)
    assert loss == pytest.approx(found[f"{name}: loss"], rel=2e-6, abs=1e-7)
    assert off < 2e-6


@pytest.mark.parametrize(
    ("peer", "keys", "sampling_temperature"),
    [
        ("gkd@trl", {}, 1.0),
        ("gkd@trl", {"temperature": 1 / 0.9}, 0.9),  # its defaults: sampled at 0.9, compared at 1
        ("gkd@trl beta 0", {"divergence": "forward_kl"}, 1.0),
        ("gkd@trl beta 0.1", {"beta": 0.1}, 1.0),
        ("gkd@trl beta 1", {"divergence": "reverse_kl"}, 1.0),
        ("opd@verl", {}, 1.0),
        ("opd@prime-rl", {}, 1.0),
        ("opsd@ms-swift", {}, 1.2),
        ("opsd@ms-swift beta 0", {"divergence": "forward_kl"}, 1.2),
        ("opsd@ms-swift beta 1", {"divergence": "reverse_kl"}, 1.2),
        ("opsd@ms-swift top-k", {"support": "teacher", "top_k": 8}, 1.2),
    ],
)
def test_a_preset_has_its_peers_loss_and_gradient(
    of_peers: Callable[[float], Found], peer: str, keys: dict[str, Any], sampling_temperature: float
) -> None:
    preset = peer.partition(" ")[0]
    assert preset in PRESETS
    hold(of_peers(0.0), peer, *ours({"preset": preset} | keys, sampling_temperature))


def test_off_policy_prime_rl_adds_only_a_thousandth_of_the_squared_log_ratio(
    of_peers: Callable[[float], Found],
) -> None:
    """Its ratio is to the server; ours is an importance weight, as long as neither cap nor trust region acts."""
    off_nats = 0.3
    given = {name: torch.tensor(array) for name, array in numbers(off_nats).items()}
    student = given["student"].requires_grad_()
    logprobs = student.log_softmax(-1).gather(-1, given["sampled"][..., None]).squeeze(-1)
    squares = (logprobs - given["served"]).square()
    added = 1e-3 * squares[given["mask"]].mean()
    added.backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    loss, gradient = ours({"preset": "opd@prime-rl"}, off_nats=off_nats)
    hold(of_peers(off_nats), "opd@prime-rl", loss + added.item(), gradient + student.grad.numpy())


def test_verls_own_default_is_a_reference_kl_to_the_teacher(of_peers: Callable[[float], Found]) -> None:
    """`loss_mode: k3`, which `distill` cannot say: `kind: grpo`, the teacher as `reference`, `reference_kl: 1.0`."""
    given = {name: torch.tensor(array) for name, array in numbers(0.0).items()}
    student = given["student"].requires_grad_()
    of_student, of_teacher = (
        each.log_softmax(-1).gather(-1, given["sampled"][..., None]).squeeze(-1) for each in (student, given["teacher"])
    )
    loss = reference_kl(of_student, of_teacher)[given["mask"]].mean()
    loss.backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    hold(of_peers(0.0), "opd@verl k3", loss.item(), student.grad.numpy())


def test_verls_top_k_forward_kl_is_ours_without_a_tail_times_the_teachers_mass(
    of_peers: Callable[[float], Found],
) -> None:
    """It does not renormalise the teacher. Where its sum is negative, it is cut to 0 and teaches nothing."""
    name = "opd@verl forward_kl_topk"
    found = of_peers(0.0)
    if f"{name}: loss" not in found:
        pytest.skip(f"{PYTHON} has not the program of {name}")
    _, gradient = ours({"divergence": "forward_kl", "top_k": 8, "tail": False})
    mass = np.sort(np.exp(log_softmax(numbers(0.0)["teacher"])), -1)[..., -8:].sum(-1, keepdims=True)
    theirs = found[f"{name}: gradient"]
    is_taught = np.abs(theirs).max(-1, keepdims=True) > 0
    assert is_taught.sum() >= sum(LENGTHS) - 1
    off = np.linalg.norm(is_taught * mass * gradient - theirs) / np.linalg.norm(theirs)
    assert off < 2e-6
