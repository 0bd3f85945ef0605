"""Log-probabilities of chosen tokens and their gradient, against log_softmax in float64."""

import pytest
import torch

from spot_async.trainer.selected_logprobs import selected_logprobs


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_they_and_their_gradient_are_those_of_a_dense_log_softmax(dtype, tolerance, temperature):
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(7, 50, generator=generator)).to(dtype).requires_grad_()
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 6, 2, 2, 2, 5])  # a row's own token, and more of some rows
    ids = torch.tensor([4, 9, 1, 49, 0, 7, 7, 1, 30, 2, 7])  # two pairs repeat
    weights = torch.randn(len(rows), generator=generator)

    found = selected_logprobs(logits, rows, ids, temperature)
    (weights * found).sum().backward()

    exact = logits.detach().double().requires_grad_()
    expected = (exact / temperature).log_softmax(-1)[rows, ids]
    (weights * expected).sum().backward()
    assert found.dtype == torch.float32
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)  # the sums are in float32 either way
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=0, atol=tolerance)


def test_an_impossible_token_has_no_gradient_that_is_not_a_number():
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)
    found = selected_logprobs(logits, torch.tensor([0]), torch.tensor([1]), 1.0)
    found.backward()
    assert torch.isfinite(found).all()
    assert torch.isfinite(logits.grad).all()
