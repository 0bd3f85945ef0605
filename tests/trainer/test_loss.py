"""The terms of the trainer's loss, their gradients and statistics, against dense float64 references."""

import math

import numpy as np
import pytest
import torch

from spot_async.trainer.divergence import soft_target_loss
from spot_async.trainer.loss import (
    LossTerms,
    clipped_policy_loss,
    minibatch_share,
    mismatch_statistics,
    ratio_statistics,
    reference_kl,
)

CLIP = 0.2


def gradient(loss, leaf):
    return torch.autograd.grad(loss, leaf, retain_graph=True)[0]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def test_policy_loss_matches_the_definition_and_finite_differences():
    generator = torch.Generator().manual_seed(0)
    old, new = -3.0 * torch.rand(2, 400, generator=generator, dtype=torch.float64)
    advantage = torch.randn(400, generator=generator, dtype=torch.float64)

    for dual_clip in (None, 3.0):
        expected = []
        for n, o, a in zip(new.tolist(), old.tolist(), advantage.tolist(), strict=True):
            r = math.exp(n - o)
            value = -min(r * a, min(max(r, 1 - CLIP), 1 + CLIP) * a)
            expected.append(min(value, -dual_clip * a) if dual_clip and a < 0 else value)
        loss = clipped_policy_loss(new, old, advantage, clip=CLIP, dual_clip=dual_clip)
        np.testing.assert_allclose(loss, expected, atol=1e-12)

        # A kink has no derivative to compare with.
        ratio = torch.exp(new - old)
        kinks = tensor([1 - CLIP, 1 + CLIP, dual_clip or 1 + CLIP])
        smooth = ((ratio[:, None] - kinks).abs() > 1e-3).all(dim=1)
        assert torch.autograd.gradcheck(
            lambda x, o=old[smooth], a=advantage[smooth], d=dual_clip: clipped_policy_loss(
                x, o, a, clip=CLIP, dual_clip=d
            ),
            new[smooth].clone().requires_grad_(),
        )


def test_ratio_statistics_describe_the_unpadded_tokens_and_add_up():
    ratios = tensor([[1.0, 1.5, 0.5, 4.0], [0.5, 1.5, 3.5, 9.0]])
    advantages = tensor([[1.0, 1.0, 1.0, -1.0], [-1.0, -1.0, 0.0, 1.0]])
    mask = torch.tensor([[True] * 4, [True, True, True, False]])
    old = torch.full_like(ratios, -2.0)
    new = (ratios.log() - 2.0).requires_grad_()

    statistics = ratio_statistics(new, old, advantages, mask, clip=CLIP, dual_clip=3.0)

    assert statistics["policy_tokens"] == 7
    assert statistics["ratio"].item() == pytest.approx(12.5)
    assert statistics["ratio_max"].item() == pytest.approx(4.0)
    assert statistics["clipped_tokens"] == 3  # 1.5 up, 4.0 past the dual clip, 0.5 down
    assert ratio_statistics(new, old, advantages, mask, clip=CLIP)["clipped_tokens"] == 2
    expected_kl = sum(r - 1 - math.log(r) for r in [1.0, 1.5, 0.5, 4.0, 0.5, 1.5, 3.5])
    assert statistics["behavior_kl"].item() == pytest.approx(expected_kl)
    assert not any(part.requires_grad for part in statistics.values())

    empty = ratio_statistics(new, old, advantages, torch.zeros_like(mask), clip=CLIP)
    assert [part.item() for part in empty.values()] == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_log_ratios_are_limited_as_in_verl_so_that_an_overflow_gives_no_nan(dual_clip):
    """A token that the server called next to impossible: its ratio exceeds float32."""
    old, advantages = torch.tensor([-95.0, -95.0, -0.5, -0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    new = torch.tensor([-0.5, -0.5, -95.0, -95.0], requires_grad=True)
    loss = clipped_policy_loss(new, old, advantages, clip=CLIP, dual_clip=dual_clip)
    largest = math.exp(20.0)
    expected = [-1.0 - CLIP, min(largest, dual_clip or largest), -1.0 / largest, 1.0 - CLIP]
    np.testing.assert_allclose(loss.detach(), expected, rtol=1e-5)
    assert gradient(loss.sum(), new).tolist() == [0.0] * 4
    mask = torch.ones(4, dtype=torch.bool)
    statistics = ratio_statistics(new, old, advantages, mask, clip=CLIP, dual_clip=dual_clip)
    assert statistics["clipped_tokens"] == 4
    assert statistics["ratio_max"].item() == pytest.approx(largest)
    for value in (*statistics.values(), *mismatch_statistics(new.detach(), old, mask).values()):
        assert torch.isfinite(value)


def test_clipped_tokens_are_exactly_those_without_a_gradient():
    generator = torch.Generator().manual_seed(1)
    old, new = -3.0 * torch.rand(2, 1, 300, generator=generator, dtype=torch.float64)
    advantage = torch.randn(1, 300, generator=generator, dtype=torch.float64)
    new.requires_grad_()
    slopes = gradient(clipped_policy_loss(new, old, advantage, clip=CLIP, dual_clip=3.0).sum(), new)
    mask = torch.ones_like(new, dtype=torch.bool)
    statistics = ratio_statistics(new, old, advantage, mask, clip=CLIP, dual_clip=3.0)
    assert statistics["clipped_tokens"] == (slopes == 0).sum()


def test_a_zero_target_ignores_an_impossible_token_in_value_and_gradient():
    logits = tensor([[0.0, 1.0, -math.inf]]).requires_grad_()
    loss = soft_target_loss(logits.log_softmax(dim=1), tensor([[0.25, 0.75, 0.0]]))
    assert loss.item() == pytest.approx(math.log(1 + math.e) - 0.75, abs=1e-12)
    slopes = gradient(loss.sum(), logits)[0]
    np.testing.assert_allclose(slopes, [1 / (1 + math.e) - 0.25, math.e / (1 + math.e) - 0.75, 0.0], atol=1e-12)


def test_reference_kl_is_the_k3_estimate_and_averages_to_the_kl():
    student = tensor([0.5, 0.3, 0.15, 0.05])
    reference = tensor([0.1, 0.2, 0.3, 0.4])
    estimates = reference_kl(student.log(), reference.log())
    expected = [r / p - 1 - math.log(r / p) for p, r in zip(student.tolist(), reference.tolist(), strict=True)]
    np.testing.assert_allclose(estimates, expected, atol=1e-12)
    assert (estimates >= 0).all()
    kl = (student * (student / reference).log()).sum()
    assert (student * estimates).sum().item() == pytest.approx(kl.item(), abs=1e-12)
    assert torch.autograd.gradcheck(reference_kl, (student.log().requires_grad_(), reference.log()))
    # Its gradient over tokens of the student is that of the other direction.
    logits = student.log().requires_grad_()
    logprobs = logits.log_softmax(dim=-1)
    penalty = (student * reference_kl(logprobs, reference.log())).sum()  # the student's tokens are given
    forward = (reference * (reference.log() - logprobs)).sum()
    np.testing.assert_allclose(gradient(penalty, logits), gradient(forward, logits), atol=1e-12)
    # Close policies: 1e-5 nats apart is a KL of 5e-11, which naive float32 arithmetic loses altogether.
    close = reference_kl(torch.tensor([-0.5]), torch.tensor([-0.5 + 2**-16]))
    assert close.item() == pytest.approx(2**-33, rel=0.01)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
def test_a_micro_batch_of_padding_alone_adds_nothing_and_parts_carry_no_gradient(aggregation):
    losses = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    none = torch.zeros(0, requires_grad=True)
    terms = LossTerms(
        mask=torch.zeros(2, 3, dtype=torch.bool),
        policy=losses,
        reference_kl=losses,
        reference_coefficient=0.3,
        branch=none,
        branch_weights=torch.zeros(0),
        branch_rows=torch.zeros(0, dtype=torch.int64),
    )
    total, *parts = minibatch_share(terms, aggregation=aggregation, minibatch_trajectories=4, minibatch_tokens=10)
    assert total.item() == 0.0
    assert not gradient(total, losses).any()
    assert not any(part.requires_grad for part in parts)
