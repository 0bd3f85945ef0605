"""Response positions meet the model rows that decide them: the property that fails when anything is one row off."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_async.models.alignment import branch_prefix_length, decision_row, decision_rows

VOCAB_SIZE = 11


class CausalModel(torch.nn.Module):
    """A recurrent language model: causal by construction, so that no mask can hide a mistake."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB_SIZE, 8)
        self.recur = torch.nn.GRU(8, 8, batch_first=True)
        self.head = torch.nn.Linear(8, VOCAB_SIZE)

    def forward(self, token_ids):  # (L,) -> (L, V) log-probabilities of each row
        states, _ = self.recur(self.embed(token_ids)[None])
        return (3 * self.head(states[0])).log_softmax(dim=-1)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return CausalModel().double().eval().requires_grad_(False)


token_lists = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8)
EXAMPLES = settings(max_examples=60)


def next_token_logprobs(model, prompt, response):
    """What a server does: read everything so far, look at the last row, step by step. (T, V)"""
    return torch.stack([model(torch.tensor(prompt + response[:t]))[-1] for t in range(len(response))])


@EXAMPLES
@given(prompt=token_lists, response=token_lists)
def test_decision_rows_are_the_step_by_step_distributions_and_their_neighbours_are_not(model, prompt, response):
    rows = model(torch.tensor(prompt + response))
    expected = next_token_logprobs(model, prompt, response)

    def decides_the_response(aligned):
        return torch.allclose(rows[aligned], expected, atol=1e-9, rtol=0)

    aligned = decision_rows(len(prompt), len(response))
    assert decides_the_response(aligned)
    assert not decides_the_response(slice(aligned.start + 1, aligned.stop + 1))  # the rows after reading x_t itself
    if aligned.start > 0:
        assert not decides_the_response(slice(aligned.start - 1, aligned.stop - 1))


@EXAMPLES
@given(prompt=token_lists, response=token_lists)
def test_single_rows_and_branch_roots_agree_with_the_slice(model, prompt, response):
    tokens, prompt_length = prompt + response, len(prompt)
    aligned = decision_rows(prompt_length, len(response))
    assert [decision_row(prompt_length, t) for t in range(len(response))] == list(range(aligned.start, aligned.stop))
    for t in range(len(response)):
        context = tokens[: branch_prefix_length(prompt_length, t)]
        assert context == prompt + response[:t]  # c_t: everything before x_t, and not x_t
        expected = model(torch.tensor(tokens))[decision_row(prompt_length, t)]
        torch.testing.assert_close(model(torch.tensor(context))[-1], expected, atol=1e-9, rtol=0)


def test_a_response_without_a_prompt_has_no_row_to_decide_its_first_token():
    with pytest.raises(ValueError, match="at least one prompt token"):
        decision_rows(0, 5)
