"""A teacher with a tokenizer of its own reads the same bytes, and chunks end where both tokenizers have a border."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import chunk_laws
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from joined_teacher import with_bytes, with_joined_tokens
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from spot_async.errors import ConfigError, ContractError, PermanentError
from spot_async.models.chunks import UNKNOWN, Reading
from spot_async.models.files import read_model
from spot_async.models.own_tokens import OwnTokens
from spot_async.models.responses import sampled_tokens
from spot_async.models.retokenizing import Encoder
from spot_async.stages.teachers import NOTHING_SCORED
from spot_async.testing.services import generation
from spot_async.types import LEAST_NATS, NO_TOKEN, TokenScores

END, START, THINK = "<|im_end|>", "<|im_start|>", "<think>"
PADDED = 5  # ids of a softmax beyond the tokenizer's


def of_bytes(*corpus: str, normalizer: Any = None, specials: tuple[str, ...] = (END, START, THINK)) -> Any:
    """A byte-level BPE; the corpus makes its merges."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    if normalizer is not None:
        bpe.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=specials[0], extra_special_tokens=[*specials[1:]])


def of_sentences() -> Any:
    """A SentencePiece Unigram: it puts a blank before whatever begins, and writes unknown characters in bytes."""
    pieces = ["▁", "a", "b", "ab", "▁a", "▁ab", "ba", "1", "2", "12", "123", "▁12", "é", "世", "世界", "▁世", "="]
    vocabulary = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    vocabulary += [(piece, -1.0 - 1 / len(piece)) for piece in pieces]
    unigram = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    unigram.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    with_start = PreTrainedTokenizerFast(tokenizer_object=unigram, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    with_start.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", with_start.bos_token_id)]
    )
    return with_start


NUMBERS = of_bytes("123 1234 12 999 = 144 the sum is 10", "abab ab 世界 é 世界 é")
WORDS = of_bytes("the sum the theorem sum is", "世 ba ba aab  a  b")
BYTES = of_bytes("")
SENTENCES = of_sentences()
KINDS = {"numbers": NUMBERS, "words": WORDS, "bytes": BYTES, "sentences": SENTENCES}
ENCODERS = {name: Encoder(tokenizer, len(tokenizer) + PADDED) for name, tokenizer in KINDS.items()}
TABLES = {name: encoder.table for name, encoder in ENCODERS.items()}


def own(student: str, teacher: str, **settings: Any) -> OwnTokens:
    ends = {"student_ends": [KINDS[student].eos_token_id], "teacher_ends": [KINDS[teacher].eos_token_id]}
    return OwnTokens(ENCODERS[student], ENCODERS[teacher], **(ends | settings))


PAIRS = {(one, other): own(one, other) for one in KINDS for other in KINDS}


def under(teacher: Any, **settings: Any) -> OwnTokens:
    """The student that counts in numbers, under another teacher."""
    ends = {"student_ends": [NUMBERS.eos_token_id], "teacher_ends": [teacher.eos_token_id]}
    return OwnTokens(ENCODERS["numbers"], Encoder(teacher, len(teacher)), **(ends | settings))


def written(name: str, text: str) -> list[int]:
    ids: list[int] = KINDS[name].encode(text, add_special_tokens=False, split_special_tokens=True)
    return ids


def ended(text: str) -> np.ndarray:
    return np.array([*written("numbers", text), NUMBERS.eos_token_id], np.int32)


def assert_laws(reading: Reading, response: np.ndarray, student: str, teacher: str) -> None:
    ends = KINDS[student].eos_token_id, KINDS[teacher].eos_token_id
    chunk_laws.assert_laws(reading, response, TABLES[student], TABLES[teacher], ends)


TEXTS = st.text(
    st.sampled_from("ab1234 =.\n\u00e9\u4e16\u754c\N{GRINNING FACE}<|>hesum") | st.characters(codec="utf-8")
)


@given(st.sampled_from(sorted(PAIRS)), st.lists(TEXTS, max_size=6), st.booleans())
def test_chunks_tile_both_sides_have_equal_bytes_and_cannot_be_cut_further(pair, words, ends):
    (student, teacher), text = pair, "".join(words)  # several words: not as the tokenizer would cut it
    ids = [token_id for word in words for token_id in _without_blank(student, word)]
    response = np.array([*ids, *([KINDS[student].eos_token_id] if ends else [])], np.int32)
    reading = PAIRS[pair].read(response)
    assert_laws(reading, response, student, teacher)
    if ends:
        assert (reading.ours != UNKNOWN).all()
        read = b"".join(TABLES[teacher].bytes_of[token_id] for token_id in reading.ids[:-1].tolist())
        assert read == text.encode()
        assert reading.ids[:-1].tolist() == _without_blank(teacher, text)
        assert reading.ids[-1] == KINDS[teacher].eos_token_id


def _without_blank(name: str, text: str) -> list[int]:
    """The tokens of a text in the midst of others."""
    if name != "sentences" or not text:
        return written(name, text)
    return written(name, "\n" + text)[len(written(name, "\n")) :]


@given(st.sampled_from(sorted(PAIRS)), st.lists(st.integers(0, 255), max_size=12), st.booleans())
def test_whatever_bytes_a_young_student_writes_the_laws_hold(pair, content, ends):
    student, teacher = pair
    table = TABLES[student]
    of_byte = {each: token_id for token_id, each in enumerate(table.bytes_of) if each is not None and len(each) == 1}
    ids = [of_byte[bytes([byte])] for byte in content]
    response = np.array([*ids, *([KINDS[student].eos_token_id] if ends else [])], np.int32)
    reading = PAIRS[pair].read(response)
    assert_laws(reading, response, student, teacher)
    text = bytes(content).decode(errors="ignore")
    if text.encode() == bytes(content) and ends:
        assert (reading.ours != UNKNOWN).all()
    else:
        assert reading.ours[-1:].tolist() in ([UNKNOWN], [])


def test_an_unfinished_character_and_all_behind_it_is_unknown():
    table = TABLES["numbers"]
    first = [each for each, content in enumerate(table.bytes_of) if content == "界".encode()[:1]]
    before = written("numbers", " 12=")
    response = np.array([*before, *first, *ended("34")], np.int32)
    reading = PAIRS["numbers", "bytes"].read(response)
    # "=" might have begun a longer token of the teacher's, had the text gone on.
    assert reading.ours.tolist() == [*range(len(before) - 1), *[UNKNOWN] * (len(response) - len(before) + 1)]
    assert reading.ids.tolist() == written("bytes", " 12")


def test_the_last_chunk_of_a_response_without_an_end_is_unknown():
    response = ended("the 12")[:-1]
    reading = PAIRS["numbers", "words"].read(response)
    assert reading.ours[-1] == UNKNOWN
    assert (reading.ours[:-2] != UNKNOWN).all()
    whole = PAIRS["numbers", "words"].read(ended("the 12"))
    assert (whole.ours != UNKNOWN).all()


@pytest.mark.parametrize("response", [[], [len(NUMBERS) + 1], [NUMBERS.convert_tokens_to_ids(START)] * 2])
def test_nothing_is_asked_where_nothing_can_be_read(response):
    reading = under(of_bytes("", specials=("</s>",))).read(np.array(response, np.int32))
    assert len(reading.ids) == len(reading.theirs) == 0
    assert reading.ours.tolist() == [UNKNOWN] * len(response)


def test_an_id_without_a_token_ends_what_is_known():
    before = written("numbers", " 12=")
    reading = PAIRS["numbers", "words"].read(np.array([*before, len(NUMBERS), NUMBERS.eos_token_id], np.int32))
    assert (reading.ours != UNKNOWN).tolist() == [*[True] * (len(before) - 1), False, False, False]


@pytest.mark.parametrize(
    ("normalizer", "text", "known"),
    [
        (normalizers.NFKC(), "ab n² 12", "ab n"),
        (normalizers.Lowercase(), "the sum Is 12", "the sum "),
        (normalizers.Strip(), "  12", ""),
    ],
)
def test_a_byte_that_the_teacher_changes_makes_all_from_there_unknown_and_nothing_before(normalizer, text, known):
    response = ended(text)
    reading = under(of_bytes("", normalizer=normalizer)).read(response)
    ends = np.cumsum([len(TABLES["numbers"].bytes_of[token_id]) for token_id in response[:-1].tolist()])
    assert (reading.ours[:-1] != UNKNOWN).tolist() == (ends <= len(known.encode())).tolist()
    assert reading.ours[-1] == UNKNOWN
    assert reading.added_ids.tolist() == []


def test_special_tokens_are_matched_by_text_or_by_name_and_letters_that_spell_them_stay_letters():
    think, start = NUMBERS.convert_tokens_to_ids([THINK, START])
    teacher = of_bytes("", specials=("</s>", THINK, "[START]"))
    response = np.array([think, *written("numbers", THINK), start, *ended("12")], np.int32)
    named = under(teacher, special_tokens={START: "[START]"}).read(response)
    assert (named.ours != UNKNOWN).all()
    assert named.ids[0] == teacher.convert_tokens_to_ids(THINK)
    assert int((named.ids == named.ids[0]).sum()) == 1
    assert teacher.convert_tokens_to_ids("[START]") in named.ids
    alone = under(teacher).read(response)
    assert (alone.ours != UNKNOWN).tolist() == [
        place < response.tolist().index(start) for place in range(len(response))
    ]


@pytest.mark.parametrize("of_student", [True, False])
def test_a_token_that_only_one_side_calls_special_is_matched_by_its_text_too(of_student):
    text = "<tool>"
    with_text = of_bytes("", specials=("</s>", text))
    plain = of_bytes("", specials=("</s>",))
    plain.add_tokens([text])
    student, teacher = (with_text, plain) if of_student else (plain, with_text)
    pair = OwnTokens(
        *(Encoder(each, len(each)) for each in (student, teacher)),
        student_ends=[student.eos_token_id],
        teacher_ends=[teacher.eos_token_id],
    )
    tool = student.convert_tokens_to_ids(text)
    reading = pair.read(np.array([tool, *student.encode("12"), student.eos_token_id], np.int32))
    assert reading.ids[0] == teacher.convert_tokens_to_ids(text)
    assert (reading.ours != UNKNOWN).all()


def test_a_token_beyond_the_teachers_softmax_is_unknown_from_there_on():
    ends = {"student_ends": [NUMBERS.eos_token_id], "teacher_ends": [WORDS.eos_token_id]}
    pair = OwnTokens(ENCODERS["numbers"], Encoder(WORDS, 257), **ends)
    reading = pair.read(ended("12 the sum"))
    assert reading.ours[0] != UNKNOWN
    assert reading.ours[-1] == UNKNOWN
    assert reading.ids.max() < 257


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"<tool>": THINK}, "'<tool>' is no token of the student's"),
        ({THINK: "<tool>"}, "'<tool>' is no token of the te"),
    ],
)
def test_a_special_text_that_is_no_token_is_named_with_its_key(names, words):
    with pytest.raises(ConfigError, match=f"^teacher.special_tokens: {words}"):
        under(of_bytes(""), special_tokens=names)


@pytest.mark.parametrize(("end_score", "added"), [("replace", []), ("sum", [7, 8])])
def test_any_end_of_the_student_is_the_teachers_first_and_its_others_are_summed(end_score, added):
    both = [NUMBERS.eos_token_id, NUMBERS.convert_tokens_to_ids(START)]
    pair = own("numbers", "words", student_ends=both, teacher_ends=[6, 7, 8], end_score=end_score)
    for end in both:
        reading = pair.read(np.array([*written("numbers", "12"), end], np.int32))
        assert (reading.ids[-1], reading.added_ids.tolist()) == (6, added)
        assert reading.ours[-1] == reading.theirs[-1] == reading.theirs[-2] + 1
    assert pair.read(ended("12")[:-1]).added_ids.tolist() == []


def test_neither_the_teachers_start_token_nor_its_blank_is_part_of_a_response():
    reading = PAIRS["numbers", "sentences"].read(ended("ab"))
    assert SENTENCES.convert_ids_to_tokens(reading.ids.tolist()) == ["ab", "</s>"]


def test_digits_of_a_running_sum_have_a_pull_of_their_own_where_no_token_joins_them_with_another(tmp_path):
    """One joins a label, operator or `=` with a digit, the other does not; each is the student once."""
    split = read_model("student", str(with_bytes("student", tmp_path / "split")))
    joining = read_model("teacher", str(with_joined_tokens(tmp_path / "joining")))
    chunks = [0, 0, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7, 8, 9]  # of a1 5 b -5 c +3 d +6 0, and the end
    for student, teacher in ((split, joining), (joining, split)):
        encoders = [Encoder(each.vocabulary.tokenizer, each.vocab_size) for each in (student, teacher)]
        ends = [each.vocabulary.end_token_ids for each in (student, teacher)]
        pair = OwnTokens(*encoders, student_ends=ends[0], teacher_ends=ends[1])
        reading = pair.read(np.array([*student.vocabulary.encode("a15b-5c+3d+60"), ends[0][0]], np.int32))
        expected = (chunks, [*range(10)]) if student is split else ([*range(10)], chunks)
        assert (reading.ours.tolist(), reading.theirs.tolist()) == expected


@given(TEXTS, st.integers(0, 40))
def test_a_teacher_with_too_little_room_reads_whole_chunks_and_the_rest_is_unknown(text, room):
    response = ended(text)
    whole = PAIRS["numbers", "words"].read(response)
    part = whole.within(room)
    assert len(part.ids) <= room
    assert part.ids.tolist() == whole.ids[: len(part.ids)].tolist()
    chunks = int(part.theirs.max(initial=-1)) + 1
    assert part.ours.tolist() == [chunk if chunk < chunks else UNKNOWN for chunk in whole.ours.tolist()]
    more = int((whole.theirs <= chunks).sum())
    assert more > room or chunks == int(whole.theirs.max()) + 1, "and no chunk that would fit is left out"
    assert len(part.added_ids) == 0 or part.ids[-1] == whole.ids[-1]


def said_of(reading: Reading, known: np.ndarray[Any, Any] | None = None) -> TokenScores:
    """What a teacher says of the tokens that it reads."""
    logprobs = -np.random.default_rng(len(reading.ids)).exponential(size=len(reading.ids)).astype(np.float32)
    return msgspec.structs.replace(NOTHING_SCORED, logprobs=logprobs, valid=known)


@given(TEXTS)
def test_scores_of_the_students_tokens_sum_to_the_teachers_of_the_response(text):
    pair, response = PAIRS["numbers", "words"], ended(text)
    reading = pair.read(response)
    said = said_of(reading)
    scores = pair.scores(said, reading, 0)
    assert scores.logprobs.sum(dtype=np.float64) == pytest.approx(said.logprobs.sum(dtype=np.float64), abs=1e-4)
    assert scores.chunks is not None
    assert scores.chunks.tolist() == reading.ours.tolist()
    for chunk in set(reading.ours.tolist()):
        own = scores.logprobs[reading.ours == chunk]
        assert own == pytest.approx([said.logprobs[reading.theirs == chunk].sum() / len(own)] * len(own), rel=1e-5)
    assert not scores.known_rows.any()


def test_a_chunk_of_which_the_teacher_knows_a_part_is_unknown():
    pair, response = PAIRS["words", "numbers"], np.array([*written("words", " 1234=12"), 0], np.int32)
    reading = pair.read(response)
    assert reading.theirs.tolist()[:2] == [0, 1]
    known = np.ones(len(reading.ids), np.bool_)
    known[0] = False
    scores = pair.scores(said_of(reading, known), reading, 0)
    assert scores.known.tolist() == [chunk > 0 for chunk in reading.ours.tolist()]
    assert scores.logprobs[~scores.known].tolist() != scores.logprobs[scores.known].tolist()
    assert (scores.chunks == np.where(scores.known, reading.ours, UNKNOWN)).all()


def test_chunks_of_a_server_that_reads_text_and_those_of_tokens_are_joined():
    pair = PAIRS["numbers", "bytes"]
    response = ended(" 1234=1")
    reading = pair.read(response)
    assert reading.theirs.tolist() == [0, 0, 0, 0, 0, 1, 2, 3]
    said = msgspec.structs.replace(said_of(reading), chunks=np.array([0, 1, 2, 3, 4, 4, 5, 6], np.int32))
    scores = pair.scores(said, reading, 0)
    assert scores.chunks.tolist() == [0, 0, 1, 2]
    assert scores.logprobs[:2].sum() == pytest.approx(said.logprobs[:6].sum())


@pytest.mark.parametrize(
    "ask", [lambda pair: pair.candidates(np.zeros(1, np.int32)), lambda pair: pair.positions(None)]
)
def test_what_a_policy_asks_of_tokens_that_it_chooses_is_refused(ask):
    pair = PAIRS["numbers", "words"]
    with pytest.raises(ContractError, match="reads in tokens of its own"):
        ask(pair)


@given(st.sampled_from(sorted(PAIRS)), TEXTS, st.booleans())
def test_what_the_teacher_writes_becomes_the_students_tokens_of_the_same_text(pair, text, ends):
    student, teacher = pair
    ids = np.array([*_without_blank(teacher, text), *([KINDS[teacher].eos_token_id] if ends else [])], np.int32)
    response = PAIRS[pair].written(generation(ids, finish_reason="stop" if ends else "length"), is_start=False)
    expected = [*_without_blank(student, text), *([KINDS[student].eos_token_id] if ends else [])]
    assert response.token_ids.tolist() == expected
    assert (response.finish_reason, len(response.logprobs)) == ("stop" if ends else "length", len(expected))
    assert not sampled_tokens(response).any(), "no student wrote it"


def test_what_the_teacher_writes_stops_before_what_the_student_has_no_token_for():
    tool = "<tool_call>"
    teacher = of_bytes("", specials=(END, THINK, tool))
    ids = [teacher.convert_tokens_to_ids(name) for name in (THINK, "1", tool, "2", END)]
    response = under(teacher).written(generation(ids, finish_reason="stop"), is_start=True)
    assert NUMBERS.convert_ids_to_tokens(response.token_ids.tolist()) == [THINK, "1"]
    assert response.finish_reason == "length"
    cut = under(teacher).written(generation(teacher.encode("1\u4e16")[:-1], finish_reason="length"), is_start=True)
    assert NUMBERS.decode(cut.token_ids) == "1", "no half of a character"


def test_the_teacher_continues_the_whole_prefix_or_says_from_where_it_cannot():
    pair = PAIRS["numbers", "words"]
    assert WORDS.decode(pair.prefix(np.array(written("numbers", "the sum 12"), np.int32))) == "the sum 12"
    half = np.array(written("bytes", "1\u4e16")[:-1], np.int32)
    with pytest.raises(PermanentError, match=r"is to continue 3 tokens, and has none of its own for those from 1 on"):
        PAIRS["bytes", "words"].prefix(half)
    think = NUMBERS.convert_tokens_to_ids(THINK)
    assert pair.stop(np.array([think], np.int32)).tolist() == [WORDS.convert_tokens_to_ids(THINK)]
    with pytest.raises(ContractError, match="stops the teacher at token"):
        pair.stop(np.array(written("numbers", "12")[:1], np.int32))


def rows_said(rows: list[dict[str, float]], teacher: str) -> TokenScores:
    """What a teacher says: at each of its tokens, probabilities of some."""
    names = KINDS[teacher].get_vocab()
    ranked = [sorted(row.items(), key=lambda each: -each[1]) for row in rows]
    return msgspec.structs.replace(
        NOTHING_SCORED,
        logprobs=np.full(len(rows), -1.0, np.float32),
        topk_ids=np.array([[names[name] for name, _ in row] for row in ranked], np.int32),
        topk_logprobs=np.log(np.array([[mass for _, mass in row] for row in ranked], np.float32)),
    )


def placed(
    student: str, teacher: str, text: str, row: dict[str, float], longer: dict[str, float], k: int = 3, at: int = 0
) -> Any:
    """The row `at` a position of a text, if the teacher says `row` everywhere: its tokens, and whether it is one."""
    share = np.zeros(len(TABLES[teacher].bytes_of), np.float32)
    for name, each in longer.items():
        share[KINDS[teacher].get_vocab()[name]] = each
    pair = PAIRS[student, teacher].with_rows(share)
    reading = pair.read(np.array([*_without_blank(student, text), KINDS[student].eos_token_id], np.int32))
    scores = pair.scores(rows_said([row] * len(reading.ids), teacher), reading, k)
    assert scores.rows is not None
    found = {
        KINDS[student].convert_ids_to_tokens(token_id): round(float(np.exp(logprob)), 5)
        for token_id, logprob in zip(scores.topk_ids[at].tolist(), scores.topk_logprobs[at].tolist(), strict=True)
        if token_id != NO_TOKEN
    }
    return found, bool(scores.rows[at]), scores


def test_a_row_has_each_candidates_mass_at_the_first_token_that_the_student_has_for_it():
    """Both `1` and `2` of the digits' teacher are tokens of the student, and `12`, `123` begin with its `1`."""
    row = {"12": 0.4, "123": 0.2, "1": 0.2, "=": 0.1}
    found, is_valid, scores = placed("bytes", "sentences", "=a", row, {}, at=1)
    assert (found, is_valid) == ({"1": 0.8, "=": 0.1}, True)
    assert scores.topk_ids[1, 2] == NO_TOKEN
    assert scores.topk_logprobs[1, 2] == LEAST_NATS
    cells = np.array([0.8, 0.1, 0.1])
    assert scores.entropy_lower[1] == pytest.approx(-(cells * np.log(cells)).sum(), abs=1e-5)
    others = len(TABLES["bytes"].bytes_of) - 2
    assert scores.entropy_upper[1] == pytest.approx(scores.entropy_lower[1] + 0.1 * np.log(others), abs=1e-5)
    found, _, _ = placed("bytes", "sentences", "=a", row, {}, k=1, at=1)
    assert found == {"1": 0.8}


def test_the_digit_trap_has_no_row():
    """A teacher that writes digits one by one says `1` where the student would write `12`: nobody knows how often."""
    row = {"1": 0.6, "=": 0.3}
    assert placed("numbers", "bytes", "12", row, {"1": 0.8})[:2] == ({"=": 0.3}, False)
    assert placed("numbers", "bytes", "12", row, {"1": 0.05})[:2] == ({"1": 0.6, "=": 0.3}, True)
    assert placed("numbers", "bytes", "12", {"=": 0.9, "1": 0.01}, {"1": 0.8})[:2] == ({"=": 0.9}, True)


def test_a_row_behind_a_token_that_might_have_gone_on_is_a_mixture():
    """The teacher read `1` (probability e^-1) and might have read `12` or `123`: the student's next may be a digit."""
    row = {"12": 0.4, "123": 0.2, "1": 0.2, "=": 0.1}
    (found, is_valid, _), ended = placed("bytes", "sentences", "1=", row, {}, at=1), np.exp(-1.0)
    total = ended + 0.6
    assert is_valid
    assert found == {
        "2": pytest.approx(0.6 / total, abs=1e-4),
        "1": pytest.approx(0.8 * ended / total, abs=1e-4),
        "=": pytest.approx(0.1 * ended / total, abs=1e-4),
    }


def test_inside_a_token_of_the_teacher_longer_ones_say_how_it_goes_on():
    row = {"12": 0.4, "123": 0.2, "1": 0.2, "=": 0.2}
    found, is_valid, scores = placed("bytes", "sentences", "=12", row, {}, at=2)
    assert scores.chunks.tolist()[1:] == [1, 1, 2], "the digits are one token of the teacher"
    assert (found, is_valid) == ({"2": 0.75}, True), "had it ended, nobody knows what would follow"
    unlisted = {"12": 0.2, "=": 0.3}  # what the row does not show may begin with a 1, too
    assert placed("bytes", "sentences", "=12", unlisted, {}, at=2)[1] is False


NUMBERED = {"1": 0.2, "12": 0.3, "123": 0.1, "2": 0.15, "=": 0.25}


@pytest.mark.parametrize("words", [["=", "1", "="], ["=", "12", "="], ["=", "2", "="], ["=", "123", "=", "2"]])
def test_rows_are_those_of_the_text_if_the_teacher_draws_its_tokens_independently(words):
    pair = PAIRS["bytes", "sentences"].with_rows(np.zeros(len(TABLES["sentences"].bytes_of), np.float32))
    response = np.array([*_without_blank("bytes", "".join(words)), BYTES.eos_token_id], np.int32)
    reading = pair.read(response)
    assert SENTENCES.convert_ids_to_tokens(reading.ids.tolist()[:-1]) == words
    own = [*(math.log(NUMBERED[word]) for word in words), 0.0]
    said = msgspec.structs.replace(rows_said([NUMBERED] * len(own), "sentences"), logprobs=np.array(own, np.float32))
    scores = pair.scores(said, reading, 4)
    position = 0
    for word in words:
        for length in range(1, len(word) + 1):
            position += 1
            begun = {name: mass for name, mass in NUMBERED.items() if name.startswith(word[:length])}
            expected: Counter[str] = Counter()
            for name, mass in begun.items():
                if len(name) > length:
                    expected[name[length]] += mass / sum(begun.values())
                elif length == len(word):  # it ended, and another begins
                    for other, next_mass in NUMBERED.items():
                        expected[other[0]] += mass / sum(begun.values()) * next_mass
            ids, masses = scores.topk_ids[position].tolist(), np.exp(scores.topk_logprobs[position]).tolist()
            found = {BYTES.convert_ids_to_tokens(i): mass for i, mass in zip(ids, masses, strict=True) if i >= 0}
            assert found == pytest.approx(dict(expected), abs=1e-5)
            assert scores.rows[position]


def test_ends_and_special_tokens_have_their_own_place_and_others_of_the_teachers_ends_none():
    both = [NUMBERS.eos_token_id, NUMBERS.convert_tokens_to_ids(START)]
    end, other, think = (WORDS.convert_tokens_to_ids(name) for name in (END, START, THINK))
    pair = own("numbers", "words", student_ends=both, teacher_ends=[end, other])
    pair = pair.with_rows(np.zeros(len(TABLES["words"].bytes_of), np.float32))
    reading = pair.read(ended("12"))
    said = rows_said([{END: 0.4, START: 0.3, THINK: 0.2}] * len(reading.ids), "words")
    scores = pair.scores(said, reading, 3)
    assert scores.topk_ids[0].tolist() == [both[0], NUMBERS.convert_tokens_to_ids(THINK), NO_TOKEN]
    assert [end, other, think] == said.topk_ids[0].tolist()


def test_under_equal_tokenizers_rows_are_the_teachers_own():
    pair = PAIRS["words", "words"].with_rows(np.zeros(len(TABLES["words"].bytes_of), np.float32))
    response = np.array([*written("words", "the sum is 12"), WORDS.eos_token_id], np.int32)
    reading = pair.read(response)
    said = rows_said([{"the": 0.5, "1": 0.25, "2": 0.125}] * len(response), "words")
    scores = pair.scores(said, reading, 3)
    assert scores.topk_ids.tolist() == said.topk_ids.tolist()
    np.testing.assert_allclose(scores.topk_logprobs, said.topk_logprobs, atol=1e-6)
    assert scores.known_rows.all()


def test_the_blank_that_a_tokenizer_begins_with_is_not_taught_and_its_chunk_not_scored():
    pair, teacher = PAIRS["bytes", "sentences"], SENTENCES.get_vocab()
    ids = [teacher["▁ab"], teacher["12"], SENTENCES.eos_token_id]
    for is_start, text in ((True, "ab12"), (False, " ab12")):
        assert BYTES.decode(pair.written(generation(ids), is_start=is_start).token_ids[:-1]) == text
    response = np.array([*written("bytes", "ab12"), BYTES.eos_token_id], np.int32)
    reading = pair.read(response)
    scores = pair.scores(said_of(reading), reading, 0)
    assert scores.known.tolist() == [False, False, True, True, True], "the teacher would write a blank before it"


def test_a_token_of_the_student_beyond_its_softmax_has_no_mass():
    student = of_bytes("")
    student.add_tokens(["<tool>", "<beyond>"])
    teacher = of_bytes("", specials=(END, START, THINK, "<beyond>"))
    teacher.add_tokens(["<tool>"])
    ends = {"student_ends": [student.eos_token_id], "teacher_ends": [teacher.eos_token_id]}
    pair = OwnTokens(Encoder(student, len(student) - 2), Encoder(teacher, len(teacher)), **ends)
    pair = pair.with_rows(np.zeros(len(teacher), np.float32))
    reading = pair.read(np.array([*student.encode("ab"), student.eos_token_id], np.int32))
    names = teacher.get_vocab()
    row = np.array([[names["<tool>"], names["<beyond>"], names["b"]]] * len(reading.ids), np.int32)
    said = msgspec.structs.replace(
        NOTHING_SCORED,
        logprobs=np.full(len(row), -1.0, np.float32),
        topk_ids=row,
        topk_logprobs=np.log(np.array([[0.6, 0.2, 0.1]] * len(row), np.float32)),
    )
    scores = pair.scores(said, reading, 2)
    assert (
        scores.topk_ids[:, 0].tolist() == [student.get_vocab()["b"]] * len(row)
        or (scores.topk_ids < len(student) - 2).all()
    )
    assert (np.exp(scores.topk_logprobs).sum(axis=1) < 1).all()
