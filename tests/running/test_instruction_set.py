"""The instruction set that torch, MKL and oneDNN are told to use is the one of every process that computes."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from command import Command, train

ASKED = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"}
SAID = {
    "student": r"^serving \S+ with (\w+) on ",
    "teacher": r"^serving \S+ with (\w+) on ",
    "trainer": r"^rank 0 computes on the CPU \((\w+),",
}
START_TIMEOUT_S = 300


def said(run: Path) -> dict[str, list[str]]:
    logs = {name: run / "logs" / f"{name}.log" for name in SAID}
    return {name: re.findall(SAID[name], log.read_text(), re.M) if log.exists() else [] for name, log in logs.items()}


def wait_until_all_compute(run: Path, command: Command) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while not all(said(run).values()):
        assert command.process.poll() is None, command.process.communicate()
        assert time.monotonic() < end, said(run)
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_servers_and_ranks_compute_with_the_instruction_set_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ASKED.items():
        monkeypatch.setenv(name, value)
    command = train(tmp_path / "run")
    try:
        wait_until_all_compute(tmp_path / "run", command)
        environments = {
            line: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid, line in command.processes().items()
        }
    finally:
        command.process.terminate()
        command.finish()
    assert said(tmp_path / "run") == {name: ["DEFAULT"] for name in SAID}
    assert len(environments) >= len(SAID)
    for line, environment in environments.items():
        assert {f"{name}={value}".encode() for name, value in ASKED.items()} <= set(environment), line
