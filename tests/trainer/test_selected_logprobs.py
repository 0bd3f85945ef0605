"""Log-probabilities of chosen tokens and their gradients, against log_softmax in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spot_async.trainer.model import Block, selected_logprobs

ROWS, HIDDEN, VOCABULARY = 7, 16, 50
PAIRS = [
    (0, 4), (1, 9), (2, 1), (3, 49), (4, 0), (5, 7), (6, 7),  # each row's own token
    (2, 1), (2, 30), (2, 2), (5, 7),  # and more of some rows; two pairs repeat
]  # fmt: skip


def blocks_of(rows_per_block: int) -> list[Block]:
    blocks = []
    for start in range(0, ROWS, rows_per_block):
        end = min(start + rows_per_block, ROWS)
        pairs = torch.tensor([pair for pair in PAIRS if start <= pair[0] < end])
        blocks.append(Block(start, end, pairs[:, 0] - start, pairs[:, 1]))
    return blocks


def computed(layer: list[Tensor], blocks: list[Block], temperature: float, *, is_exact: bool) -> list[Tensor]:
    """Return all that blocks ask for, as one tensor, and the gradients of a sum of it."""
    leaves = [each.detach().clone().requires_grad_() for each in layer]
    if is_exact:
        every = (torch.nn.functional.linear(*leaves) / temperature).log_softmax(-1)
        own = [(every[block.start : block.end], block) for block in blocks]
        found = [each[block.rows, block.token_ids] for each, block in own]
        found += [
            each[block.tail_rows].scatter(1, block.head_ids, -torch.inf).logsumexp(-1)
            for each, block in own
            if block.tail_rows is not None
        ]
        found += [-(each.exp() * each).sum(-1) for each, block in own if block.wants_entropies]
    else:
        hidden, weight, *bias = leaves
        of_blocks = selected_logprobs(hidden, weight, bias[0] if bias else None, blocks, temperature)
        found = [each for kind in zip(*of_blocks, strict=True) for each in kind]
    values = torch.cat(found)
    assert is_exact or values.dtype == torch.float32
    of_pairs = [block.start + block.rows + 3.0 * block.token_ids for block in blocks]
    (values * torch.cos(torch.cat([*of_pairs, torch.arange(len(values) - len(PAIRS))]))).sum().backward()
    return [values.detach(), *[each.grad for each in leaves if each.grad is not None]]


@pytest.fixture
def layer() -> list[Tensor]:
    """Hidden states, weight and bias whose numbers bfloat16 has too, and logits of some size."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((ROWS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    return [(3 * torch.randn(*shape, generator=generator)).bfloat16().float() for shape in shapes]


@pytest.mark.parametrize("rows_per_block", [ROWS, 3, 1])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("wants_more", [False, True], ids=["pairs", "tails and entropies too"])
def test_they_and_their_gradients_are_those_of_a_dense_log_softmax(
    layer: list[Tensor], rows_per_block: int, has_bias: bool, temperature: float, wants_more: bool
) -> None:
    given, blocks = layer[: 2 + has_bias], blocks_of(rows_per_block)
    if wants_more:
        rows, heads = torch.tensor([0, 2, 2]), torch.tensor([[1, 2], [0, 3], [4, 4]])
        sizes = [int((rows < each.end - each.start).sum()) for each in blocks]
        blocks = [
            each._replace(wants_entropies=True, tail_rows=rows[:size], head_ids=heads[:size])
            for each, size in zip(blocks, sizes, strict=True)
        ]
    found = computed(given, blocks, temperature, is_exact=False)
    exact = computed([each.double() for each in given], blocks, temperature, is_exact=True)
    assert len(found) == len(exact) == 3 + has_bias
    for own, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(own.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("is_autocast", [True, False], ids=["autocast", "bfloat16"])
def test_16_bit_factors_have_float32_logits_and_a_gradient_that_more_blocks_do_not_blur(
    layer: list[Tensor], is_autocast: bool
) -> None:
    def off(rows_per_block: int) -> list[float]:
        blocks = blocks_of(rows_per_block)
        exact = computed([each.double() for each in layer], blocks, 1.0, is_exact=True)
        given = layer if is_autocast else [each.bfloat16() for each in layer]
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            found = computed(given, blocks, 1.0, is_exact=False)
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    logprobs, _, of_weight, _ = off(ROWS)
    assert logprobs < 1e-6  # of logits rounded to bfloat16 they are 1e-3 off
    assert of_weight < 3e-3  # a gradient of logits in bfloat16
    assert off(1)[2] < 1.05 * of_weight


def test_an_impossible_token_has_no_gradient_that_is_not_a_number() -> None:
    hidden, weight = torch.ones(1, 1, requires_grad=True), torch.tensor([[0.0], [1.0], [-torch.inf]])
    block = Block(0, 1, torch.tensor([0]), torch.tensor([1]))
    weight.requires_grad_()
    ((found, *_),) = selected_logprobs(hidden, weight, None, [block], 1.0)
    found.backward()
    assert torch.isfinite(found).all()
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()
