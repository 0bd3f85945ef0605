"""The trainer's loss: terms and gradients against dense float64 references, and sums that split without a trace."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_async.trainer.loss import (
    BranchTerm,
    LossTerms,
    clipped_policy_loss,
    minibatch_share,
    mismatch_statistics,
    ratio_statistics,
    reference_kl,
    soft_target_loss,
)

CLIP, COEFFICIENT = 0.2, 0.3
VOCAB_SIZE, CANDIDATES = 7, 3


def gradient(loss, leaf):
    return torch.autograd.grad(loss, leaf, retain_graph=True)[0]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


# --- terms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: the plain policy gradient
        (1.1, 2.0, -2.2, -2.2),  # inside the clip
        (1.5, 2.0, -2.4, 0.0),  # raised enough already
        (0.5, 2.0, -1.0, -1.0),  # a good token made unlikely is still pulled back
        (1.1, -2.0, 2.2, 2.2),
        (0.5, -2.0, 1.6, 0.0),  # lowered enough already
        (5.0, -2.0, 10.0, 10.0),  # a bad token made likely is pushed down, without a cap
        (1.3, 0.0, 0.0, 0.0),
    ],
)
def test_clip_removes_the_gradient_only_where_the_policy_went_far_enough(ratio, advantage, loss, slope):
    logprob = tensor([math.log(ratio) - 1.5]).requires_grad_()
    value = clipped_policy_loss(logprob, tensor([-1.5]), tensor([advantage]), clip=CLIP)
    assert value.item() == pytest.approx(loss, abs=1e-12)
    assert gradient(value.sum(), logprob).item() == pytest.approx(slope, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (5.0, -2.0, 6.0, 0.0),
        (2.5, -2.0, 5.0, 5.0),
        (0.5, -2.0, 1.6, 0.0),
        (5.0, 2.0, -2.4, 0.0),
        (0.5, 2.0, -1.0, -1.0),
    ],
)
def test_dual_clip_caps_only_negative_advantages(ratio, advantage, loss, slope):
    logprob = tensor([math.log(ratio)]).requires_grad_()
    value = clipped_policy_loss(logprob, tensor([0.0]), tensor([advantage]), clip=CLIP, dual_clip=3.0)
    assert value.item() == pytest.approx(loss, abs=1e-12)
    assert gradient(value.sum(), logprob).item() == pytest.approx(slope, abs=1e-12)


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

    assert statistics.tokens == 7
    assert statistics.ratio_sum.item() == pytest.approx(12.5)
    assert statistics.ratio_max.item() == pytest.approx(4.0)
    assert statistics.clipped_tokens == 3  # 1.5 up, 4.0 past the dual clip, 0.5 down
    assert ratio_statistics(new, old, advantages, mask, clip=CLIP).clipped_tokens == 2
    expected_kl = sum(r - 1 - math.log(r) for r in [1.0, 1.5, 0.5, 4.0, 0.5, 1.5, 3.5])
    assert statistics.behavior_kl_sum.item() == pytest.approx(expected_kl)
    assert not any(part.requires_grad for part in statistics)

    empty = ratio_statistics(new, old, advantages, torch.zeros_like(mask), clip=CLIP)
    assert [part.item() for part in empty] == [0, 0, 0, 0, 0]


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
    assert statistics.clipped_tokens == 4
    assert statistics.ratio_max.item() == pytest.approx(largest)
    for value in (*statistics, *mismatch_statistics(new.detach(), old, mask)):
        assert torch.isfinite(value)


def test_clipped_tokens_are_exactly_those_without_a_gradient():
    generator = torch.Generator().manual_seed(1)
    old, new = -3.0 * torch.rand(2, 1, 300, generator=generator, dtype=torch.float64)
    advantage = torch.randn(1, 300, generator=generator, dtype=torch.float64)
    new.requires_grad_()
    slopes = gradient(clipped_policy_loss(new, old, advantage, clip=CLIP, dual_clip=3.0).sum(), new)
    mask = torch.ones_like(new, dtype=torch.bool)
    statistics = ratio_statistics(new, old, advantage, mask, clip=CLIP, dual_clip=3.0)
    assert statistics.clipped_tokens == (slopes == 0).sum()


def test_soft_target_loss_and_its_gradient_match_full_vocabulary_cross_entropy():
    generator = torch.Generator().manual_seed(2)
    logits = (4 * torch.randn(5, VOCAB_SIZE, generator=generator, dtype=torch.float64)).requires_grad_()
    ids = torch.stack([torch.randperm(VOCAB_SIZE, generator=generator)[:CANDIDATES] for _ in range(5)])
    targets = torch.rand(5, CANDIDATES, generator=generator, dtype=torch.float64)
    targets /= targets.sum(dim=1, keepdim=True)

    loss = soft_target_loss(logits.log_softmax(dim=1).gather(1, ids), targets)

    dense_targets = np.zeros((5, VOCAB_SIZE))
    np.put_along_axis(dense_targets, ids.numpy(), targets.numpy(), axis=1)
    policy = np.exp(logits.detach().numpy())
    policy /= policy.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(loss.detach(), -(dense_targets * np.log(policy)).sum(axis=1), atol=1e-12)
    # Cross-entropy in the logits has the gradient policy - target, over the whole vocabulary.
    np.testing.assert_allclose(gradient(loss.sum(), logits), policy - dense_targets, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: soft_target_loss(x.log_softmax(dim=1).gather(1, ids), targets), logits)


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


# --- a whole mini-batch ------------------------------------------------------------------------------------------


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
    branch = BranchTerm(
        losses=soft_target_loss(
            row_logprobs[rows, positions].gather(1, torch.tensor(ids)), torch.tensor(targets).to(logits.dtype)
        ),
        weights=torch.tensor([micro_batch[b].weight for b, _ in flat], dtype=logits.dtype),
        rows=rows,
    )
    terms = LossTerms(
        mask=mask,
        policy=policy if "policy" in sides else None,
        branch=branch if "branch" in sides else None,
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


@aggregations
def test_a_micro_batch_of_padding_alone_adds_nothing(aggregation):
    losses = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    terms = LossTerms(mask=torch.zeros(2, 3, dtype=torch.bool), policy=losses, reference_coefficient=0.0)
    parts = minibatch_share(terms, aggregation=aggregation, minibatch_trajectories=4, minibatch_tokens=10)
    assert parts.total.item() == 0.0
    assert not gradient(parts.total, losses).any()
