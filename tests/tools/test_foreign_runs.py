"""What commands do with another user's run: they read it, import nothing that it names, and write nothing there."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path

import pytest
import typer
from command import assert_refused, invoke
from run_files import make_run, metrics_row, spot_sample

from spot_async.base import writers
from spot_async.cli import app
from spot_async.run_directory import manifest
from spot_async.run_directory.ledger import Ledger

SOMEBODY = 54321
CONFIG = """
student: {model: nowhere, backend: {kind: "planted:Backend"}}
teacher: {model: nowhere, backend: {kind: "planted:Backend"}}
policy: {kind: "planted:Policy"}
verifier: {kind: "planted:Verifier"}
evaluation: {verifier: {kind: "planted:Verifier"}}
data: {train: {path: "planted.jsonl"}}
training: {batch_size: 1, iterations: 1}
"""
QUICKSTART = "configs/quickstart.yaml"
# The words of each command that reads a run directory, and whether it continues the run.
READERS = {
    "train": [["--resume", "RUN"], [QUICKSTART, "run.directory=RUN", "--resume", "auto"]],
    "eval": [[QUICKSTART, "run.directory=null", "--resume", "RUN"]],
    "inspect": [["RUN"], ["RUN", "0"], ["RUN", "0", "--html", "PAGE"]],
    "report": [["RUN"], ["RUN", "--html", "PAGE"]],
    "verify-run": [["RUN"]],
    "push": [["RUN", "me/mine", "--dry-run"]],
    "compare": [["RUN", "other=RUN"]],
    "simulate": [[QUICKSTART, "--from", "RUN"]],
    "check": [[QUICKSTART, "--no-servers", "--from", "RUN"]],
}
OTHERS = {"serve", "tune"}  # they read configurations, models and problems
WRITING = {("train", 0), ("train", 1), ("eval", 0), ("push", 0), ("inspect", 1), ("report", 0)}  # these are refused


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return another user's run of one iteration, with a log of its ledger that is not yet part of it."""
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    run = tmp_path / "run"
    make_run(run, [spot_sample()], [metrics_row(1)], {"prompts": {"trained": 1}, "spending": {}})
    (run / "config.yaml").write_text(CONFIG)
    ledger = Ledger.open(run)
    ledger.admit(0, "p0")
    ledger.cut(0, 0, {0: True})
    kept = {path: path.read_bytes() for path in run.glob("ledger.sqlite*")}
    ledger.close()
    for path, data in kept.items():
        path.write_bytes(data)
    directory = manifest.checkpoint_directory(run, 1)
    directory.mkdir(parents=True)
    manifest.commit(directory, manifest.Manifest(step=1, lineages=(0,), keys="", data=""))
    belongs_to_somebody(run, monkeypatch)
    return run


def belongs_to_somebody(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files belong to somebody else: root gives them away, and others look at them as another user."""
    if os.geteuid() == 0:
        for path in (directory, *directory.rglob("*")):
            os.chown(path, SOMEBODY, SOMEBODY, follow_symlinks=False)
    else:
        monkeypatch.setattr(writers.os, "geteuid", lambda: SOMEBODY)


def pictured(directory: Path) -> dict[str, tuple[object, ...]]:
    """Return each file's metadata and content. What reads a file changes neither."""
    found = {}
    for path in (directory, *sorted(directory.rglob("*"))):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        found[str(path)] = (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_uid, content)
    return found


def test_every_command_is_known_to_read_runs_or_not() -> None:
    assert {*typer.main.get_command(app).commands} == READERS.keys() | OTHERS


@pytest.mark.parametrize(
    ("command", "number"), [(command, number) for command, forms in READERS.items() for number in range(len(forms))]
)
def test_a_foreign_run_is_read_but_neither_imported_nor_written(
    command: str, number: int, run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = pictured(run)
    words = [
        word.replace("RUN", str(run)).replace("PAGE", str(tmp_path / "page.html")) for word in READERS[command][number]
    ]
    result = invoke(monkeypatch, command, *words)
    assert pictured(run) == before
    assert "planted" not in sys.modules
    assert not (tmp_path / "imported").exists()
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    if (command, number) in WRITING:
        assert_refused(result, "belongs to another user", str(run), "SPOT_ASYNC_TRUSTED_USERS")
    if command in ("inspect", "report", "verify-run") and (command, number) not in WRITING:
        assert result.exit_code == 0, result.output


def test_whoever_is_trusted_may_have_begun_the_run(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPOT_ASYNC_TRUSTED_USERS", "*")
    monkeypatch.delitem(sys.modules, "planted", raising=False)
    result = invoke(monkeypatch, "train", "--resume", str(run))
    assert (tmp_path / "imported").exists()  # its configuration is run, as that of one's own run
    assert result.exit_code == 2
    monkeypatch.delitem(sys.modules, "planted", raising=False)


@pytest.mark.parametrize("open_to", ["run", "config.yaml", "checkpoints"])
def test_a_run_that_others_may_write_is_not_resumed(
    open_to: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    make_run(run)
    (run / "checkpoints").mkdir()
    (run if open_to == "run" else run / open_to).chmod(0o777)
    assert_refused(invoke(monkeypatch, "train", "--resume", str(run)), "can be written by everybody", "chmod o-w")


def test_a_page_replaces_a_link_and_does_not_go_where_it_leads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, mine = tmp_path / "run", tmp_path / "mine"
    make_run(run, [spot_sample()], [metrics_row(1)])
    mine.write_text("precious")
    for name in ("report.html", "inspect-0.html", ".report.html.new"):
        (run / name).symlink_to(mine)
    assert invoke(monkeypatch, "report", str(run)).exit_code == 0
    assert invoke(monkeypatch, "inspect", str(run), "0").exit_code == 0
    assert mine.read_text() == "precious"
    assert "<title>" in (run / "report.html").read_text()
    assert "<title>" in (run / "inspect-0.html").read_text()


def test_pages_of_samples_do_not_go_where_a_link_leads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, mine = tmp_path / "run", tmp_path / "mine"
    make_run(run, [spot_sample()], [metrics_row(1)])
    mine.mkdir()
    (run / "report-samples").symlink_to(mine)
    assert_refused(invoke(monkeypatch, "report", str(run)), "report-samples: is a link", "--html")
    assert not [*mine.iterdir()]


def test_beside_a_page_that_is_no_plain_file_stand_no_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run, page = tmp_path / "run", tmp_path / "link"
    make_run(run, [spot_sample()], [metrics_row(1)])
    page.symlink_to("/dev/null")
    assert invoke(monkeypatch, "report", str(run), "--html", str(page)).exit_code == 0
    assert_refused(invoke(monkeypatch, "inspect", str(run), "--html", str(page)), "link: is no plain file", "--html")
    assert {each.name for each in tmp_path.iterdir()} == {"run", "link"}


def test_a_ledger_is_read_as_it_stands_also_from_its_log(tmp_path: Path) -> None:
    with closing(Ledger.open(tmp_path)) as ledger:
        ledger.admit(0, "first")
        ledger.cut(0, 0, {0: True})
        written = list(ledger.prompts())
        (tmp_path / "copy").mkdir()
        for path in tmp_path.glob("ledger.sqlite*"):
            (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
    for directory in (tmp_path / "copy", tmp_path):  # with a log, and without
        with Ledger.read_only(directory) as ledger:
            assert list(ledger.prompts()) == written
    assert (tmp_path / "copy/ledger.sqlite-wal").stat().st_size > 0
