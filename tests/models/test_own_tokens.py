"""A teacher with a tokenizer of its own reads the same bytes, and chunks end where both tokenizers have a border."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from spot_async.errors import ConfigError, ContractError
from spot_async.models.chunks import UNKNOWN
from spot_async.models.own_tokens import OwnTokens, Reading
from spot_async.models.token_bytes import TokenBytes
from spot_async.stages.teachers import NOTHING_SCORED
from spot_async.types import TokenScores

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
TABLES = {name: TokenBytes(tokenizer, len(tokenizer) + PADDED) for name, tokenizer in KINDS.items()}


def own(student: str, teacher: str, **settings: Any) -> OwnTokens:
    ends = {"student_ends": [KINDS[student].eos_token_id], "teacher_ends": [KINDS[teacher].eos_token_id]}
    return OwnTokens(TABLES[student], TABLES[teacher], KINDS[teacher], **(ends | settings))


PAIRS = {(one, other): own(one, other) for one in KINDS for other in KINDS}


def under(teacher: Any, **settings: Any) -> OwnTokens:
    """The student that counts in numbers, under another teacher."""
    ends = {"student_ends": [NUMBERS.eos_token_id], "teacher_ends": [teacher.eos_token_id]}
    return OwnTokens(TABLES["numbers"], TokenBytes(teacher, len(teacher)), teacher, **(ends | settings))


def written(name: str, text: str) -> list[int]:
    ids: list[int] = KINDS[name].encode(text, add_special_tokens=False, split_special_tokens=True)
    return ids


def ended(text: str) -> np.ndarray:
    return np.array([*written("numbers", text), NUMBERS.eos_token_id], np.int32)


def chunks_of(tokens: list[bytes], others: list[bytes]) -> list[tuple[int, int]]:
    """How many tokens of both sides end together, one after the other: by the definition, token by token."""
    found, position, other = [], 0, 0
    ours = theirs = b""
    while position < len(tokens) or other < len(others):
        if len(ours) <= len(theirs) and position < len(tokens):
            ours += tokens[position]
            position += 1
        else:
            theirs += others[other]
            other += 1
        if ours == theirs:
            found.append((position, other))
    return found


def assert_laws(reading: Reading, response: np.ndarray, student: str, teacher: str) -> None:
    assert [each.dtype for each in (reading.ids, reading.theirs, reading.ours)] == [np.dtype(np.int32)] * 3
    known = reading.ours[reading.ours != UNKNOWN]
    assert (reading.ours[: len(known)] == known).all(), "what is unknown stands at the end"
    assert len(reading.ours) == len(response)
    assert len(reading.ids) == len(reading.theirs)
    ends = {KINDS[student].eos_token_id: b"end"}, {KINDS[teacher].eos_token_id: b"end"}
    ours, theirs = (
        [end.get(token_id, table.bytes_of[token_id]) for token_id in ids.tolist()]
        for end, table, ids in zip(
            ends, (TABLES[student], TABLES[teacher]), (response[: len(known)], reading.ids), strict=True
        )
    )
    expected = chunks_of(ours, theirs)
    counted = [(int((known <= chunk).sum()), int((reading.theirs <= chunk).sum())) for chunk in range(len(expected))]
    assert counted == expected
    assert known.max(initial=-1) == reading.theirs.max(initial=-1) == len(expected) - 1


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
        *(TokenBytes(each, len(each)) for each in (student, teacher)),
        teacher,
        student_ends=[student.eos_token_id],
        teacher_ends=[teacher.eos_token_id],
    )
    tool = student.convert_tokens_to_ids(text)
    reading = pair.read(np.array([tool, *student.encode("12"), student.eos_token_id], np.int32))
    assert reading.ids[0] == teacher.convert_tokens_to_ids(text)
    assert (reading.ours != UNKNOWN).all()


def test_a_token_beyond_the_teachers_softmax_is_unknown_from_there_on():
    short = TokenBytes(WORDS, 257)
    pair = OwnTokens(
        TABLES["numbers"], short, WORDS, student_ends=[NUMBERS.eos_token_id], teacher_ends=[WORDS.eos_token_id]
    )
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


@pytest.mark.parametrize(
    "ask", [lambda pair: pair.candidates(np.zeros(1, np.int32)), lambda pair: pair.positions(None)]
)
def test_what_only_rows_could_answer_is_refused(ask):
    pair = PAIRS["numbers", "words"]
    with pytest.raises(ContractError, match="reads in tokens of its own"):
        ask(pair)
    reading = pair.read(ended("12"))
    with pytest.raises(ContractError, match=r"asks for the teacher's top-4, and it reads in tokens of its own"):
        pair.scores(said_of(reading), reading, 4)
