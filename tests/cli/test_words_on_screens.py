"""What commands say fits screens of 80 columns, and says nothing twice."""

from __future__ import annotations

import io
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from spot_async.checks.diagnosis import Diagnosis
from spot_async.cli import app
from spot_async.replicas.life_cycle import State
from spot_async.replicas.replica import ReplicaStatus
from spot_async.telemetry.live_bottleneck import replica_lines
from spot_async.tools.check.servers import show_servers
from spot_async.types import Traffic


@pytest.mark.parametrize("command", ["train", "check", "tune"])
def test_paragraphs_of_help_fill_the_lines_that_a_screen_has(command):
    lines = CliRunner().invoke(app, [command, "--help"], terminal_width=80).output.splitlines()
    end = next(number for number, line in enumerate(lines) if line.startswith("╭"))
    prose = [line.strip() for line in lines[1:end]]
    for line, following in itertools.pairwise(prose):
        if line and following:  # of one paragraph: its next word would not have fitted
            assert len(line) + 1 + len(following.split()[0]) > 76, line


class Pool:
    def __init__(self, *replicas: ReplicaStatus) -> None:
        self.replicas = replicas


def test_a_line_on_a_replica_says_its_role_once_and_restarts_where_there_were_some():
    def replica(name: str, restarts: int) -> ReplicaStatus:
        return ReplicaStatus(name, State.SERVING, 3, 512, 0, restarts, None, Traffic())

    pools = {"student": Pool(replica("student", 0)), "teacher": Pool(replica("teacher-1", 2))}
    assert replica_lines(pools) == [
        "student: serving, 3 of 512 in flight",
        "teacher-1: serving, 3 of 512 in flight, restarted 2 x",
    ]


def test_check_shows_the_whole_path_of_a_model_on_a_narrow_screen(monkeypatch):
    monkeypatch.setattr("spot_async.tools.check.servers.ROWS", (("model", lambda facts: facts.model),))
    models = {role: f"examples/running_sum_with_a_long_name/of-this-{role}" for role in ("student", "teacher")}
    roles: Any = {role: SimpleNamespace(role=role, model=model) for role, model in models.items()}
    out = io.StringIO()
    show_servers(Console(file=out, width=80), Diagnosis({}, roles, [], []))
    lines = [line for line in out.getvalue().splitlines() if "─" not in line]
    columns = "".join(line[9:42].strip() for line in lines), "".join(line[42:].strip() for line in lines)
    assert "…" not in out.getvalue()
    assert all(model in "".join(columns) for model in models.values()), out.getvalue()
