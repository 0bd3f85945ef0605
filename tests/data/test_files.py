"""Problem files: every format and the hub give the same rows, columns are found, and what is wrong is one line."""

from __future__ import annotations

import gzip
import io
import json
import threading
import tracemalloc
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow
import pytest
from problem_files import load, read, write
from pyarrow import parquet

from spot_async.config import ProblemSetConfig
from spot_async.config.loading import apply_override, validate_as
from spot_async.data import load_problem_set, rows
from spot_async.errors import ConfigError, DataError
from spot_async.types import Problem

# Formats


ROWS = [{"problem": 'one, "1"', "answer": "1", "id": "a"}, {"problem": "two\nlines", "answer": "2", "id": "b"}]


def as_csv(path):
    path.write_text('problem,answer,id\n"one, ""1""",1,a\n"two\nlines",2,b\n')


def as_parquet(path, rows=ROWS):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


FORMATS = {
    "p.jsonl": lambda path: path.write_text("".join(json.dumps(row) + "\n" for row in ROWS)),
    "p.json": lambda path: path.write_text(json.dumps({"version": 1, "data": ROWS})),
    "list.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "p.csv": as_csv,
    "p.parquet": as_parquet,
    "p.jsonl.gz": lambda path: path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in ROWS).encode())),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_problems(tmp_path, name):
    FORMATS[name](tmp_path / name)
    found = read(tmp_path / name)
    assert [(p.id, p.text, p.answer) for p in found.problems] == [("a", 'one, "1"', "1"), ("b", "two\nlines", "2")]
    assert found.counts == {"read": 2, "problems": 2}


@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.csv"])
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path, name):
    FORMATS[name](tmp_path / name)
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
    assert [(p.id, p.answer) for p in read(tmp_path / name).problems] == [("a", "1"), ("b", "2")]


GZIP = gzip.compress(b"{}", mtime=0)


def damaged_parquet():
    file = io.BytesIO()
    as_parquet(file)
    return file.getvalue()[:4] + b"\xff" * 40 + file.getvalue()[44:]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("p.json", b'{"a": 1}', "expected a list of objects"),
        ("p.json", b"[1]", "item 1 is no object, but a number"),
        ("p.csv", b"problem,answer\none,1,2\n", ":2: 3 cells, but the header has 2: put cells with commas in"),
        ("p.csv", b"problem;answer\none;1\n", ":1: one column, 'problem;answer': write commas between cells, not ';'"),
        ("p.tsv", b"problem\tanswer\n", "data.train: {path}: tabs between cells are not read: write it with commas"),
        ("p.csv", b"problem,answer\n\xff,1\n", "not valid CSV"),
        ("p.jsonl.gz", b"no gzip", "data.train: {path} is damaged or cut short: Not a gzipped file"),
        ("p.jsonl.gz", GZIP[:-9], "data.train: {path} is damaged or cut short: Compressed file ended"),
        ("p.jsonl.gz", GZIP[:10] + b"\xff" * 20, "data.train: {path} is damaged or cut short: Error -3"),
        ("p.parquet", damaged_parquet(), "{path}: not valid Parquet"),
        ("p.jsonl", b"", "data.train: {path}: no problems in 0 rows"),
        (
            "p.txt",
            b"",
            "neither a file that ends in .jsonl, .json, .csv, .parquet (or .gz) nor `owner/name` on the hub",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as raised:
        read(tmp_path / name)
    assert complaint.format(path=tmp_path / name) in str(raised.value)
    assert "\n" not in str(raised.value)


MIB_OF_GZIP = gzip.compress(b"1" * (1 << 20))  # members of a file follow each other, and so make a bomb of any size


@pytest.mark.parametrize(
    ("name", "start", "complaint"),
    [
        ("bomb.jsonl.gz", b'{"problem": "1+1", "answer": 2}\n{"problem": "', ":2: a row of more than 16,777,216 bytes"),
        ("bomb.csv.gz", b'problem,answer\n1+1,2\n"', ":3: a row of more than 16,777,216 bytes"),
        ("bomb.json.gz", b'[{"problem": "', ": more than 256 MiB once it is inflated: write it as .jsonl.gz"),
        ("bomb.parquet.gz", b"PAR1", ": more than 256 MiB once it is inflated: write it as .jsonl.gz"),
    ],
)
def test_a_small_file_that_inflates_to_gigabytes_is_not_read_into_memory(tmp_path, monkeypatch, name, start, complaint):
    monkeypatch.setattr(rows, "MAX_INFLATED_BYTES", rows.MAX_INFLATED_BYTES >> 4)  # as fast as the others
    complaint = complaint.replace("256", "16")
    path = tmp_path / name
    path.write_bytes(gzip.compress(start) + MIB_OF_GZIP * 3000)
    assert path.stat().st_size < 4 << 20
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as raised:
            read(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(raised.value).startswith(f"{path}{complaint}")
    assert peak_bytes < 100 << 20


def test_what_is_bounded_is_a_row_and_no_line_or_file(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 3000)
    write(tmp_path, [{"problem": f"{i}" * 1000, "answer": i} for i in range(10, 60)])
    assert len(read(tmp_path / "problems.jsonl").problems) == 50
    (tmp_path / "p.csv").write_text("problem,answer\n" + '"1\n+\n1",2\n' * 1000 + '"\n",' * 1000)
    with pytest.raises(DataError, match=r"p\.csv:3002: a row of more than 3,000 bytes"):
        read(tmp_path / "p.csv")


@pytest.mark.parametrize("name", ["deep.jsonl", "deep.json"])
@pytest.mark.parametrize("depth", [900, 940, 100_000])
def test_a_row_that_is_nested_without_end_is_one_line(tmp_path, name, depth):
    path = tmp_path / name
    row = '{"problem": "1+1", "answer": ' + "[" * depth + "]" * depth + "}"
    path.write_text(f"[{row}]" if name.endswith(".json") else row)
    with pytest.raises(DataError) as raised:
        read(path)
    assert str(raised.value).startswith(str(path))
    assert len(str(raised.value).replace(str(path), "")) < 250


def test_what_only_the_hub_has_is_refused_for_a_file(tmp_path):
    with pytest.raises(DataError, match=r"data\.train\.split: .* is a file"):
        load(tmp_path, ROWS, split="train")


def test_a_data_set_of_the_hub_is_read_with_its_subset_split_and_revision(monkeypatch):
    import datasets
    import huggingface_hub

    asked = []

    def load_dataset(*positional, **named):
        asked.append((positional, named))
        return (
            {"test": datasets.Dataset.from_list(ROWS)} if named["split"] is None else datasets.Dataset.from_list(ROWS)
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    chosen = ProblemSetConfig(path="owner/name@v1.0", subset="main", split="train")
    assert len(load_problem_set(chosen, "data.train").problems) == 2
    assert asked[0][0] == ("owner/name",)
    assert asked[0][1].items() >= {"name": "main", "split": "train", "revision": "v1.0"}.items()
    assert len(load_problem_set(ProblemSetConfig(path="owner/name"), "data.train").problems) == 2  # its only split


def test_without_the_hub_no_other_revision_is_taken_for_the_one_that_was_asked_for(monkeypatch, tmp_path):
    import datasets

    def load_dataset(*_, **__):  # the newest copy in the cache, whatever `revision` says
        datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "c0ffee.parquet")
        return datasets.Dataset.from_parquet(str(tmp_path / "c0ffee.parquet"), cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"data\.train\.path: abc of owner/name is not the newest copy in"):
        read("owner/name@abc")
    (cached,) = {file.parent.name for file in (tmp_path / "cache").rglob("*.arrow")}
    assert len(read(f"owner/name@{cached}").problems) == 2
    assert len(read("owner/name").problems) == 2


class EmptyHub(BaseHTTPRequestHandler):
    """A hub that has nothing, and breaks when it is asked for `owner/broken`."""

    def do_GET(self):
        self.send_error(503 if "broken" in self.path else 404)

    def log_message(self, *_):
        pass


def test_a_hub_that_cannot_be_reached_is_said_at_once_and_one_that_answers_is_left_to_its_library(monkeypatch):
    import datasets

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *name, **_: asked.append(name) or {"train": [ROWS[0]]})
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with ThreadingHTTPServer(("127.0.0.1", 0), EmptyHub) as server:
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, args=[0.01]).start()
        try:
            assert len(read("owner/name").problems) == 1
            with pytest.raises(DataError, match=r"owner/broken is no file here, and cannot be had from the hub: .*503"):
                read("owner/broken")
        finally:
            server.shutdown()
    with pytest.raises(DataError, match=r"data\.train: owner/name is no file here, and cannot be had from the hub: "):
        read("owner/name")  # nobody listens there any more
    assert asked == [("owner/name",)]


# Columns


def test_columns_may_have_other_names_and_stand_inside_others(tmp_path):
    rows = [{"q": "1+1", "meta": {"gold": {"value": 2}, "kind": "sum"}, "number": 5}]
    fields = {"problem": "q", "answer": "meta.gold.value", "tier": "meta.kind", "id": "number"}
    (problem,) = load(tmp_path, rows, fields=fields).problems
    assert problem == Problem(id="5", text="1+1", answer="2", tier="sum")


@pytest.mark.parametrize(
    ("row", "more", "complaint"),
    [
        (
            {"q": "1+1", "answer": 2, "a\nb": 3},
            {"layout": "plain"},
            "no `problem`, for which this layout takes 'problem'; the row has q, answer, 'a\\nb': name its column in "
            "data.train.fields.problem, or another data.train.layout",
        ),
        ({"problem": "1"}, {"fields": {"answer": "gold"}}, "no column 'gold', which data.train.fields.answer names"),
        ({"problem": "1+1", "answer": None}, {}, "`answer` (column 'answer') is empty"),
        ({"problem": "1+1", "answer": True}, {}, "column 'answer' is True, but `answer` is text or a number"),
        (
            {"problem": "1+1", "answer": 2, "topic": [{"x": 1}]},
            {"fields": {"tier": "topic"}},
            "column 'topic' is [{'x': 1}], but `tier` is text, a number or a list of texts; name another in "
            "data.train.fields.tier",
        ),
        ({"Question": "1+1", "Correct Answer": "2"}, {"layout": "gpqa_diamond"}, "no `choices`, for which this layout"),
        ({"question": "1+1", "answer": "B"}, {"layout": "mmlu_pro"}, "no `choices`, for which this layout takes 'opt"),
    ],
)
def test_a_part_that_is_missing_or_of_a_wrong_type_is_named_with_the_key_to_set(tmp_path, row, more, complaint):
    with pytest.raises(DataError) as raised:
        load(tmp_path, [row], **more)
    assert str(raised.value).startswith(f"{tmp_path / 'problems.jsonl'}:1: {complaint}")


@pytest.mark.parametrize("layout", ["auto", "hmmt", "aime"])
def test_a_list_of_kinds_is_one_category(tmp_path, layout):
    rows = [{"problem_idx": 1, "problem": "p", "answer": 3, "problem_type": ["Algebra", "Geometry"]}]
    rows.append({"problem_idx": 2, "problem": "q", "answer": 4, "problem_type": []})
    as_parquet(tmp_path / "p.parquet", rows)
    for found in (load(tmp_path, rows, layout=layout), read(tmp_path / "p.parquet", layout=layout)):
        assert [(p.id, p.category) for p in found.problems] == [("1", "Algebra, Geometry"), ("2", None)]


@pytest.mark.parametrize("missing", [None, float("nan"), "nan", ""])
def test_an_answer_that_is_null_is_missing_and_a_column_of_floats_has_integers(tmp_path, missing):
    rows = [{"problem": "p", "answer": 3.0, "id": 7.0, "level": 2.0}]
    rows.append({"problem": "q", "answer": missing, "id": None, "level": None})
    if isinstance(missing, str):
        (tmp_path / "p.csv").write_text(f"problem,answer,id,level\np,3,7,2\nq,{missing},,\n")
    else:
        as_parquet(tmp_path / "p.parquet", rows)
    path = next(tmp_path.iterdir())
    found = read(path, layout="dapo")
    assert (found.problems, found.dropped) == ([Problem(id="7", text="p", answer="3", tier="2")], {"no answer": 1})
    with pytest.raises(DataError, match=r"p\.(csv:3|parquet: row 2): `answer` \(column 'answer'\) is empty"):
        read(path, layout="math500")


def test_parts_that_need_not_be_there_may_be_null(tmp_path):
    rows = [{"problem": "p", "answer": 0.5, "kind": None, "meta": None}]
    rows.append({"problem": "q", "answer": 2.0, "kind": "sum", "meta": {"source": "x"}})
    found = load(tmp_path, rows, fields={"tier": "kind", "category": "meta.source"})
    assert [(p.id, p.answer, p.tier) for p in found.problems] == [("row-1", "0.5", None), ("row-2", "2", "sum")]


def test_a_set_without_problems_or_with_an_id_twice_names_its_key(tmp_path):
    with pytest.raises(DataError, match=r"data\.train: .*: no problems in 1 rows, layout math: no answer 1"):
        load(tmp_path, [{"problem": "p"}], layout="math")
    with pytest.raises(
        DataError, match=r"data\.train: .*:2: id '1' was used in .*:1 already; .* data\.train\.fields\.id"
    ):
        load(tmp_path, [{"id": 1, "problem": "p", "answer": 1}, {"id": 1, "problem": "q", "answer": 1}])


def test_a_path_is_short_for_a_section_also_when_overridden():
    tree = {"train": "a.jsonl"}
    apply_override(tree, "train.layout=math")
    assert tree == {"train": {"path": "a.jsonl", "layout": "math"}}
    assert validate_as(ProblemSetConfig, tree["train"]).paths == ["a.jsonl"]
    with pytest.raises(ConfigError, match="layout"):
        validate_as(ProblemSetConfig, {"path": "a.jsonl", "layout": "maths"})


def test_several_files_are_one_set_whose_ids_cannot_meet(tmp_path):
    paths = [
        write(tmp_path, [{"id": 1, "problem": month, "answer": "1"}], f"{month}.jsonl") for month in ("feb", "nov")
    ]
    found = load_problem_set(ProblemSetConfig(path=paths, layout="hmmt"), "data.train")
    assert [problem.id for problem in found.problems] == ["1/1", "2/1"]
