"""Hostile run directories, models and problem files end in one line, with bounded memory."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pytest
from command import FEW, ROOT
from pyarrow import parquet
from run_files import make_run, metrics_row, spot_sample
from typer.testing import CliRunner

from spot_async.cli import app
from spot_async.config.loading import load_config
from spot_async.data.prompts import read_template
from spot_async.errors import ConfigError, DataError, SpotError
from spot_async.evaluation.response_log import Identity, ResponseLog, count_kept, read_responses
from spot_async.run_directory import manifest
from spot_async.run_directory.dead_letters import settle_letters
from spot_async.run_directory.layout import RunDirectory
from spot_async.run_directory.ledger import Ledger
from spot_async.spending.account import Account
from spot_async.spending.prices import Prices
from spot_async.spending.teacher_cache import weights_digest
from spot_async.telemetry.run_log import SpendingLog
from spot_async.tools.tune.results import check_output
from spot_async.trainer.settings import TrainerSettings

MORE_BYTES = 300 << 20  # a hostile file may take this much more than a good one
DEEP = "[" * 200_000
QUICKSTART, STUDENT = "configs/quickstart.yaml", "examples/running_sum/student"


class Row(NamedTuple):
    """What is spoilt, how, which command looks at it, and what its line says."""

    name: str
    spoil: Callable[[Path], object]
    words: tuple[str, ...]  # HERE is the directory
    said: str  # "" where nothing is wrong for this command: it ends well


def pipe(name: str) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        os.mkfifo(directory / name)

    return make


def device(name: str) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to("/dev/zero")

    return make


def sparse(name: str, size: int = 8 << 30) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).touch()
        os.truncate(directory / name, size)

    return make


def text(name: str, content: str | bytes) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return make


def config(**changes: Any) -> Callable[[Path], None]:
    """Return what changes values of a model's config.json."""

    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def header(content: dict[str, Any], data_bytes: int = 64) -> Callable[[Path], None]:
    encoded = json.dumps(content).encode()
    return text("model.safetensors", struct.pack("<Q", len(encoded)) + encoded + bytes(data_bytes))


def long_header(directory: Path) -> None:
    sparse("model.safetensors")(directory)
    with (directory / "model.safetensors").open("r+b") as file:
        file.write(struct.pack("<Q", 1 << 30))


def ledger(script: str) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        for path in directory.glob("ledger.sqlite*"):
            path.unlink()
        with closing(sqlite3.connect(directory / "ledger.sqlite")) as made:
            made.executescript(f"create table about (name, value); {script}")

    return make


ENDLESS = (
    "create view prompts as with recursive n(i) as (select 0 union all select i + 1 from n) "
    "select i ordinal, '' problem, 1 attempt, '' state, '' reason, 0 batch, 0 lineage from n"
)
COMPUTED = (
    "create table prompts (ordinal integer primary key, problem text as (zeroblob(900000000)), attempt, state, "
    "reason, batch, lineage); insert into prompts (ordinal) values (0)"
)


def changed_manifest(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "checkpoints/step-000001/manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def large_cells(path: Path) -> None:
    cells = pyarrow.table({"problem": ["x" * (200 << 20)], "answer": ["1"]})
    parquet.write_table(cells, path / "problems.parquet", compression="zstd")


def repeated(path: Path) -> None:
    rows = pyarrow.table({"problem": [str(n) for n in range(20)], "answer": ["1"] * 20, "more": ["x" * 10**7] * 20})
    parquet.write_table(rows, path / "problems.parquet", compression="zstd")


def inflated(path: Path) -> None:
    with gzip.open(path / "problems.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(4):
            file.write(bytes(16 << 20))


LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
MERGES = "a0: &a0 {k: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{f'*a{n - 1}, ' * 400}]}}\n" for n in range(1, 8))
REPORT, VERIFY, SAMPLES = ("report", "HERE", "--html", "PAGE"), ("verify-run", "HERE"), ("inspect", "HERE")
FROM, COMPARE = ("simulate", QUICKSTART, "--from", "HERE"), ("compare", "HERE", "other=HERE")
EMPTY = "[],"

RUNS = [
    Row("a good run", lambda run: None, REPORT, ""),
    Row("config.yaml: a billion laughs", text("config.yaml", LAUGHS), REPORT, "more than 100,000 values"),
    Row("config.yaml: merges of merges", text("config.yaml", MERGES), VERIFY, "merges more than 1,000"),
    Row("config.yaml: deep", text("config.yaml", "a: " + DEEP), REPORT, "too deep within each other"),
    Row(
        "config.yaml: a number of 100,000 digits", text("config.yaml", "a: " + "9" * 100_000), REPORT, "not valid YAML"
    ),
    Row("config.yaml: a tag of Python", text("config.yaml", "a: !!python/object/apply:os.abort []"), REPORT, "YAML"),
    Row("config.yaml: no sections", text("config.yaml", "student: [1]\npolicy: x\n"), REPORT, "is no section"),
    Row("config.yaml: a word", text("config.yaml", "training: {batch_size: many}"), REPORT, "batch_size is no number"),
    Row("config.yaml: a pipe", pipe("config.yaml"), VERIFY, "no regular file"),
    Row("config.yaml: /dev/zero", device("config.yaml"), REPORT, "no regular file"),
    Row("config.yaml: 8 GB", sparse("config.yaml"), REPORT, "more than 262,144 bytes"),
    Row("run.json: a pipe", pipe("run.json"), REPORT, "no readable run.json"),
    Row("run.json: /dev/zero", device("run.json"), ("push", "HERE", "a/b", "--dry-run"), "no readable run.json"),
    Row("run.json: deep", text("run.json", DEEP), SAMPLES, "no readable run.json"),
    Row(".lock: a pipe", pipe(".lock"), VERIFY, ""),
    Row("metrics.jsonl: 8 GB without a line end", sparse("metrics.jsonl"), REPORT, "more than"),
    Row("metrics.jsonl: /dev/zero", device("metrics.jsonl"), REPORT, "no regular file"),
    Row("metrics.jsonl: deep", text("metrics.jsonl", '{"a":' + DEEP + "\n"), REPORT, "metrics.jsonl:1"),
    Row("metrics.jsonl: NUL and no UTF-8", text("metrics.jsonl", b'{"\0\xff":1}\n'), REPORT, "metrics.jsonl:1"),
    Row(
        "metrics.jsonl: 3 million values",
        text("metrics.jsonl", "".join(f'{{"iteration":{n},"a":1,"b":2}}\n' for n in range(1_000_000))),
        REPORT,
        "more than 2,000,000 values",
    ),
    Row("samples.jsonl: 8 GB without a line end", sparse("samples.jsonl"), SAMPLES, "line 1 has more than"),
    Row("samples.jsonl: deep", text("samples.jsonl", '{"a":' + DEEP + "\n"), SAMPLES, "samples.jsonl:1"),
    Row("samples.jsonl: 10^30", text("samples.jsonl", f'{{"iteration":{10**30}}}\n'), SAMPLES, "at `$.iteration`"),
    Row("samples.jsonl: a pipe", pipe("samples.jsonl"), REPORT, "no regular file"),
    Row("logs/run.jsonl: /dev/zero", device("logs/run.jsonl"), REPORT, ""),
    Row("logs/run.jsonl: deep", text("logs/run.jsonl", DEEP + "\n"), REPORT, ""),
    Row("summary.json: 5 million lists", text("summary.json", f'{{"a":[{EMPTY * 5_000_000}1]}}'), REPORT, "values"),
    Row("summary.json: deep", text("summary.json", f'{{"a":{DEEP}'), REPORT, "too deep"),
    Row("dead_letters.jsonl: a pipe", pipe("dead_letters.jsonl"), SAMPLES, "no regular file"),
    Row("trace.json: /dev/zero", device("trace.json"), FROM, "no regular file"),
    Row("trace.json: 8 GB", sparse("trace.json"), FROM, "line 1 has more than"),
    Row("evaluation-after.json: lists", text("evaluation-after.json", f"[{EMPTY * 5_000_000}1]"), COMPARE, "values"),
    Row("evaluation-after.json: deep", text("evaluation-after.json", f'{{"a":{DEEP}'), COMPARE, "too deep"),
    Row("ledger.sqlite: a view without an end", ledger(ENDLESS), VERIFY, "is no ledger of spot-async"),
    Row("ledger.sqlite: a column that makes gigabytes", ledger(COMPUTED), VERIFY, "is no ledger of spot-async"),
    Row("ledger.sqlite: a pipe", pipe("ledger.sqlite"), VERIFY, "no regular file"),
    Row("ledger.sqlite-wal: 8 GB", sparse("ledger.sqlite-wal"), VERIFY, "more than"),
    Row("manifest.json: a step of 10^15", changed_manifest(step=10**15), VERIFY, "is of iteration 1000000000000000"),
    Row(
        "manifest.json: names /dev/zero",
        changed_manifest(files=[{"name": "../../../../../../dev/zero", "bytes": 0, "blake2b": ""}]),
        VERIFY,
        "",  # the checkpoint is damaged, which verify-run shows
    ),
    Row("manifest.json: /dev/zero", device("checkpoints/step-000001/manifest.json"), VERIFY, ""),
]
DRY = (
    "train",
    QUICKSTART,
    "student.model=HERE",
    "teacher.model=HERE",
    "--dry-run",
    "--brief",
    "run.directory=PAGE",
    "evaluation=null",
    FEW,
)
MODELS = [
    Row("a good model", lambda model: None, DRY, ""),
    Row("config.json: a vocabulary of 1e12", config(vocab_size=10**12), DRY, "vocab_size=1000000000000"),
    Row("config.json: 1e9 layers", config(num_hidden_layers=10**9), DRY, "num_hidden_layers=1000000000"),
    Row("config.json: a width of 1e12", config(hidden_size=10**12), DRY, "hidden_size=1000000000000"),
    Row("config.json: a vocabulary of -5", config(vocab_size=-5), DRY, "vocab_size=-5"),
    Row("config.json: a vocabulary of 1e12 as text", config(vocab_size="1e12"), DRY, "vocab_size='1e12'"),
    Row("config.json: a vocabulary of 1.5", config(vocab_size=1.5), DRY, "vocab_size=1.5"),
    Row("config.json: no heads", config(num_attention_heads=0), DRY, "cannot be loaded"),
    Row("config.json: deep", text("config.json", f'{{"a":{DEEP}'), DRY, "too deep"),
    Row("config.json: /dev/zero", device("config.json"), DRY, "no regular file"),
    Row("config.json: a pipe", pipe("config.json"), DRY, "no regular file"),
    Row("tokenizer.json: 8 GB", sparse("tokenizer.json"), DRY, "more than 67,108,864 bytes"),
    Row("tokenizer.json: deep", text("tokenizer.json", DEEP), DRY, "no tokenizer that can be loaded"),
    Row("tokenizer.json: 5 million lists", text("tokenizer.json", f"[{EMPTY * 5_000_000}1]"), DRY, "values"),
    Row("tokenizer_config.json: deep", text("tokenizer_config.json", DEEP), DRY, "no tokenizer that can be loaded"),
    Row("model.safetensors: a header of 1 GB", long_header, DRY, "more than 16,777,216 bytes"),
    Row("model.safetensors: deep", header({"__metadata__": {}, "a": {"dtype": "F32"}}), DRY, "no safetensors file"),
    Row(
        "model.safetensors: overlapping",
        header({
            "a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
            "b": {"dtype": "F32", "shape": [8], "data_offsets": [16, 48]},
        }),
        DRY,
        "overlaps another",
    ),
    Row(
        "model.safetensors: beyond the file",
        header({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}),
        DRY,
        "is cut off",
    ),
    Row(
        "model.safetensors: a shape of 2^120",
        header({"a": {"dtype": "F32", "shape": [1 << 60, 1 << 60], "data_offsets": [0, 64]}}),
        DRY,
        "its shape does not have",
    ),
    Row("model.safetensors: a pipe", pipe("model.safetensors"), DRY, ""),  # a warning, in a dry run
]  # fmt: skip
CHECK = ("check",)
PROBLEMS = [
    Row(
        "good problems",
        text("problems.jsonl", '{"problem": "1 + 1", "answer": "2"}\n'),
        (*CHECK, "HERE/problems.jsonl"),
        "",
    ),
    Row("a Parquet cell of 200 MB", large_cells, (*CHECK, "HERE/problems.parquet"), "longer than any problem"),
    Row("64 MB of NULs in gzip", inflated, (*CHECK, "HERE/problems.jsonl.gz"), "a row of more than"),
    Row("problems: /dev/zero", device("problems.jsonl"), (*CHECK, "HERE/problems.jsonl"), "no regular file"),
    Row("problems: a pipe", pipe("problems.json"), (*CHECK, "HERE/problems.json"), "no regular file"),
    Row("problems: 8 GB", sparse("problems.json"), (*CHECK, "HERE/problems.json"), "more than 256 MiB"),
    Row("problems: deep", text("problems.jsonl", f"{DEEP}\n"), (*CHECK, "HERE/problems.jsonl"), "problems.jsonl:1"),
    Row(
        "problems: 5 million lists",
        text("problems.json", f"[{EMPTY * 5_000_000}1]"),
        (*CHECK, "HERE/problems.json"),
        "more than 4,000,000 values",
    ),
    Row("Parquet: one text of 10 MB for 20 rows", repeated, (*CHECK, "HERE/problems.parquet"), ""),
]


def made_run(run: Path) -> None:
    make_run(run, [spot_sample()], [metrics_row(1)], {"prompts": {}, "spending": {}})
    (run / "logs").mkdir()
    text(
        "config.yaml",
        (run / "config.yaml").read_text().replace("batch_size: 2", "batch_size: 1").replace("nowhere", STUDENT),
    )(run)
    with closing(Ledger.open(run)) as ledger:
        ledger.admit(0, "p0")
        ledger.cut(0, 0, {0: True})
    directory = manifest.checkpoint_directory(run, 1)
    directory.mkdir(parents=True)
    manifest.commit(directory, manifest.Manifest(step=1, lineages=(0,), keys="", data=""))


def a_copy(model: Path) -> None:
    shutil.copytree(ROOT / STUDENT, model)


def outcomes(rows: list[Row], make: Callable[[Path], object], tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Return what came of each row, by its name."""
    asked = []
    for number, row in enumerate(rows):
        directory = tmp_path / str(number)
        make(directory)
        row.spoil(directory)
        places = {"HERE": str(directory), "PAGE": str(tmp_path / f"{number}.html")}
        words = [word.replace("HERE", places["HERE"]).replace("PAGE", places["PAGE"]) for word in row.words]
        asked.append(json.dumps({"name": row.name, "words": words}) + "\n")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/hostile_files.py")],
        input="".join(asked),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "300"},
    )
    assert done.returncode == 0, done.stderr
    return {each["name"]: each for each in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(
    ("rows", "make"),
    [
        pytest.param(RUNS, made_run, id="runs", marks=pytest.mark.long),
        pytest.param(MODELS, a_copy, id="models", marks=pytest.mark.long),
        pytest.param(PROBLEMS, Path.mkdir, id="problems", marks=pytest.mark.long),
    ],
)
def test_hostile_files_end_in_one_line_within_bounds(
    rows: list[Row], make: Callable[[Path], object], tmp_path: Path
) -> None:
    found, faults = outcomes(rows, make, tmp_path), []
    good = found[rows[0].name]["peak_bytes"]
    for row in rows:
        each = found[row.name]
        lines = [line for line in each["lines"] if not line.startswith("warning")]
        is_well = each["code"] in (0, 1) and not lines
        is_refused = each["code"] == 2 and len(lines) == 1 and lines[0].startswith("error: ")
        is_as_said = is_refused and row.said in lines[0] if row.said else is_well
        if not is_as_said or each["peak_bytes"] > good + MORE_BYTES:
            faults.append((row.name, each))
        if (table := os.environ.get("SPOT_HOSTILE_TABLE")) is not None:
            said, more = "".join(lines).replace(str(tmp_path), "…"), (each["peak_bytes"] - good) >> 20
            with Path(table).open("a") as file:
                file.write(f"| {row.name} | {said} | {each['code']} | {more:+} | {each['seconds']} |\n")
    assert faults == []


IDENTITY = Identity(model="m", backend="local", settings={})
READERS: dict[str, Callable[[Path], object]] = {
    "evaluation.jsonl.partial": lambda path: ResponseLog(
        RunDirectory(path.parent), path.name.removesuffix(".partial"), IDENTITY
    ).open(),
    "evaluation.jsonl": lambda path: read_responses(RunDirectory(path.parent), path.name),
    "evaluation-000001.jsonl": count_kept,
    "dead_letters.jsonl": lambda path: settle_letters(path.parent, []),
    "spending.jsonl": lambda path: SpendingLog(
        RunDirectory(path.parent), {"teacher": Account("teacher", prices=Prices())}
    ).go_on(),
    "samples.jsonl": lambda path: RunDirectory(path.parent).cut_after(3),
    "trainer.json": lambda path: TrainerSettings.load(str(path)),
    "chat_template.jinja": read_template,
    "tuned.yaml": lambda path: check_output(path.with_name("config.yaml"), path),
    "config.json": lambda path: weights_digest(path.parent),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("spoil", [pipe, device, sparse])
def test_each_reader_of_what_decides_refuses_what_has_no_end(
    name: str, spoil: Callable[[str], Callable[[Path], None]], tmp_path: Path
) -> None:
    spoil(name)(tmp_path)
    with pytest.raises((SpotError, OSError)) as refused:
        READERS[name](tmp_path / name)
    assert "no regular file" in str(refused.value) or "more than" in str(refused.value) or name == "tuned.yaml"
    assert "\n" not in str(refused.value)


def test_what_another_could_write_is_continued_in_no_run(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    RunDirectory.open_own(tmp_path / "run")
    for name in ("evaluation-before.jsonl.partial", "spending.jsonl", "metrics.jsonl"):
        path = tmp_path / "run" / name
        path.touch()
        path.chmod(0o666)
        with pytest.raises(DataError, match=f"{name} can be written by everybody"):
            RunDirectory.open_own(tmp_path / "run")
        path.unlink()


def figures(**changes: Any) -> dict[str, Any]:
    return {"samples": 2, "tiers": {"all": {"problems": 4, "avg": 0.5, "pass": 0.5, "pass_k": 2} | changes}}


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        ([], "got `array`"),
        (None, "got `null`"),
        ({"before": "text"}, "$.before"),
        ({"before": figures(avg=None)}, "$.before.tiers"),
        ({"before": figures(problems=[1])}, "$.before.tiers"),
        ({"before": figures(pass_k=[1])}, "$.before.tiers"),
        ({"before": figures(), "change": {"easy": {"avg": 0.1}}}, "have other tiers"),
        ({"before": figures(), "change": {"all": {"avg": "more"}}}, "$.change"),
        ({"prompts": [1]}, "$.prompts"),
        ({"spending": {"teacher": {"money": "much"}}}, "$.spending"),
        ({"ended_early": {}}, "$.ended_early"),
        ({"before": figures(avg=1e308), "spending": {"teacher": {}}, "another": [[1]]}, ""),
    ],
)
def test_a_summary_of_another_shape_is_one_line_of_the_report(summary: Any, said: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", [spot_sample()], [metrics_row(1)])
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert done.exit_code == (2 if said else 0), done.output
    assert isinstance(done.exception, SystemExit | None)
    lines = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert len(lines) == bool(said)
    assert said in "".join(done.output.splitlines())


@pytest.mark.parametrize("spoiled", ["batch = 'text'", "batch = x'ff'", "batch = 1.5", "reason = x'00'"])
def test_another_type_in_a_column_of_the_ledger_is_one_line(spoiled: str, tmp_path: Path) -> None:
    made_run(tmp_path / "run")
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite")) as ledger, ledger:
        ledger.execute(f"update prompts set {spoiled}")
    done = CliRunner().invoke(app, ["verify-run", str(tmp_path / "run")])
    assert (done.exit_code, isinstance(done.exception, SystemExit)) == (2, True)
    assert "cannot be read: Expected `" in "".join(done.output.splitlines())


@pytest.mark.parametrize("number", ["inf", "nan", "-1"])
@pytest.mark.parametrize("words", [["report", "HERE", "--watch"], ["tune", QUICKSTART, "--seconds"]])
def test_a_time_that_is_none_is_refused(words: list[str], number: str) -> None:
    done = CliRunner().invoke(app, [*words, number])
    assert (done.exit_code, "Invalid value" in done.output) == (2, True)


def test_a_share_that_gives_no_prompt_is_refused() -> None:
    sets = "[{path: a.jsonl, share: 1e-320}, {path: b.jsonl, share: 1.0}]"
    with pytest.raises(ConfigError, match=r"^data\.train\.0\.share: .* or equal to 0\.000001"):
        load_config(ROOT / QUICKSTART, [f"data.train={sets}"])
