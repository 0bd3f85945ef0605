"""Kept scores come back bit for bit, survive kill -9 and other runs, and are dropped when they are damaged."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from problem_files import FEW
from safetensors.numpy import save_file

from spot_async.backends.openai.backend import OpenAIBackend
from spot_async.checks.plan import plan_training
from spot_async.config import TeacherConfig
from spot_async.config.loading import load_config
from spot_async.errors import ConfigError, DataError
from spot_async.models.files import read_model
from spot_async.spending.score_cache import ScoreCache, digest
from spot_async.spending.teacher_cache import TeacherCache, teacher_identity, weights_digest
from spot_async.testing.services import capabilities
from spot_async.types import TokenScores, WeightVersion

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "running_sum" / "teacher"
SAID = capabilities(48, max_top_k=8, exact_entropy=False, candidate_logprobs="none", weight_update=False)


def scores(seed=0, tokens=5):
    draw = np.random.default_rng(seed)
    entropy = draw.random(tokens, dtype=np.float32)
    return TokenScores(
        logprobs=-draw.random(tokens, dtype=np.float32),
        topk_ids=draw.integers(0, 48, (tokens, 3)).astype(np.int32),
        topk_logprobs=-draw.random((tokens, 3), dtype=np.float32),
        entropy=entropy,
        entropy_lower=entropy - 0.5,
        entropy_upper=entropy + 0.5,
        version=WeightVersion(0, 0),
        valid=np.arange(tokens) > 0,
        tail_logprobs=-draw.random(tokens, dtype=np.float32),
    )


def assert_same(one, other):
    for name in TokenScores.__struct_fields__:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def as_of_old(kept):
    """Return scores as they were written before they had tails."""
    fields = [name for name in TokenScores.__struct_fields__ if name != "tail_logprobs"]
    return msgspec.defstruct("Old", fields)(*(getattr(kept, name) for name in fields))


async def opened(path, **settings):
    async with ScoreCache(path, **settings):
        pass


async def never():
    raise AssertionError("asked although it is there")


def teacher(**settings):
    backend = OpenAIBackend.Settings(url="http://127.0.0.1:9", **settings)
    return TeacherConfig.model_construct(model=str(MODEL), backend=backend, cache="c", replay=False)


def ids(*tokens):
    return np.array(tokens, np.int32)


def test_an_entry_comes_back_as_it_was_in_a_later_run(tmp_path):
    kept = scores()

    async def run():
        async def ask():
            return kept

        async with ScoreCache(tmp_path / "c") as cache:
            await cache.fetch(digest("k"), TokenScores, ask, what="it")
        async with ScoreCache(tmp_path / "c") as cache:
            assert_same(await cache.fetch(digest("k"), TokenScores, never, what="it"), kept)
            assert (cache.counters.hits, cache.counters.misses) == (1, 0)
            await cache.put(digest("old"), as_of_old(kept))
            old = await cache.fetch(digest("old"), TokenScores, never, what="it")
            assert_same(old, msgspec.structs.replace(kept, tail_logprobs=None))
            assert cache.size_bytes > 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("config", "said", "asked"),
    [
        ({"served_model": "another"}, {}, (ids(1, 2), ids(3), 3, 1.0)),
        ({}, {"model": "another"}, (ids(1, 2), ids(3), 3, 1.0)),
        ({}, {"vocab_fingerprint": "another"}, (ids(1, 2), ids(3), 3, 1.0)),
        ({}, {}, (ids(1), ids(2, 3), 3, 1.0)),  # the boundary of prompt and response
        ({}, {}, (ids(1, 2), ids(4), 3, 1.0)),
        ({}, {}, (ids(1, 2), ids(3), 4, 1.0)),
        ({}, {}, (ids(1, 2), ids(3), 3, 0.5)),
        ({}, {}, (ids(1, 2), ids(3), 3, ids(0), 1.0)),  # single positions
    ],
)
def test_whatever_the_numbers_follow_from_is_part_of_the_key(tmp_path, config, said, asked):
    files = read_model("teacher", str(MODEL))

    async def run():
        async def ask():
            return scores(1)

        first = TeacherCache(ScoreCache(tmp_path / "c"), teacher(), files)
        async with first:
            kept = await first.identify(SAID)
            await kept.fetch(TokenScores, (ids(1, 2), ids(3), 3, 1.0), ask, what="it")
            same = await kept.fetch(TokenScores, (ids(1, 2).astype(np.int64), ids(3), 3, 1.0), never, what="it")
            assert_same(same, scores(1))
        other = TeacherCache(ScoreCache(tmp_path / "c"), teacher(**config), files)
        async with other:
            kept = await other.identify(msgspec.structs.replace(SAID, **said))
            await kept.fetch(TokenScores, asked, ask, what="it")
            assert other.cache.counters.misses == 1

    asyncio.run(run())


def test_a_damaged_entry_is_dropped_counted_and_asked_for_again(tmp_path):
    async def run():
        async def ask():
            return scores()

        async with ScoreCache(tmp_path / "c") as cache:
            await cache.put(digest("k"), scores())
            await cache.put(digest("other"), scores(1))
        with sqlite3.connect(tmp_path / "c") as database:
            (value,) = database.execute("SELECT value FROM entries WHERE key = ?", (digest("k"),)).fetchone()
            damaged = value[:40] + bytes([value[40] ^ 1]) + value[41:]
            database.execute("UPDATE entries SET value = ? WHERE key = ?", (damaged, digest("k")))
            # whole, but not its own
            database.execute(
                "INSERT INTO entries SELECT ?, checksum, value FROM entries WHERE key = ?",
                (digest("moved"), digest("other")),
            )
        async with ScoreCache(tmp_path / "c") as cache:
            assert await cache.get(digest("moved"), TokenScores) is None
            assert_same(await cache.fetch(digest("k"), TokenScores, ask, what="it"), scores())
            assert (cache.counters.corrupt, cache.counters.misses) == (2, 1)
            assert_same(await cache.fetch(digest("k"), TokenScores, never, what="it"), scores())

    asyncio.run(run())


WRITER = textwrap.dedent("""
    import asyncio, sys
    from pathlib import Path
    import numpy as np
    from spot_async.spending.score_cache import ScoreCache, digest
    from spot_async.types import ScoredPositions

    async def main():
        async with ScoreCache(Path(sys.argv[1])) as cache:
            for number in range(100_000):
                rows = np.full((40, 50), number, np.float32)
                value = ScoredPositions(
                    topk_ids=rows.astype(np.int32), topk_logprobs=-rows, entropy_lower=rows[0], entropy_upper=rows[0])
                await cache.put(digest(sys.argv[2], number), value)
                print(number, flush=True)
    asyncio.run(main())
""")


def test_two_runs_share_a_file_and_kill_9_loses_nothing_that_was_kept(tmp_path):
    path = tmp_path / "c"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), name], stdout=subprocess.PIPE, text=True)
        for name in ("one", "two")
    ]
    for each in writers:
        for _ in range(30):
            assert each.stdout.readline()
    kept = {}
    for each, name in zip(writers, ("one", "two"), strict=True):
        os.kill(each.pid, signal.SIGKILL)
        kept[name] = 29 + len([line for line in each.stdout.read().splitlines(True) if line.endswith("\n")])
        each.wait()

    from spot_async.types import ScoredPositions

    async def run():
        async with ScoreCache(path) as cache:
            for name, last in kept.items():
                for number in range(last + 1):
                    found = await cache.get(digest(name, number), ScoredPositions)
                    assert found is not None
                    assert (found.topk_ids == number).all()
            assert cache.counters.corrupt == 0

    asyncio.run(run())


def test_a_file_that_is_none_or_newer_is_one_line(tmp_path):
    (tmp_path / "text").write_text("not a database, whatever its name says " * 100)
    with sqlite3.connect(tmp_path / "newer") as database:
        database.execute("PRAGMA user_version = 99")

    with pytest.raises(DataError, match=r"teacher\.cache: cannot use .*text"):
        asyncio.run(opened(tmp_path / "text"))
    with pytest.raises(DataError, match="has format 99, this version reads 1"):
        asyncio.run(opened(tmp_path / "newer"))
    with pytest.raises(ConfigError, match=r"teacher\.replay: there is no .*missing"):
        asyncio.run(opened(tmp_path / "missing", is_replay=True))


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n) SELECT '' key, '' checksum, i value FROM n"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("CREATE TABLE browser_history (url TEXT)", "is no cache of spot-async"),
        (f"DROP TABLE entries; CREATE VIEW entries AS {ENDLESS}", "is no cache of spot-async"),
        ("DROP TABLE entries; CREATE TABLE entries (key, checksum, value AS (zeroblob(900000000)))", "is no cache"),
        ("CREATE TRIGGER more AFTER INSERT ON entries BEGIN DELETE FROM entries; END", "is no cache of spot-async"),
        ("PRAGMA application_id = 7", "is no cache of spot-async"),
        ("PRAGMA application_id = 0; PRAGMA user_version = 7; DROP TABLE entries; CREATE TABLE t (x)", "is no cache"),
    ],
)
@pytest.mark.parametrize("is_replay", [False, True])
def test_a_database_that_is_no_cache_is_refused_and_left_as_it_is(tmp_path, spoil, said, is_replay):
    path = tmp_path / "c"
    asyncio.run(opened(path))
    with closing(sqlite3.connect(path)) as database:
        database.executescript(f"PRAGMA journal_mode = DELETE; {spoil}")
    before = path.read_bytes()
    with pytest.raises(DataError, match=said) as refused:
        asyncio.run(opened(path, is_replay=is_replay))
    assert str(path) in str(refused.value)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("is_replay", [False, True])
def test_what_is_no_file_or_another_users_is_one_line(tmp_path, is_replay):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"teacher\.cache: cannot use .*no regular file"):
        asyncio.run(opened(tmp_path / "pipe", is_replay=is_replay))
    asyncio.run(opened(tmp_path / "c"))
    for name in ("c", "c-wal"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o646)
        with pytest.raises(DataError, match=rf"{name} can be written by everybody"):
            asyncio.run(opened(tmp_path / "c", is_replay=is_replay))
        (tmp_path / name).chmod(0o644)


def test_a_cache_of_an_older_version_is_continued_and_a_replay_writes_nothing(tmp_path):
    path = tmp_path / "c"

    async def run():
        async with ScoreCache(path) as cache:
            await cache.put(digest("k"), scores())
            await cache.put(digest("damaged"), scores(1))
        with closing(sqlite3.connect(path)) as database:
            database.executescript("PRAGMA journal_mode = DELETE; PRAGMA application_id = 0")
            with database:
                database.execute("UPDATE entries SET value = x'00' WHERE key = ?", (digest("damaged"),))
        before = path.read_bytes()
        async with ScoreCache(path, is_replay=True) as cache:
            assert_same(await cache.get(digest("k"), TokenScores), scores())
            assert await cache.get(digest("damaged"), TokenScores) is None
        assert path.read_bytes() == before
        async with ScoreCache(path) as writing, ScoreCache(path, is_replay=True) as cache:
            await writing.put(digest("new"), scores(2))
            assert_same(await cache.get(digest("new"), TokenScores), scores(2))

    asyncio.run(run())


def test_a_replay_without_a_cache_is_refused_before_the_start(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match="replay=true needs cache"):
        plan_training(load_config(ROOT / "configs" / "quickstart.yaml", [FEW, "teacher.replay=true"]))


def test_a_replay_needs_no_key_of_the_teachers(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    backend = "teacher.backend={kind: openai, url: 'http://127.0.0.1:9', api_key_env: NO_SUCH_KEY}"
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        plan_training(load_config(ROOT / "configs" / "quickstart.yaml", [FEW, backend]))
    replay = ["teacher.cache=c", "teacher.replay=true"]
    assert plan_training(load_config(ROOT / "configs" / "quickstart.yaml", [FEW, backend, *replay])).teachers


def test_weights_that_differ_anywhere_are_another_teacher(tmp_path):
    generator = np.random.default_rng(0)
    ends = {"a.first": generator.normal(size=40_000), "z.last": generator.normal(size=40_000)}
    digests = []
    for name in ("one", "another"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file({**ends, "m.middle": generator.normal(size=64)}, tmp_path / name / "model.safetensors")
        digests.append(weights_digest(tmp_path / name))
    assert digests[0] != digests[1]
    (tmp_path / "one" / "pytorch_model.bin").write_bytes(b"older")  # servers read those too
    assert weights_digest(tmp_path / "one") != digests[0]


def test_how_a_server_of_ours_computes_is_part_of_who_the_teacher_is():
    files = read_model("teacher", str(MODEL))
    backends = [
        {"kind": "local"},
        {"kind": "local", "dtype": "bfloat16"},
        {"kind": "vllm", "launch": {"python": "python3"}},
        {"kind": "vllm", "launch": {"python": "python3", "arguments": ["--quantization", "fp8"]}},
    ]
    made = [TeacherConfig.model_validate({"model": str(MODEL), "backend": each}) for each in backends]
    assert len({teacher_identity(each, files, b"weights") for each in made}) == len(backends)


def test_runs_that_begin_at_once_share_a_new_file(tmp_path):
    """Making a database takes several steps, in which others would find it locked."""

    async def run():
        for number in range(20):
            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(opened(tmp_path / str(number)))

    asyncio.run(run())
    # Connections that close at once may each leave SQLite's own files to the other.
    left = {path.name.removesuffix("-wal").removesuffix("-shm") for path in tmp_path.iterdir()}
    assert left == set(map(str, range(20)))
