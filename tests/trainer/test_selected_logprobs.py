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


def with_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, blocks: list[Block], temperature: float, *, is_exact: bool
) -> list[Tensor]:
    leaves = [each.detach().clone().requires_grad_() for each in (hidden, weight, bias) if each is not None]
    hidden, weight, bias = *leaves, *[None] * (3 - len(leaves))
    if is_exact:
        logits = torch.nn.functional.linear(hidden, weight, bias)
        every = (logits / temperature).log_softmax(-1)
        found = torch.cat([every[block.start + block.rows, block.token_ids] for block in blocks])
    else:
        found = torch.cat([each for each, *_ in selected_logprobs(hidden, weight, bias, blocks, temperature)])
        assert found.dtype == torch.float32
    factors = torch.cat([torch.cos(block.start + block.rows + 3.0 * block.token_ids) for block in blocks])
    (factors * found).sum().backward()
    return [found.detach(), *[each.grad for each in leaves if each.grad is not None]]


@pytest.fixture
def layer() -> list[Tensor]:
    """Hidden states, weight and bias whose numbers bfloat16 has too, and logits of some size."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((ROWS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    return [(3 * torch.randn(*shape, generator=generator)).bfloat16().float() for shape in shapes]


@pytest.mark.parametrize("rows_per_block", [ROWS, 3, 1])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_they_and_their_gradients_are_those_of_a_dense_log_softmax(
    layer: list[Tensor], rows_per_block: int, has_bias: bool, temperature: float
) -> None:
    hidden, weight, bias = layer
    given = [hidden, weight, bias if has_bias else None]
    blocks = blocks_of(rows_per_block)
    found = with_gradients(*given, blocks, temperature, is_exact=False)
    doubles = [each.double() if each is not None else None for each in given]
    exact = with_gradients(*doubles, blocks, temperature, is_exact=True)
    assert len(found) == len(exact) == 3 + has_bias
    for own, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(own.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("is_autocast", [True, False], ids=["autocast", "bfloat16"])
def test_16_bit_factors_have_float32_logits_and_a_gradient_that_more_blocks_do_not_blur(
    layer: list[Tensor], is_autocast: bool
) -> None:
    def off(rows_per_block: int) -> list[float]:
        blocks = blocks_of(rows_per_block)
        exact = with_gradients(*[each.double() for each in layer], blocks, 1.0, is_exact=True)
        given = layer if is_autocast else [each.bfloat16() for each in layer]
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            found = with_gradients(*given, blocks, 1.0, is_exact=False)
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


@pytest.mark.parametrize("rows_per_block", [ROWS, 3])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropies_and_their_gradients_are_those_of_a_dense_softmax_beside_log_probabilities_and_tails(
    layer: list[Tensor], rows_per_block: int, temperature: float
) -> None:
    rows, heads = torch.tensor([0, 2, 2]), torch.tensor([[1, 2], [0, 3], [4, 4]])

    def computed(hidden: Tensor, weight: Tensor, bias: Tensor, *, is_exact: bool) -> list[Tensor]:
        leaves = [each.detach().clone().requires_grad_() for each in (hidden, weight, bias)]
        blocks = [
            each._replace(
                wants_entropies=True,
                tail_rows=rows[rows < each.end - each.start],
                head_ids=heads[: sum(rows < each.end - each.start)],
            )
            for each in blocks_of(rows_per_block)
        ]
        if is_exact:
            every = (torch.nn.functional.linear(*leaves) / temperature).log_softmax(-1)
            own = [every[block.start : block.end] for block in blocks]
            found = [each[block.rows, block.token_ids] for each, block in zip(own, blocks, strict=True)]
            found += [
                each[block.tail_rows].scatter(1, block.head_ids, -torch.inf).logsumexp(-1)
                for each, block in zip(own, blocks, strict=True)
            ]
            found += [-(each.exp() * each).sum(-1) for each in own]
        else:
            selected, tails, entropies = zip(*selected_logprobs(*leaves, blocks, temperature), strict=True)
            found = [*selected, *tails, *entropies]
        values = torch.cat(found)
        (values * torch.cos(torch.arange(len(values)))).sum().backward()
        return [values.detach(), *[each.grad for each in leaves if each.grad is not None]]

    found = computed(*layer, is_exact=False)
    for own, expected in zip(found, computed(*[each.double() for each in layer], is_exact=True), strict=True):
        torch.testing.assert_close(own.double(), expected, rtol=1e-5, atol=1e-4)
