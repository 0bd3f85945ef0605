"""Runs the parts of experiments one after another, each in a process of its own with a deadline, and keeps the results.

A part that crashes, runs out of memory or takes too long is a row of the page, and the next part runs. After each part
the page and the JSON are whole, so whatever ends this process loses at most the part that was running. A finished part
is not run again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gpu_proof.experiments import EXPERIMENTS, ORDER, Part
from gpu_proof.machine import Machine
from gpu_proof.page import page
from gpu_proof.place import Place, Result

BENCHMARKS = Path(__file__).parents[1]
RESULTS, PAGE = "gpu-proof.json", "gpu-proof.md"
GRACE_S = 10.0  # from SIGTERM to SIGKILL
SHORTEST_S = 20.0  # no part begins with less time left: torch alone takes seconds to start


class Stopped(BaseException):
    """SIGINT or SIGTERM came."""

    def __init__(self, number: int) -> None:
        self.number = number


class Results:
    """All results, by the names of parts, in one file."""

    def __init__(self, directory: Path) -> None:
        """Read what is there. Raises `SystemExit` for a file that is no such one."""
        self._path, self._page = directory / RESULTS, directory / PAGE
        directory.mkdir(parents=True, exist_ok=True)
        self.of: dict[str, Result] = {}
        if self._path.exists():
            try:
                said = json.loads(self._path.read_text())
                self.of = {name: Result(**each) for name, each in said["parts"].items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                raise SystemExit(f"{self._path} is not a file of results: move it away, or give another OUT") from None

    def write(self, machine: Machine) -> None:
        parts = {name: dataclasses.asdict(each) for name, each in self.of.items()}
        text = json.dumps({"machine": dataclasses.asdict(machine), "parts": parts}, indent=1) + "\n"
        for path, words in ((self._path, text), (self._page, page(self.of, machine))):
            partial = path.with_suffix(".partial")
            partial.write_text(words)
            partial.replace(path)


def lacks(part: Part, machine: Machine, place: Place) -> str:
    """Return why a part cannot run here, or ""."""
    cards = len(machine.cards) if place.device == "cuda" else 2  # a CPU is as many devices as are asked for
    missing = {
        "card": "no CUDA device" if cards == 0 else "",
        "two cards": "no CUDA device" if cards == 0 else "one CUDA device, needs two" if cards == 1 else "",
        "vllm": _lacks_server("vLLM", "VLLM_PYTHON", place.vllm),
        "sglang": _lacks_server("SGLang", "SGLANG_PYTHON", place.sglang),
        "two nodes": "" if place.node else "one node: NODE names no second one (such as NODE='ssh node2')",
        "address": "" if place.address else "ADDRESS does not say where node 1 reaches this machine",
    }
    return "; ".join(words for need in part.needs if (words := missing[need]))


def _lacks_server(name: str, key: str, python: str) -> str:
    if not python:
        return f"no {name} interpreter: {key} is not set"
    return "" if Path(python).exists() else f"no {name} interpreter at {key}={python}"


def is_done(result: Result | None, machine: Machine, place: Place) -> bool:
    """Whether a result is of this device and these sizes. A card of another name is another device."""
    if result is None or result.state != "done":
        return False
    is_alike = (result.device, result.shape) == (place.device, place.shape)
    return is_alike and result.machine.get("cards", [])[:1] == list(machine.cards[:1])


def start_part(part: Part, place: Place, rows: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start a part in a session of its own, which a terminal's Ctrl-C does not reach."""
    command = [sys.executable, "-m", "gpu_proof.part", part.name, json.dumps(place._asdict()), str(rows)]
    path = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("wb") as file:
        return subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path}, stdout=file, stderr=file, start_new_session=True
        )


Start = Callable[[Part, Place, Path, Path], "subprocess.Popen[bytes]"]


class Runner:
    def __init__(
        self,
        out: Path,
        machine: Machine,
        place: Place,
        *,
        say: Callable[[str], None],
        start: Start = start_part,
        patience: float = 1.0,
        minutes: float | None = None,
        again: bool = False,
        only: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`minutes` is the time for all parts. `patience` multiplies each part's own time."""
        self._out, self._machine, self._place, self._say, self._start = out, machine, place, say, start
        self._patience, self._again, self._only, self._clock = patience, again, only, clock
        self._end = None if minutes is None else clock() + 60.0 * minutes
        self.results = Results(out)

    def run(self) -> int:
        """Run all parts that can run and are not done; return the exit code: 1 if one of them failed."""
        self._say(self._machine.words)
        try:
            with _signals_as_stops():
                for key in ORDER:
                    for part in EXPERIMENTS[key].parts:
                        self._one(part)
                        self.results.write(self._machine)
        except Stopped as stopped:
            self.results.write(self._machine)
            self._say(f"stopped by {signal.Signals(stopped.number).name}: the same command continues")
            return 128 + stopped.number
        finally:
            shutil.rmtree(self._out / "scratch", ignore_errors=True)
        return int(any(each.state in ("failed", "cut short") for each in self.results.of.values()))

    def _one(self, part: Part) -> None:
        before = self.results.of.get(part.name)
        if not self._again and is_done(before, self._machine, self._place):
            self._say(f"{part.name}: already done ({before.date if before else ''}); AGAIN=1 repeats it")
            return
        reason = lacks(part, self._machine, self._place)
        if self._only and part.name.partition(" ")[0] not in self._only:
            reason = "not asked for (ONLY)"
        if not reason and self._left_s() < SHORTEST_S:
            reason = "the time was up (GPU_PROOF_MINUTES): the same command continues"
        if reason:
            # What was found before, on this machine or another, is worth more than that it was not looked for again.
            if before is None or before.state == "skipped":
                self.results.of[part.name] = Result("skipped", reason)
            self._say(f"{part.name}: skipped: {reason}")
            return
        self.results.of[part.name] = self._measured(part)

    def _left_s(self) -> float:
        return float("inf") if self._end is None else self._end - self._clock()

    def _measured(self, part: Part) -> Result:
        scratch, logs = self._out / "scratch", self._out / "logs"
        shutil.rmtree(scratch, ignore_errors=True)
        for each in (scratch, logs):
            each.mkdir(parents=True, exist_ok=True)
        rows, log = scratch / "rows.jsonl", logs / f"{part.name.replace(' ', '-').replace('/', '-')}.log"
        place = self._place._replace(scratch=str(scratch / "run"))
        own_s, left_s = part.deadline_s * self._patience, self._left_s()
        self._say(f"{part.name}: {part.what} (at most {min(own_s, left_s):.0f} s)")
        result = Result(
            "stopped",
            "stopped by a signal",
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
            device=place.device,
            shape=place.shape,
            machine=dataclasses.asdict(self._machine),
        )
        self.results.of[part.name] = result  # what there is of it if a signal ends it
        started = self._clock()
        process = self._start(part, place, rows, log)
        try:
            code = process.wait(timeout=min(own_s, left_s))
            result.state, result.reason = ("done", "") if code == 0 else ("failed", f"{_end_of(code)}: {_said(log)}")
        except subprocess.TimeoutExpired:
            is_own = own_s <= left_s
            result.state = "cut short" if is_own else "stopped"
            result.reason = (
                f"not ready after {own_s:.0f} s: PATIENCE=2 gives it twice as long"
                if is_own
                else "the time was up (GPU_PROOF_MINUTES): the same command continues"
            )
        finally:
            _end_all(process)
            result.rows = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
            result.seconds = round(self._clock() - started, 1)
        self._say(f"  {result.state} after {result.seconds:.0f} s{': ' * bool(result.reason)}{result.reason}")
        for row in result.rows:
            figures = (
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
            )
            self._say("  " + ", ".join(figures))
        return result


def _said(log: Path) -> str:
    """Return the last line that a part's process wrote."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return f"{lines[-1].strip()[:300]} ({log})" if lines else f"it said nothing ({log})"


def _end_of(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """End a part's process, and what it started in its session."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def _signals_as_stops() -> Iterator[None]:
    """Raise `Stopped` at the first SIGINT or SIGTERM. Those that follow are ignored while things are put in order."""
    both = (signal.SIGINT, signal.SIGTERM)

    def stop(number: int, frame: object) -> None:
        for each in both:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    before = [signal.signal(each, stop) for each in both]
    try:
        yield
    finally:
        for each, handler in zip(both, before, strict=True):
            signal.signal(each, handler)
