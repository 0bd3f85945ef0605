"""Evaluation figures: pass@k against enumeration of all subsets, and errors over problems."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_async.evaluation.metrics import (
    avg_at_k_per_problem,
    pass_at_k_of_counts,
    pass_at_k_per_problem,
    standard_error,
)


@st.composite
def tables(draw):
    samples = draw(st.integers(1, 7))
    row = st.lists(st.booleans(), min_size=samples, max_size=samples)
    return np.array(draw(st.lists(row, min_size=1, max_size=5)))


@settings(max_examples=80)
@given(correct=tables(), data=st.data())
def test_pass_at_k_is_the_share_of_all_k_subsets_with_a_correct_sample(correct, data):
    k = data.draw(st.integers(1, correct.shape[1]))
    solved = [[any(subset) for subset in itertools.combinations(row, k)] for row in correct.tolist()]
    per_problem = [sum(row) / len(row) for row in solved]
    np.testing.assert_allclose(pass_at_k_per_problem(correct, k), per_problem, atol=1e-12)


@settings(max_examples=40)
@given(correct=tables())
def test_avg_at_k_is_mean_accuracy_and_the_pass_at_1_of_the_same_samples(correct):
    accuracy = [sum(row) / len(row) for row in correct.tolist()]
    np.testing.assert_allclose(avg_at_k_per_problem(correct), accuracy, atol=1e-12)
    np.testing.assert_allclose(pass_at_k_per_problem(correct, 1), avg_at_k_per_problem(correct), atol=1e-12)


def test_pass_at_k_is_exact_for_thousands_of_samples():
    # C(5000, 2000) has 1,460 digits; 1 - (1 - p)^k is its limit, and the product form the reference.
    correct = np.zeros((1, 5000), dtype=bool)
    correct[0, :3] = True
    expected = 1 - math.prod(1 - 2000 / i for i in (4998, 4999, 5000))
    assert pass_at_k_per_problem(correct, 2000) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", [0, 9])
def test_pass_at_k_beyond_the_samples_is_refused_not_extrapolated(k):
    with pytest.raises(ValueError, match=rf"pass@{k} .* 8 samples"):
        pass_at_k_per_problem(np.ones((3, 8), dtype=bool), k)


def test_pass_at_k_of_counts_has_their_shape_and_refuses_counts_of_more_samples():
    assert pass_at_k_of_counts([[4, 0, 2], [1, 2, 4]], 4, 1).tolist() == [[1, 0, 0.5], [0.25, 0.5, 1]]
    for wrong in (5, -1):
        with pytest.raises(ValueError, match="counts of correct responses must be from 0 to 4"):
            pass_at_k_of_counts([[4, wrong]], 4, 2)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (8,)])
def test_a_table_without_problems_or_samples_is_refused(shape):
    with pytest.raises(ValueError, match="problems, samples"):
        avg_at_k_per_problem(np.ones(shape, dtype=bool))


def test_standard_error_is_over_problems_not_samples():
    # Two problems, one always solved and one never: 16 samples, yet only two independent facts.
    correct = np.array([[True] * 8, [False] * 8])
    assert standard_error(avg_at_k_per_problem(correct)) == pytest.approx(math.sqrt(0.5) / math.sqrt(2))
    assert math.isnan(standard_error([0.5]))
    values = np.random.default_rng(0).uniform(size=50)
    spread = math.sqrt(sum((v - values.mean()) ** 2 for v in values) / 49)
    assert standard_error(values) == pytest.approx(spread / math.sqrt(50), abs=1e-12)
