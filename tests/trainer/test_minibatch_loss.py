"""The loss of a whole mini-batch: against a dense float64 reference, and as a sum that splits without a trace."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_async.trainer.divergence import soft_target_loss
from spot_async.trainer.loss import (
    LossTerms,
    clipped_policy_loss,
    minibatch_share,
    reference_kl,
)

CLIP, COEFFICIENT = 0.2, 0.3
VOCAB_SIZE, CANDIDATES = 7, 3


def gradient(loss, leaf):
    return torch.autograd.grad(loss, leaf, retain_graph=True)[0]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


class Trajectory:
    """Random numbers of one trajectory, whose logits are the given rows of the shared leaf."""

    def __init__(self, rng, rows, logits, branch_positions):
        length = len(rows)
        self.rows = rows
        self.tokens = rng.integers(VOCAB_SIZE, size=length)
        policy = np.exp(logits[rows.start : rows.stop])
        logprobs = np.log(policy[range(length), self.tokens] / policy.sum(axis=1))
        # Other policies near this one, as in training, yet past the clip on either side at many tokens.
        self.old = logprobs + rng.uniform(-0.6, 0.6, size=length)
        self.reference = logprobs + rng.uniform(-0.6, 0.6, size=length)
        self.advantages = rng.normal(size=length)
        self.positions = sorted(rng.choice(length, size=branch_positions, replace=False).tolist())
        self.candidates = [rng.permutation(VOCAB_SIZE)[:CANDIDATES] for _ in self.positions]
        self.targets = [rng.dirichlet(np.ones(CANDIDATES)) for _ in self.positions]
        self.weight = 0.1 / max(1, branch_positions)


def make_minibatch(seed, shapes):
    """Trajectories of (length, branch positions), and a leaf with the logits of all their tokens."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(sum(length for length, _ in shapes), VOCAB_SIZE))
    ends = np.cumsum([length for length, _ in shapes]).tolist()
    trajectories = [
        Trajectory(rng, range(end - length, end), logits, branch_positions)
        for end, (length, branch_positions) in zip(ends, shapes, strict=True)
    ]
    return trajectories, torch.tensor(logits, requires_grad=True)


def dense_loss(trajectories, logits, aggregation):
    """The formula of the mini-batch loss, one token at a time; autograd gives its gradient."""
    total_tokens = sum(len(trajectory.rows) for trajectory in trajectories)
    total = tensor(0.0)
    for trajectory in trajectories:
        length = len(trajectory.rows)
        share = 1 / len(trajectories) if aggregation == "sequence_mean" else length / total_tokens
        policies = [logits[row].exp() / logits[row].exp().sum() for row in trajectory.rows]
        for t, policy in enumerate(policies):
            probability = policy[trajectory.tokens[t]]
            ratio, advantage = probability / math.exp(trajectory.old[t]), trajectory.advantages[t]
            far_up, far_down = ratio > 1 + CLIP and advantage > 0, ratio < 1 - CLIP and advantage < 0
            bound = 1 + CLIP if far_up else 1 - CLIP
            loss = -(tensor(bound) if far_up or far_down else ratio) * advantage
            reference_ratio = math.exp(trajectory.reference[t]) / probability
            loss = loss + COEFFICIENT * (reference_ratio - 1 - reference_ratio.log())
            total = total + share * loss / length
        for position, ids, target in zip(trajectory.positions, trajectory.candidates, trajectory.targets, strict=True):
            for v, probability in zip(ids, target, strict=True):
                total = total - share * trajectory.weight * probability * policies[position][v].log()
    return total


def padded_share(micro_batch, logits, aggregation, trajectories, tokens, *, sides=("policy", "branch", "reference")):
    """The same through the package, laid out as the trainer does: right-padded tokens, flattened branch positions."""
    longest = max(len(trajectory.rows) for trajectory in micro_batch) + 2

    def pad(rows, dtype):
        return torch.tensor(np.array([[*row, *[0] * (longest - len(row))] for row in rows])).to(dtype)

    mask = pad([[True] * len(trajectory.rows) for trajectory in micro_batch], torch.bool)
    row_logprobs = logits[pad([trajectory.rows for trajectory in micro_batch], torch.int64)].log_softmax(dim=-1)
    token_ids = pad([trajectory.tokens for trajectory in micro_batch], torch.int64)
    logprobs = row_logprobs.gather(2, token_ids[..., None])[..., 0]
    old, advantages, reference = (
        pad([getattr(trajectory, name) for trajectory in micro_batch], logits.dtype)
        for name in ("old", "advantages", "reference")
    )
    policy = clipped_policy_loss(logprobs, old, advantages, clip=CLIP)
    kl = reference_kl(logprobs, reference)

    flat = [(b, n) for b, trajectory in enumerate(micro_batch) for n in range(len(trajectory.positions))]
    rows = torch.tensor([b for b, _ in flat], dtype=torch.int64)
    positions = torch.tensor([micro_batch[b].positions[n] for b, n in flat], dtype=torch.int64)
    ids = np.array([micro_batch[b].candidates[n] for b, n in flat], dtype=np.int64).reshape(-1, CANDIDATES)
    targets = np.array([micro_batch[b].targets[n] for b, n in flat]).reshape(-1, CANDIDATES)
    branch = soft_target_loss(
        row_logprobs[rows, positions].gather(1, torch.tensor(ids)), torch.tensor(targets).to(logits.dtype)
    )
    terms = LossTerms(
        mask=mask,
        policy=policy if "policy" in sides else torch.zeros_like(policy),
        branch=branch if "branch" in sides else torch.zeros_like(branch),
        branch_weights=torch.tensor([micro_batch[b].weight for b, _ in flat], dtype=logits.dtype),
        branch_rows=rows,
        reference_kl=kl if "reference" in sides else None,
        reference_coefficient=COEFFICIENT,
    )
    return minibatch_share(terms, aggregation=aggregation, minibatch_trajectories=trajectories, minibatch_tokens=tokens)


aggregations = pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])


@aggregations
def test_minibatch_loss_and_gradient_match_the_dense_reference(aggregation):
    trajectories, logits = make_minibatch(0, [(5, 2), (1, 1), (9, 0), (4, 3)])
    expected = dense_loss(trajectories, logits, aggregation)

    parts = padded_share(trajectories, logits, aggregation, trajectories=4, tokens=19)

    assert parts.total.item() == pytest.approx(expected.item(), abs=1e-9)
    np.testing.assert_allclose(gradient(parts.total, logits), gradient(expected, logits), atol=1e-9)
    assert sum(part.item() for part in parts[1:]) == pytest.approx(parts.total.item(), abs=1e-12)
    assert not any(part.requires_grad for part in parts[1:])


@aggregations
def test_minibatch_gradient_matches_finite_differences(aggregation):
    trajectories, logits = make_minibatch(1, [(3, 1), (2, 2)])
    assert torch.autograd.gradcheck(
        lambda x: padded_share(trajectories, x, aggregation, trajectories=2, tokens=5).total, logits
    )


@aggregations
@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    shapes=st.lists(
        st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, min(n, 3)))), min_size=2, max_size=8
    ),
    cuts=st.sets(st.integers(1, 7), max_size=4),
)
def test_any_split_over_micro_batches_and_ranks_sums_to_the_big_batch(aggregation, seed, shapes, cuts):
    trajectories, logits = make_minibatch(seed, shapes)
    denominators = {"trajectories": len(shapes), "tokens": sum(length for length, _ in shapes)}
    whole = padded_share(trajectories, logits, aggregation, **denominators)

    edges = [0, *sorted(cut for cut in cuts if cut < len(shapes)), len(shapes)]
    shares = [
        padded_share(trajectories[low:high], logits, aggregation, **denominators)
        for low, high in itertools.pairwise(edges)
    ]

    for name in ("total", "policy", "branch", "reference"):
        summed = sum(getattr(share, name).item() for share in shares)
        assert summed == pytest.approx(getattr(whole, name).item(), abs=1e-9), name
    np.testing.assert_allclose(
        sum(gradient(share.total, logits) for share in shares), gradient(whole.total, logits), atol=1e-9
    )


@aggregations
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_without_any_branch_position_change_nothing_in_float32(aggregation, ranks):
    # All branch positions on the first rank; lengths as unequal as a mixed batch of real responses.
    trajectories, logits = make_minibatch(3, [(40, 2), (3, 1), (1, 0), (25, 0), (7, 0), (60, 0), (2, 0), (12, 0)])
    expected = gradient(dense_loss(trajectories, logits, aggregation), logits)
    logits = logits.detach().float().requires_grad_()

    size = len(trajectories) // ranks
    summed = torch.zeros_like(logits)
    for rank in range(ranks):
        mine = trajectories[rank * size : (rank + 1) * size]
        share = padded_share(mine, logits, aggregation, trajectories=8, tokens=150)
        assert (share.branch.item() == 0.0) == (rank > 0)
        summed += gradient(share.total, logits)

    np.testing.assert_allclose(summed, expected, atol=1e-6)


@aggregations
def test_without_branch_positions_the_loss_is_exactly_that_of_plain_distillation(aggregation):
    trajectories, logits = make_minibatch(4, [(6, 0), (11, 0)])
    plain = padded_share(trajectories, logits, aggregation, 2, 17, sides=("policy",))
    with_empty_branch = padded_share(trajectories, logits, aggregation, 2, 17, sides=("policy", "branch"))
    assert with_empty_branch.branch.item() == 0.0
    assert with_empty_branch.total.item() == plain.total.item()
    assert torch.equal(gradient(with_empty_branch.total, logits), gradient(plain.total, logits))


@aggregations
def test_soft_targets_alone_weighted_by_one_over_length_give_the_mean_over_tokens(aggregation):
    # Off-policy distillation: a target at every position and no policy term. Its token mean needs the trajectory's
    # own weight on the branch term too, which a fixed division by the number of trajectories would get wrong.
    trajectories, logits = make_minibatch(5, [(4, 4), (9, 9)])
    for trajectory in trajectories:
        trajectory.weight = 1 / len(trajectory.rows)
    parts = padded_share(trajectories, logits, aggregation, 2, 13, sides=("branch",))

    means, sums = [], []
    for trajectory in trajectories:
        logprobs = logits[list(trajectory.rows)].log_softmax(dim=1).detach().numpy()
        losses = [
            -(trajectory.targets[t] * logprobs[t][trajectory.candidates[t]]).sum() for t in range(len(trajectory.rows))
        ]
        means.append(np.mean(losses))
        sums.append(np.sum(losses))
    expected = np.mean(means) if aggregation == "sequence_mean" else sum(sums) / 13
    assert parts.total.item() == pytest.approx(expected, abs=1e-9)
    assert parts.policy.item() == parts.reference.item() == 0.0
