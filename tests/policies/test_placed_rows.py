"""Rows of a teacher with its own tokens may hold fewer candidates than were asked for: what is missing is no claim."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from spot_async.models.entropy import entropy_bounds
from spot_async.policies.acquisition import score_positions
from spot_async.policies.spot import SpotPolicy
from spot_async.policies.truncated.score_bounds import ScoreRule
from spot_async.policies.truncated.selection import certified_selection
from spot_async.terms import cells, compared, forward_kl, jsd, on_policy, retargeted, reverse_kl, reverse_skew, skew
from spot_async.testing.losses import loss_of
from spot_async.testing.services import capabilities, generation, token_scores
from spot_async.testing.simulation import make_policy, policy_context, simulated_prompts
from spot_async.types import LEAST_NATS, NO_TOKEN, LiveRows, SoftTargets, Supervision, TokenScores

TOKENS, WIDTH, PADS, VOCAB = 5, 4, 3, 200


def placed(rng: np.random.Generator, vocab_size: int, pads: int) -> TokenScores:
    """Random rows of `WIDTH` tokens, with a tail, and so many places that no token fills."""
    rows = np.sort(rng.dirichlet(np.ones(WIDTH + 1), TOKENS), axis=1)[:, ::-1]
    logprobs = np.log(rows[:, :WIDTH])
    lower, upper = entropy_bounds(logprobs, vocab_size)
    fill = ((0, 0), (0, pads))
    ids = np.array([rng.choice(vocab_size, WIDTH, replace=False) for _ in range(TOKENS)], np.int32)
    return token_scores(
        [-1.0] * TOKENS,
        entropy=(lower + upper) / 2,
        topk_ids=np.pad(ids, fill, constant_values=NO_TOKEN),
        topk_logprobs=np.pad(logprobs, fill, constant_values=LEAST_NATS),
        entropy_lower=lower.astype(np.float32),
        entropy_upper=upper.astype(np.float32),
        chunks=np.arange(TOKENS, dtype=np.int32),
        rows=np.ones(TOKENS, np.bool_),
    )


def both(vocab_size: int) -> tuple[TokenScores, TokenScores]:
    return placed(np.random.default_rng(3), vocab_size, 0), placed(np.random.default_rng(3), vocab_size, PADS)


@pytest.fixture(scope="module")
def model(student):
    return AutoModelForCausalLM.from_pretrained(student)


DIVERGENCES = [forward_kl(), reverse_kl(), jsd(0.3), skew(0.4), reverse_skew(0.4)]


def supervised(targets: SoftTargets) -> Supervision:
    rollout, no_policy_term = generation(np.arange(3, 3 + TOKENS)), np.zeros(TOKENS, np.bool_)
    return on_policy(next(simulated_prompts()), rollout, policy_mask=no_policy_term, soft_targets=(targets,))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_padded_row_has_the_loss_and_the_gradient_of_the_same_row_without(divergence, model):
    losses = [loss_of([supervised(compared(scores, divergence))], model) for scores in both(model.config.vocab_size)]
    assert losses[0].loss == pytest.approx(losses[1].loss, rel=1e-6)
    for name, gradient in losses[0].gradient.items():
        np.testing.assert_allclose(losses[1].gradient[name], gradient, rtol=1e-4, atol=1e-7)
    for place in range(TOKENS):  # what the policy is told of the student there is no claim either
        told = losses[1].live[0].rows[0].logprobs[place]
        assert told[WIDTH:].tolist() == [LEAST_NATS] * PADS
        np.testing.assert_allclose(told[:WIDTH], losses[0].live[0].rows[0].logprobs[place], rtol=1e-5)


def test_cells_and_new_targets_of_a_padded_row_are_those_of_the_row_without():
    plain, padded = (compared(scores, reverse_kl()) for scores in both(50))
    student = np.log(np.random.default_rng(1).dirichlet(np.ones(WIDTH + 1), TOKENS)).astype(np.float32)
    with_pads = np.pad(student[:, :-1], ((0, 0), (0, PADS)), constant_values=LEAST_NATS)
    rows = [LiveRows(logprobs=each, tail_logprobs=student[:, -1]) for each in (student[:, :-1], with_pads)]
    expected, found = cells(plain, rows[0]), cells(padded, rows[1])
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(np.delete(other, range(WIDTH, WIDTH + PADS), axis=1), one, rtol=1e-6)
        np.testing.assert_allclose(other[:, WIDTH : WIDTH + PADS], LEAST_NATS, rtol=1e-2)
    moved = [retargeted(each, cells[0] * 0.5) for each, cells in ((plain, expected), (padded, found))]
    np.testing.assert_allclose(moved[1].probabilities[:, :WIDTH], moved[0].probabilities, rtol=1e-6)
    np.testing.assert_allclose(moved[1].tails, moved[0].tails, rtol=1e-6)


@pytest.mark.parametrize("noise_nats", [0.0, 1e-4, 0.05])
async def test_the_score_of_a_padded_row_is_that_of_the_row_without_and_nothing_is_certain(noise_nats):
    rng = np.random.default_rng(5)
    student = np.log(rng.dirichlet(np.ones(VOCAB), TOKENS))
    plain, padded = both(VOCAB)

    async def candidate_logprobs(response_ids: Any, positions: Any, ids: Any, *, version: Any) -> Any:
        of_tokens = np.take_along_axis(student[positions], np.maximum(ids, 0), axis=1)
        return np.where(ids == NO_TOKEN, LEAST_NATS, of_tokens)

    offered = capabilities(VOCAB, exact_entropy=False, max_position_top_k=0, logprob_noise_nats=noise_nats)
    stages: Any = SimpleNamespace(student=None, teacher=offered, candidate_logprobs=candidate_logprobs)
    rule = ScoreRule(candidates=WIDTH + PADS, vocab_size=VOCAB)
    rollout, everywhere = generation(np.arange(TOKENS)), np.arange(TOKENS)
    found = await certified_selection(rollout, padded, everywhere, stages, rule, budget=TOKENS, max_asked=9)
    logprobs = np.take_along_axis(student, plain.topk_ids, axis=1)
    expected = score_positions(plain.topk_logprobs, logprobs, plain.entropy, VOCAB)
    assert found.parts is not None
    for name, part in found.parts._asdict().items():
        moved = 1e-4 + 2 * noise_nats  # a row that is known within bounds shows their middle
        np.testing.assert_allclose(part, getattr(expected, name), rtol=moved, err_msg=name)
    assert (found.outcome, found.certain.any()) == ("uncertain", False)


def test_spot_probes_no_row_of_one_candidate_and_none_that_is_unknown():
    policy: Any = make_policy(SpotPolicy, policy_context(), positions=1)
    scores = both(50)[1]
    scores.topk_ids[1, 1:], scores.rows[2] = NO_TOKEN, False
    eligible = policy._eligible(np.ones(TOKENS, np.bool_), generation(np.arange(TOKENS)), scores, None)
    assert eligible.tolist() == [0, 3, 4]


def test_a_branch_of_fewer_candidates_is_a_row_that_ends_early():
    policy: Any = make_policy(SpotPolicy, policy_context(), positions=1, score_top_k=4, probe_top_k=3, baseline=0.5)
    branches: Any = [
        SimpleNamespace(position=place, candidate_ids=ids, target=np.full(len(ids), 1 / len(ids)), prior=np.ones(1))
        for place, ids in enumerate((np.array([5, 6], np.int32), np.array([7, 8, 9], np.int32)))
    ]
    (targets,) = policy._exploit(branches)
    assert targets.token_ids.tolist() == [[5, 6, NO_TOKEN], [7, 8, 9]]
    assert targets.probabilities.tolist() == [[0.5, 0.5, 0.0], pytest.approx([1 / 3] * 3)]
    assert targets.baselines.tolist() == [[0.5, 0, 0]] * 2


def test_rows_in_the_teachers_own_tokens_are_never_renormalised():
    (plain, _) = both(50)
    with pytest.raises(Exception, match="rows are compared with their tail: give has_tail=True"):
        compared(plain, forward_kl(), has_tail=False)
    with pytest.raises(Exception, match="rows are compared with their tail"):
        compared(plain, forward_kl(is_conditional=True))
    assert compared(msgspec.structs.replace(plain, rows=None), forward_kl(), has_tail=False).tails is None
