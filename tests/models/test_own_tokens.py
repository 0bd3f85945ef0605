"""A teacher with a tokenizer of its own reads the same bytes, and chunks end where both tokenizers have a border."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from chunk_laws import assert_laws
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import END, KINDS, NUMBERS, PAIRS, START, TABLES, TEXTS, THINK, of_bytes, own, response, said_of
from tokenizers import normalizers

from spot_async.errors import ConfigError, ContractError, PermanentError
from spot_async.models.chunks import UNKNOWN
from spot_async.models.own_tokens import OwnTokens
from spot_async.models.responses import sampled_tokens
from spot_async.models.retokenizing import Encoder
from spot_async.testing.services import generation, token_scores


@given(st.sampled_from(sorted(PAIRS)), st.lists(TEXTS | st.binary(max_size=3), max_size=6), st.booleans())
def test_chunks_tile_both_sides_have_equal_bytes_and_cannot_be_cut_further(pair, pieces, ends):
    """Pieces of text are not cut as the whole would be, and bytes, as a young student writes them, may be no text."""
    (student, teacher), contents = pair, [each.encode() if isinstance(each, str) else each for each in pieces]
    of_byte = {content: token_id for token_id, content in enumerate(TABLES[student].bytes_of)}
    parts = [[each] if isinstance(each, str) else [of_byte[bytes([byte])] for byte in each] for each in pieces]
    written = response(student, *(part for each in parts for part in each), ends=ends)
    reading, both_ends = PAIRS[pair].read(written), (KINDS[student].eos_token_id, KINDS[teacher].eos_token_id)
    assert_laws(reading, written, TABLES[student], TABLES[teacher], both_ends)
    text = b"".join(contents).decode(errors="replace")
    if ends and text.encode() == b"".join(contents):
        assert (reading.ours != UNKNOWN).all()
        assert reading.ids.tolist() == response(teacher, text).tolist()
    else:
        assert reading.ours[-1:].tolist() in ([UNKNOWN], [])


def without(*names: str) -> Any:
    """A teacher that splits all text, and has no special tokens but its end and these."""
    return of_bytes("", specials=("</s>", *names))


CHARACTER = TABLES["numbers"].bytes_of.index("界".encode()[:1])
NUMBER, START_ID = len(NUMBERS) + 1, NUMBERS.convert_tokens_to_ids(START)


@pytest.mark.parametrize(
    ("teacher", "parts", "ends", "known"),
    [
        # An unfinished character: `=` might have begun a longer token of the teacher's, had the text gone on.
        ("bytes", [" 12=", CHARACTER, "34"], True, " 12"),
        ("words", [" 12=", NUMBER], True, " 12"),
        ("words", ["the 12"], False, "the"),
        ("words", ["12", NUMBERS.convert_tokens_to_ids(THINK), "the 12"], False, "12<think>the"),
        (without(), [], False, ""),
        (without(), [NUMBER], False, ""),
        (without(), [START_ID, START_ID], False, ""),
        (without(THINK), [THINK, START_ID, "12"], True, THINK),
        (of_bytes("", normalizer=normalizers.NFKC()), ["ab n² 12"], True, "ab n"),
        (of_bytes("", normalizer=normalizers.Lowercase()), ["the sum Is 12"], True, "the sum "),
        (of_bytes("", normalizer=normalizers.Strip()), ["  12"], True, ""),
    ],
)
def test_from_the_first_byte_that_the_teacher_cannot_tell_all_is_unknown_and_nothing_before(
    teacher, parts, ends, known
):
    written = response("numbers", *parts, ends=ends)
    pair = own("numbers", teacher, teacher_ends=[0, 1], end_score="sum")
    reading = pair.read(written)
    count = int((reading.ours != UNKNOWN).sum())
    assert (reading.ours[count:] == UNKNOWN).all()
    assert b"".join(TABLES["numbers"].contents(written[:count].tolist())) == known.encode()
    assert b"".join(pair.teacher.table.contents(reading.ids.tolist())) == known.encode()
    assert reading.added_ids.tolist() == []


def test_a_token_beyond_the_teachers_softmax_is_unknown_from_there_on():
    short = Encoder(KINDS["words"], 257)
    reading = OwnTokens(PAIRS["numbers", "words"].student, short, student_ends=[0], teacher_ends=[0]).read(
        response("numbers", "12 the sum")
    )
    assert reading.ours[0] != UNKNOWN
    assert reading.ours[-1] == UNKNOWN
    assert reading.ids.max() < 257


def test_special_tokens_are_matched_by_text_or_by_name_and_letters_that_spell_them_stay_letters():
    teacher, think = without(THINK, "[START]"), NUMBERS.convert_tokens_to_ids(THINK)
    pair = own("numbers", teacher, special_tokens={START: "[START]"})
    reading = pair.read(response("numbers", think, THINK, START_ID, "12"))
    assert teacher.convert_ids_to_tokens(reading.ids.tolist()) == [THINK, *THINK, "[START]", "1", "2", "</s>"]
    assert (reading.ours != UNKNOWN).all()


def test_special_tokens_that_the_other_has_not_are_known_where_they_may_stand_in_a_text():
    pair = own("numbers", without("[START]", THINK), special_tokens={})
    assert pair.unmatched(writes=False) == [START]
    assert pair.unmatched(writes=True) == [START, "[START]"]
    assert PAIRS["numbers", "words"].unmatched(writes=True) == []
    assert PAIRS["sentences", "sentences"].unmatched(writes=True) == []


@pytest.mark.parametrize("is_students", [True, False])
def test_a_token_that_only_one_side_calls_special_is_matched_by_its_text_too(is_students):
    special, plain = without("<tool>"), without()
    plain.add_tokens(["<tool>"])
    pair = own(special, plain) if is_students else own(plain, special)
    tools = [each.table.names.index("<tool>") for each in (pair.student, pair.teacher)]
    reading = pair.read(np.array([tools[0], special.eos_token_id], np.int32))
    assert reading.ids.tolist() == [tools[1], special.eos_token_id]


@pytest.mark.parametrize(("names", "whose"), [({"<tool>": THINK}, "student's"), ({THINK: "<tool>"}, "teacher's")])
def test_a_special_text_that_is_no_token_is_named_with_its_key(names, whose):
    with pytest.raises(ConfigError, match=f"^teacher.special_tokens: '<tool>' is no token of the {whose}"):
        own("numbers", "words", special_tokens=names)


@pytest.mark.parametrize(("end_score", "added"), [("replace", []), ("sum", [7, 8])])
def test_any_end_of_the_student_is_the_teachers_first_and_its_others_are_summed(end_score, added):
    both = [NUMBERS.eos_token_id, START_ID]
    pair = own("numbers", "words", student_ends=both, teacher_ends=[6, 7, 8], end_score=end_score)
    for end in both:
        reading = pair.read(response("numbers", "12", end, ends=False))
        assert (reading.ids[-1], reading.added_ids.tolist()) == (6, added)
        assert reading.ours[-1] == reading.theirs[-1] == reading.theirs[-2] + 1
    for end in (6, 8):
        written = pair.written(generation(response("words", "12", end, ends=False)), is_start=True)
        assert written.token_ids.tolist() == response("numbers", "12", both[0], ends=False).tolist()


@given(TEXTS, st.integers(0, 40))
def test_a_teacher_with_too_little_room_reads_whole_chunks_and_the_rest_is_unknown(text, room):
    pair = own("numbers", "words", teacher_ends=[6, 7], end_score="sum")
    whole, part = (pair.read(response("numbers", text), most) for most in (None, room))
    assert len(part.ids) <= room
    assert part.ids.tolist() == whole.ids[: len(part.ids)].tolist()
    chunks = int(part.theirs.max(initial=-1)) + 1
    assert part.ours.tolist() == [chunk if chunk < chunks else UNKNOWN for chunk in whole.ours.tolist()]
    more = int((whole.theirs <= chunks).sum())
    assert more > room or chunks == int(whole.theirs.max()) + 1, "and no chunk that would fit is left out"
    assert part.added_ids.tolist() == ([7] if len(part.ids) == len(whole.ids) else [])


@given(st.sampled_from(sorted(PAIRS)), TEXTS)
def test_a_chunk_is_as_likely_to_a_teacher_as_if_it_read_the_students_tokens(pair, text):
    """A teacher that has a log-probability of each byte says the same of a text in any tokens."""
    both = {kind: response(kind, text) for kind in pair}
    bytewise = -np.random.default_rng(len(text)).exponential(size=len(text.encode()) + 1)  # the last: of the end
    lengths = [[*(len(TABLES[kind].bytes_of[each]) for each in both[kind][:-1]), 1] for kind in pair]
    ours, theirs = (np.add.reduceat(bytewise, np.cumsum([0, *each])[:-1]) for each in lengths)
    reading = PAIRS[pair].read(both[pair[0]])
    scores = PAIRS[pair].scores(token_scores(theirs), reading, 0)
    assert scores.chunks is not None
    assert (scores.chunks[scores.known] == reading.ours[scores.known]).all()
    for chunk in set(scores.chunks[scores.known].tolist()):
        even = np.full((reading.ours == chunk).sum(), ours[reading.ours == chunk].mean())
        np.testing.assert_allclose(scores.logprobs[reading.ours == chunk], even, rtol=1e-5)
    assert scores.known[1:].any() or len(ours) == 1
    assert not scores.known_rows.any()


def test_a_chunk_of_which_the_teacher_knows_a_part_is_unknown():
    pair = PAIRS["words", "numbers"]
    reading = pair.read(response("words", " 1234=12"))
    assert reading.theirs.tolist()[:2] == [0, 1]
    scores = pair.scores(said_of(reading, known=np.arange(len(reading.ids)) > 0), reading, 0)
    assert scores.known.tolist() == [chunk > 0 for chunk in reading.ours.tolist()]
    assert (scores.chunks == np.where(scores.known, reading.ours, UNKNOWN)).all()


def test_chunks_of_a_server_that_reads_text_and_those_of_tokens_are_joined():
    pair = PAIRS["numbers", "bytes"]
    reading = pair.read(response("numbers", " 1234=1"))
    assert reading.theirs.tolist() == [0, 0, 0, 0, 0, 1, 2, 3]
    said = msgspec.structs.replace(said_of(reading), chunks=np.array([0, 1, 2, 3, 4, 4, 5, 6], np.int32))
    scores = pair.scores(said, reading, 0)
    assert scores.chunks.tolist() == [0, 0, 1, 2]
    assert scores.logprobs[:2].sum() == pytest.approx(said.logprobs[:6].sum())


@given(st.sampled_from(sorted(PAIRS)), TEXTS, st.booleans())
def test_what_the_teacher_writes_becomes_the_students_tokens_of_the_same_text(pair, text, ends):
    student, teacher = pair
    reason = "stop" if ends else "length"
    found = PAIRS[pair].written(generation(response(teacher, text, ends=ends), finish_reason=reason), is_start=False)
    assert found.token_ids.tolist() == response(student, text, ends=ends).tolist()
    assert (found.finish_reason, len(found.logprobs)) == (reason, len(found.token_ids))
    assert not sampled_tokens(found).any(), "no student wrote it"


def test_what_the_teacher_writes_stops_before_what_the_student_has_no_token_for():
    tool, cut_off = "<tool_call>", response("bytes", "1\u4e16", ends=False)[:-1]
    teacher = of_bytes("", specials=(END, THINK, tool))
    ids = teacher.convert_tokens_to_ids([THINK, "1", tool, "2", END])
    for pair, written, text in ((own("numbers", teacher), ids, THINK + "1"), (PAIRS["numbers", "bytes"], cut_off, "1")):
        found = pair.written(generation(np.array(written, np.int32), finish_reason="stop"), is_start=True)
        assert (NUMBERS.decode(found.token_ids), found.finish_reason) == (text, "length")


def test_the_blank_that_a_tokenizer_begins_with_is_not_taught_and_its_chunk_not_scored():
    ids = [*KINDS["sentences"].convert_tokens_to_ids(["▁ab", "12"]), KINDS["sentences"].eos_token_id]
    for student, is_start, text in (("bytes", True, "ab12"), ("bytes", False, " ab12"), ("sentences", True, " ab12")):
        found = PAIRS[student, "sentences"].written(generation(ids), is_start=is_start)
        assert b"".join(TABLES[student].contents(found.token_ids[:-1].tolist())).decode() == text
    reading = PAIRS["bytes", "sentences"].read(response("bytes", "ab12"))
    scores = PAIRS["bytes", "sentences"].scores(said_of(reading), reading, 0)
    assert scores.known.tolist() == [False, False, True, True, True], "the teacher would write a blank before it"


def test_the_teacher_continues_the_whole_prefix_or_says_from_where_it_cannot():
    pair = PAIRS["numbers", "words"]
    assert KINDS["words"].decode(pair.prefix(response("numbers", "the sum 12", ends=False))) == "the sum 12"
    with pytest.raises(PermanentError, match=r"is to continue 3 tokens, and has none of its own for those from 1 on"):
        PAIRS["bytes", "words"].prefix(response("bytes", "1\u4e16", ends=False)[:-1])
    ids = [each.convert_tokens_to_ids(THINK) for each in (NUMBERS, KINDS["words"])]
    assert pair.stop(np.array(ids[:1], np.int32)).tolist() == ids[1:]


@pytest.mark.parametrize(
    "ask",
    [
        lambda pair: pair.candidates(np.zeros(1, np.int32)),
        lambda pair: pair.positions(None),
        lambda pair: pair.stop(response("numbers", "1", ends=False)),
        lambda pair: pair.scores(token_scores([]), pair.read(response("numbers", ends=False)), 4),
    ],
)
def test_what_a_policy_asks_of_tokens_that_it_chooses_or_did_not_state_is_refused(ask):
    with pytest.raises(ContractError, match=r"reads in tokens of its own|its needs do not state it"):
        ask(PAIRS["numbers", "words"])
