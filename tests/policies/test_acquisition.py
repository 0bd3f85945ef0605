"""Where to probe: scores against a dense reference, selection, entropy bounds and the token mask."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from whole_distributions import log_softmax

from spot_async.models.entropy import entropy_bounds
from spot_async.policies.acquisition import probeable_tokens, score_positions, select_positions

VARIANTS = ("H", "HC", "HG", "HC-Mass", "Full")
EXAMPLES = settings(max_examples=60)


@pytest.fixture(scope="module")
def random_policies(dense_scores):
    """Teacher and student rows as a server would give them, and the dense reference of each position."""

    def make(seed, positions, vocab_size, k, lambda_mass=0.5):
        rng = np.random.default_rng(seed)
        scale = rng.uniform(0.2, 6.0, size=(positions, 1))
        logits = scale * rng.standard_t(3, size=(positions, vocab_size))
        teacher, student = map(log_softmax, (logits, 0.7 * logits + scale * rng.normal(size=logits.shape)))
        candidates = np.argsort(-teacher, axis=-1)[:, :k]
        reference = dense_scores(teacher, student, k, lambda_mass)
        rows = [np.take_along_axis(each, candidates, axis=-1) for each in (teacher, student)]
        return *rows, reference | {"raw_entropy": reference["entropy"] * math.log(vocab_size)}

    return make


@EXAMPLES
@given(
    seed=st.integers(0, 2**32),
    positions=st.integers(1, 6),
    vocab_size=st.integers(2, 60),
    k=st.integers(1, 16),
    lambda_mass=st.floats(0, 1),
    variant=st.sampled_from(VARIANTS),
)
def test_every_quantity_matches_the_dense_reference(
    random_policies, seed, positions, vocab_size, k, lambda_mass, variant
):
    k = min(k, vocab_size)
    teacher, student, reference = random_policies(seed, positions, vocab_size, k, lambda_mass)

    scores = score_positions(
        teacher,
        student,
        reference["raw_entropy"],
        vocab_size,
        lambda_mass=lambda_mass,
        lambda_shape=1 - lambda_mass,
        variant=variant,
    )

    for name in ("entropy", "mass", "coverage", "divergence", "gap"):
        np.testing.assert_allclose(getattr(scores, name), reference[name], atol=1e-9, err_msg=name)
    np.testing.assert_allclose(scores.score, reference[variant], atol=1e-9)


def test_float32_log_probabilities_keep_every_part_within_1e_6_and_in_range(random_policies):
    teacher, student, reference = random_policies(seed=3, positions=200, vocab_size=16, k=16)
    scores = score_positions(
        teacher.astype(np.float32), student.astype(np.float32), reference["raw_entropy"].astype(np.float32), 16
    )
    for name in ("entropy", "mass", "coverage", "divergence", "gap"):
        part = getattr(scores, name)
        np.testing.assert_allclose(part, reference[name], atol=1e-6, err_msg=name)
        assert part.min() >= 0.0
        assert part.max() <= 1.0
    assert scores.score.min() >= 0.0


def test_defaults_are_the_papers_full_score_with_equal_lambdas(random_policies):
    teacher, student, reference = random_policies(seed=5, positions=4, vocab_size=40, k=16)
    np.testing.assert_allclose(
        score_positions(teacher, student, reference["raw_entropy"], 40).score, reference["Full"], atol=1e-9
    )


def test_divergence_is_one_bit_for_disjoint_shapes_and_zero_for_equal_ones():
    half, quarter = math.log(0.5), math.log(0.25)
    scores = score_positions(
        [[half, half, -math.inf, -math.inf], [half, half, -math.inf, -math.inf]],
        [[-math.inf, -math.inf, half, half], [quarter, quarter, -math.inf, -math.inf]],
        [math.log(2), math.log(2)],
        4,
    )
    np.testing.assert_allclose(scores.divergence, [1.0, 0.0], atol=1e-12)
    np.testing.assert_allclose(scores.coverage, [1.0, 0.5], atol=1e-12)
    # Hbar = 1/2, C = 1; G = JS/2 in the first row and (1 - A)/2 in the second.
    np.testing.assert_allclose(scores.score, [0.25, 0.125], atol=1e-12)


def test_a_student_without_mass_on_the_candidates_has_the_largest_gap():
    teacher = np.log([[0.6, 0.3]])
    scores = score_positions(teacher, [[-math.inf, -math.inf]], [0.5], 10)
    assert scores.coverage[0] == 0.0
    assert scores.gap[0] == 1.0
    assert scores.score[0] == score_positions(teacher, teacher, [0.5], 10, variant="HC").score[0]


def test_shape_is_compared_even_where_probabilities_underflow():
    shape = np.log([[0.7, 0.2, 0.1]])
    scores = score_positions(shape, shape - 2000.0, [0.8], 100)
    assert scores.coverage[0] == 0.0
    np.testing.assert_allclose(scores.divergence, 0.0, atol=1e-12)


def test_one_candidate_has_no_shape_to_differ_in():
    scores = score_positions([[math.log(0.9)]], [[math.log(0.2)]], [0.4], 50)
    assert scores.divergence[0] == 0.0
    np.testing.assert_allclose(scores.gap, 0.5 * 0.8)


def test_an_empty_response_has_no_scores_and_no_selection():
    scores = score_positions(np.empty((0, 16)), np.empty((0, 16)), np.empty(0), 100)
    assert all(part.shape == (0,) for part in scores)
    assert select_positions(scores.score, np.empty(0, dtype=bool), 2).shape == (0,)


def test_rows_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match=r"\(3, 4\).*\(1,\)"):
        score_positions(np.zeros((3, 4)), np.zeros((3, 4)), np.zeros(1), 10)  # would broadcast silently
    with pytest.raises(ValueError, match="sum to 1"):
        score_positions(np.zeros((1, 1)), np.zeros((1, 1)), np.zeros(1), 10, lambda_mass=0.5, lambda_shape=0.6)


@EXAMPLES
@given(
    rows=st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.2, 0.30000001, 0.3]), st.booleans()), max_size=12),
    budget=st.integers(0, 5),
)
def test_selection_is_the_best_valid_positions_with_ties_to_the_earlier(rows, budget):
    score, valid = [s for s, _ in rows], [v for _, v in rows]
    by_rule = sorted((t for t in range(len(rows)) if valid[t] and score[t] > 0), key=lambda t: (-score[t], t))[:budget]

    selected = select_positions(np.array(score), np.array(valid, dtype=bool), budget)

    assert selected.dtype == np.int64
    assert selected.tolist() == sorted(by_rule)


def heavy_tailed_rows(seed, vocab_size):
    """Distributions from nearly one-hot to nearly flat, sorted in descending order."""
    rng = np.random.default_rng(seed)
    rows = [rng.dirichlet(np.full(vocab_size, alpha)) for alpha in (0.02, 0.2, 1.0, 30.0)]
    rows += [rng.permutation(1.0 / np.arange(1, vocab_size + 1) ** power) for power in (0.5, 1.0, 2.0)]
    ordered = -np.sort(-np.array([row / row.sum() for row in rows]), axis=-1)
    return ordered, np.array([-sum(p * math.log(p) for p in row if p > 0) for row in ordered])


def safe_log(p):
    return np.log(p, out=np.full_like(p, -np.inf), where=p > 0)


@EXAMPLES
@given(seed=st.integers(0, 2**32), vocab_size=st.integers(1, 300), k=st.integers(1, 40))
def test_entropy_bounds_hold_and_tighten_with_every_token_shown(seed, vocab_size, k):
    k = min(k, vocab_size)
    rows, entropy = heavy_tailed_rows(seed, vocab_size)

    lower, upper = entropy_bounds(safe_log(rows[:, :k]), vocab_size)

    assert (lower <= entropy + 1e-9).all()
    assert (upper >= entropy - 1e-9).all()
    assert (upper <= math.log(vocab_size) + 1e-9).all()
    if k < vocab_size:
        closer_lower, closer_upper = entropy_bounds(safe_log(rows[:, : k + 1]), vocab_size)
        assert (closer_lower >= lower - 1e-9).all()
        assert (closer_upper <= upper + 1e-9).all()


def test_upper_bound_is_the_entropy_of_an_even_tail():
    row = np.array([0.5, 0.3, *[0.2 / 8] * 8])
    _, upper = entropy_bounds(np.log(row[None, :2]), 10)
    np.testing.assert_allclose(upper, -(row * np.log(row)).sum(), atol=1e-12)


@pytest.mark.parametrize("remainder", [0.0, 0.04])
def test_lower_bound_is_the_entropy_of_a_packed_tail(remainder):
    # Two tokens shown, two hidden ones as likely as the last shown, then what is left on a single one.
    shown_last = (1.0 - 0.4 - remainder) / 3
    row = np.array([0.4, shown_last, shown_last, shown_last, remainder])
    lower, _ = entropy_bounds(np.log(row[None, :2]), 1000)
    np.testing.assert_allclose(lower, -sum(p * math.log(p) for p in row if p > 0), atol=1e-9)


def test_a_row_shown_whole_has_equal_bounds():
    rows, entropy = heavy_tailed_rows(seed=1, vocab_size=20)
    lower, upper = entropy_bounds(safe_log(rows), 20)
    np.testing.assert_allclose(lower, entropy, atol=1e-12)
    np.testing.assert_allclose(upper, entropy, atol=1e-12)


def test_mass_rounded_past_one_leaves_nothing_missing():
    rows, _ = heavy_tailed_rows(seed=2, vocab_size=30)
    noisy = safe_log(rows[:3, :20]) + 0.5  # sharp rows, far louder than any server
    shown = np.exp(noisy)
    assert (shown.sum(axis=-1) > 1.0).all()
    lower, upper = entropy_bounds(noisy, 30)
    np.testing.assert_allclose(lower, -(shown * np.where(shown > 0, noisy, 0.0)).sum(axis=-1), atol=1e-12)
    np.testing.assert_array_equal(lower, upper)


@pytest.mark.parametrize(
    ("row", "vocab_size"),
    [
        (np.log([0.7, 0.2, 0.1]) - 1e-7, 3),  # shown whole, rounded down
        ([-1e-7, -math.inf], 50),  # what is not shown is impossible
    ],
)
def test_mass_lost_to_rounding_is_not_taken_for_a_hidden_tail(row, vocab_size):
    lower, upper = entropy_bounds([row], vocab_size)
    assert np.isfinite(lower).all()
    np.testing.assert_array_equal(lower, upper)


def test_more_log_probabilities_than_tokens_are_refused():
    with pytest.raises(ValueError, match="exceed the vocabulary of 3"):
        entropy_bounds(np.zeros((1, 4)), 3)


BYTE_LEVEL_TOKENS = {
    # Byte-level spelling: Ġ is a blank, Ċ a newline, â Ģ Ķ are the three bytes of a long dash, ÃĹ is × and âĪĴ U+2212.
    "eligible": ["a", "Ġthe", "7", "Ġx=", "\\boxed", "Ã", "âĢ", "Ķ", "Ã©", "?!a", "âĪĳ", "ÃĹ", "âĪĴ"],
    "masked": ["Ġ", "ĠĠĠ", "Ċ", "ĊĊ", "ĉ", ".", "Ġ,", "):Ċ", "$", "Ġ+", "==", "|", "`", "âĢĶ", "Â¿", "ãĢĤ", "{", "Ġ\\"],
}


def byte_level_tokenizer(ids):
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|role|>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def test_only_tokens_with_content_of_their_own_may_be_probed():
    eligible, masked = BYTE_LEVEL_TOKENS["eligible"], BYTE_LEVEL_TOKENS["masked"]
    ids = {token: token_id for token_id, token in enumerate([*eligible, *masked])}
    tokenizer = byte_level_tokenizer(ids)
    vocab_size = len(tokenizer) + 5  # models pad their softmax past the tokenizer

    allowed = probeable_tokens(tokenizer, vocab_size)

    assert allowed.shape == (vocab_size,)
    assert allowed.dtype == np.bool_
    assert [token for token in eligible if not allowed[ids[token]]] == []
    assert [token for token in masked if allowed[ids[token]]] == []
    assert not allowed[tokenizer.convert_tokens_to_ids(["<|end|>", "<|role|>"])].any()  # named and unnamed special
    assert allowed[tokenizer.convert_tokens_to_ids("<tool>")]  # added, yet text like any other
    assert not allowed[len(tokenizer) :].any()


def test_ids_without_a_token_and_ids_past_the_softmax_are_not_probed():
    words = Tokenizer(models.WordLevel({"a": 0, "b": 3, "c": 9}, unk_token="a"))
    allowed = probeable_tokens(PreTrainedTokenizerFast(tokenizer_object=words), 5)
    assert allowed.tolist() == [True, False, False, True, False]


def test_sentencepiece_style_blanks_and_byte_tokens_are_told_apart():
    pieces = ["<unk>", "▁", "▁the", "▁.", "<0x0A>", "<0xE2>", "<0x2C>", "x"]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    allowed = probeable_tokens(fast, len(pieces))
    assert [piece for piece, ok in zip(pieces, allowed, strict=True) if ok] == ["▁the", "<0xE2>", "x"]


def test_order_of_candidates_does_not_matter(random_policies):
    teacher, student, reference = random_policies(seed=11, positions=1, vocab_size=12, k=3)
    results = [
        score_positions(teacher[:, order], student[:, order], reference["raw_entropy"], 12).score[0]
        for order in map(list, itertools.permutations(range(3)))
    ]
    np.testing.assert_allclose(results, reference["Full"][0], atol=1e-12)
