"""What became of each prompt is on disk, and tells where a run continues."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import numpy as np
import pytest

from spot_async.base import wire
from spot_async.errors import DataError, StorageError
from spot_async.run_directory.ledger import FILE, Ledger
from spot_async.types import Pull, Sample, SoftTargets, Supervision, VersionSpan, WeightVersion

INITIAL = WeightVersion(0, 0)


def sample(ordinal=0, version=INITIAL, tokens=3):
    ids = np.arange(1, tokens + 1, dtype=np.int32)
    supervision = Supervision(
        prompt_ordinal=ordinal,
        problem_id=f"p{ordinal}",
        prompt_ids=ids,
        response_ids=ids,
        behavior_logprobs=np.full(tokens, -0.5, np.float32),
        version=version,
        version_spans=(VersionSpan(0, tokens, version),),
        pulls=(Pull(logprobs=np.full(tokens, -0.25, np.float32)),),
        soft_targets=(
            SoftTargets(
                positions=np.array([1], np.int32),
                token_ids=np.array([[4, 5]], np.int32),
                probabilities=np.array([[0.25, 0.75]], np.float32),
                weights=np.ones(1, np.float32),
                baselines=np.array([[0.4, 0.1]], np.float32),
            ),
        ),
    )
    record = {"text": "1 2 3", "entropy": np.array([0.5, np.nan, 0.25], np.float32), "count": 2}
    notes = {"share": np.array([0.1, np.nan]), "kept": np.array([[True], [False]])}
    return Sample(supervision=supervision, metrics={"rollout/tokens": 3.0}, record=record, notes=notes)


@pytest.fixture
def ledger(tmp_path):
    with closing(Ledger.open(tmp_path)) as opened:
        yield opened


def states(ledger):
    return {row.ordinal: row.state for row in ledger.prompts()}


def test_what_was_finished_is_read_back_bit_for_bit_and_its_record_as_samples_jsonl_has_it(ledger):
    ledger.admit(3, "p3")
    ledger.finish(3, [sample(3), sample(3)], {"rollout/accuracy": 1 / 3})
    first, second = ledger.samples(3)
    assert wire.encode(first.supervision) == wire.encode(second.supervision) == wire.encode(sample(3).supervision)
    assert first.supervision.soft_targets[0].baselines.tolist() == np.array([[0.4, 0.1]], np.float32).tolist()
    assert first.metrics == {"rollout/tokens": 3.0}
    assert first.record == {"text": "1 2 3", "entropy": [0.5, None, 0.25], "count": 2}
    assert {name: (each.dtype, each.tobytes()) for name, each in first.notes.items()} == {
        name: (each.dtype, each.tobytes()) for name, each in sample(3).notes.items()
    }
    assert ledger.accuracy(3) == {"rollout/accuracy": 1 / 3}


def test_a_prompt_that_is_begun_again_says_so(ledger):
    for _ in range(2):
        ledger.admit(0, "p0")
    ledger.give_up(0, "dead", "400: too long")
    (row,) = ledger.prompts()
    assert (row.attempt, row.state, row.reason, row.batch) == (2, "dead", "400: too long", None)


def test_going_back_keeps_batches_before_the_step_and_makes_later_ones_uncut(ledger):
    for ordinal in range(6):
        ledger.admit(ordinal, f"p{ordinal}")
        if ordinal != 4:
            ledger.finish(ordinal, [sample(ordinal)], {})
    ledger.give_up(2, "dead", "no")
    ledger.cut(0, 0, {0: True, 1: False})
    ledger.cut(1, 0, {3: True, 5: True})
    ledger.forget_samples(1)
    for _ in range(2):  # a second time, as after a kill in between
        ledger.roll_back(1)
        expected = {0: "batched", 1: "left_out", 2: "dead", 3: "queued", 4: "lost", 5: "queued"}
        assert states(ledger) == expected
    assert [row.batch for row in ledger.prompts()] == [0, 0, None, None, None, None]
    assert ledger.samples(0) is None
    assert ledger.samples(3) is not None


def test_a_kill_at_any_moment_leaves_what_was_written(tmp_path):
    """A copy of the files as they are between two writes is what a kill leaves."""
    with closing(Ledger.open(tmp_path)) as ledger:
        ledger.admit(0, "p0")
        ledger.finish(0, [sample(0)], {})
        ledger.cut(0, 0, {0: True})
        copy = tmp_path / "copy"
        copy.mkdir()
        for file in tmp_path.glob(f"{FILE}*"):
            (copy / file.name).write_bytes(file.read_bytes())
    with closing(Ledger.open(copy)) as found:
        assert states(found) == {0: "batched"}


def test_a_second_process_other_formats_and_a_damaged_file_are_one_line_each(tmp_path, ledger):
    with pytest.raises(DataError, match=r"ledger.sqlite is in use by another process"):
        Ledger.open(tmp_path)
    newer = tmp_path / "newer"
    newer.mkdir()
    Ledger.open(newer).close()
    with closing(sqlite3.connect(newer / FILE)) as connection, connection:
        connection.execute("update about set value = 99")
    with pytest.raises(DataError, match="has format 99, newer than this spot-async can read"):
        Ledger.open(newer)
    (newer / FILE).write_bytes(b"this is no database, whatever its name says" * 99)
    with pytest.raises(DataError, match=r"ledger.sqlite: cannot be read"):
        Ledger.open(newer)
    with pytest.raises(DataError, match=r"ledger.sqlite: cannot be opened"):
        Ledger.open(tmp_path / "no such directory")


BEFORE = """
create table about (name text primary key, value integer not null) without rowid;
create table prompts (
    ordinal integer primary key, problem text not null, attempt integer not null, state text not null, reason text,
    batch integer, lineage integer, samples blob
);
"""  # the tables of formats 1 to 4


@pytest.mark.parametrize("older", [1, 2, 3, 4, 5])
def test_a_ledger_of_an_older_format_is_read_and_never_continued(tmp_path, older):
    """Its queued samples would lose in silence what their format had not."""
    with closing(sqlite3.connect(tmp_path / FILE)) as connection, connection:
        connection.executescript(BEFORE if older < 5 else BEFORE.replace("samples blob", "samples blob, accuracy text"))
        connection.execute("insert into about values ('format', ?)", (older,))
        rest = "" if older < 5 else ", null"
        connection.execute(f"insert into prompts values (0, 'p0', 1, 'batched', null, 0, 0, null{rest})")
        queued = f"insert into prompts values (1, 'p1', 1, 'queued', null, null, null, ?{rest})"
        connection.execute(queued, (wire.encode([]),))
    with pytest.raises(DataError, match=rf"has format {older}, .* continues runs of format 6 only: finish the run"):
        Ledger.open(tmp_path)
    with Ledger.read_only(tmp_path) as ledger:
        assert states(ledger) == {0: "batched", 1: "queued"}


def test_a_write_that_fails_is_one_line(ledger):
    ledger.close()
    with pytest.raises(StorageError, match=r"cannot write .*ledger.sqlite: "):
        ledger.admit(0, "p0")


def test_samples_that_cannot_be_read_any_more_are_none(tmp_path, ledger):
    ledger.admit(0, "p0")
    ledger.finish(0, [sample(0)], {})
    ledger._connection.execute("update prompts set samples = ?", (b"\x93torn",))
    assert ledger.samples(0) is None
