"""`make gpu-proof`: all twelve experiments are named, a stop loses nothing, and the kit is small and whole."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
TWELVE = {f"E{number}" for number in range(1, 13)}


class Proof(NamedTuple):
    running: Any
    experiments: Any
    place: Any
    card: Any  # a machine with one
    bare: Any  # one without


@pytest.fixture(scope="module")
def proof() -> Iterator[Proof]:
    sys.path.insert(0, str(BENCHMARKS))
    from gpu_proof import experiments, machine, place, running

    card = machine.Machine(
        cards=("NVIDIA H100",), memory_gib=80.0, torch="2.13", cuda="13.0", driver="580", commit="c0"
    )
    yield Proof(running, experiments, place.Place("cuda", "full", "models", "scratch"), card, machine.Machine())
    sys.path.remove(str(BENCHMARKS))


class Parts:
    """Stands in for the processes of parts: each runs `code`, or `codes[its name]`, and is counted."""

    def __init__(self, codes: dict[str, str] | None = None) -> None:
        self.started: list[str] = []
        self._codes = codes or {}

    def __call__(self, part: Any, place: Any, rows: Path, log: Path) -> subprocess.Popen[bytes]:
        self.started.append(part.name)
        code = self._codes.get(part.name, "row(what='x', seconds=1.5)")
        head = (
            f"import json, os, signal, sys, time\ndef row(**r): print(json.dumps(r), file=open({str(rows)!r}, 'a'))\n"
        )
        with log.open("wb") as file:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", head + code], stdout=file, stderr=file, start_new_session=True
            )


@pytest.fixture
def run(proof: Proof, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """`run(parts, machine, **options)`: its exit code, the results, and the page."""

    def make(parts: Parts, machine: Any, **options: Any) -> tuple[int, dict[str, Any], str]:
        runner = proof.running.Runner(tmp_path, machine, proof.place, say=lambda line: None, start=parts, **options)
        code = runner.run()
        results = json.loads((tmp_path / "gpu-proof.json").read_text())["parts"]
        return code, results, (tmp_path / "gpu-proof.md").read_text()

    return make


def test_without_a_card_all_twelve_are_named_each_with_its_reason(proof, run):
    parts = Parts()
    code, results, page = run(parts, proof.bare)
    assert (code, parts.started) == (0, [])
    assert {name.partition(" ")[0] for name in results} == TWELVE
    assert all(each["state"] == "skipped" and "no CUDA device" in each["reason"] for each in results.values())
    for key in TWELVE:
        assert re.search(rf"^\| \[{key}\]\(#\S+\) \| .* skipped \(.*no CUDA device.*\) \|$", page, flags=re.M), key
        assert re.search(rf"^## {key} ", page, flags=re.M)


def test_with_one_card_and_no_servers_the_reasons_name_what_is_missing(proof, run):
    code, results, _ = run(Parts(), proof.card)
    assert code == 0
    assert {name.partition(" ")[0] for name, each in results.items() if each["state"] == "done"} == {
        f"E{number}" for number in range(1, 7)
    }
    assert results["E7 vLLM"]["reason"] == "no vLLM interpreter: VLLM_PYTHON is not set"
    assert results["E12 killed"]["reason"] == "one CUDA device, needs two"
    assert "NODE names no second one" in results["E12 two nodes"]["reason"]
    found = results["E5 blocks"]
    assert found["rows"] == [{"what": "x", "seconds": 1.5}]
    assert found["date"]
    assert {key: found["machine"][key] for key in ("cards", "driver", "torch", "cuda", "commit")} == {
        "cards": ["NVIDIA H100"], "driver": "580", "torch": "2.13", "cuda": "13.0", "commit": "c0",
    }  # fmt: skip


@pytest.mark.long
def test_what_is_done_is_not_repeated_unless_again_or_on_another_card(proof, run):
    run(first := Parts(), proof.card)
    assert run(second := Parts(), proof.card)[0] == 0
    assert second.started == []
    run(again := Parts(), proof.card, again=True)
    assert again.started == first.started
    run(another := Parts(), proof.running.Machine(cards=("NVIDIA H200",)))
    assert another.started == first.started
    # A machine without a card keeps what was found on one.
    _, results, _ = run(Parts(), proof.bare)
    assert results["E5 blocks"]["state"] == "done"


def test_a_part_that_fails_crashes_or_hangs_is_a_row_and_the_next_one_runs(proof, run):
    codes = {
        "E5 exactness": "row(what='half'); sys.exit('no such kernel')",
        "E5 blocks": "os.kill(os.getpid(), signal.SIGKILL)",
    }
    code, results, page = run(parts := Parts(codes), proof.card)
    assert code == 1
    assert results["E5 exactness"]["state"] == "failed"
    assert "exit code 1: no such kernel" in results["E5 exactness"]["reason"]
    assert results["E5 exactness"]["rows"] == [{"what": "half"}]
    assert "killed by SIGKILL" in results["E5 blocks"]["reason"]
    assert results["E5 packings"]["state"] == "done"
    assert "no such kernel" in page
    run(repeated := Parts(), proof.card)
    assert repeated.started == ["E5 exactness", "E5 blocks"]
    hangs = Parts({"E3 kept": "time.sleep(600)"})
    _, results, _ = run(hangs, proof.card, patience=1e-4, again=True, only=["E3"])
    assert results["E3 kept"]["state"] == "cut short"
    assert "PATIENCE" in results["E3 kept"]["reason"]
    assert len(parts.started) == 18


def test_a_signal_ends_the_part_that_runs_and_leaves_page_and_results(proof, run):
    codes = {"E5 blocks": "os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"}
    code, results, page = run(parts := Parts(codes), proof.card)
    assert code == 128 + signal.SIGTERM
    assert parts.started == ["E5 exactness", "E5 blocks"]
    assert results["E5 exactness"]["state"] == "done"
    assert results["E5 blocks"]["state"] == "stopped"
    assert "1 done, 1 stopped, 1 not yet" in page
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    run(rest := Parts(), proof.card)
    assert rest.started[:2] == ["E5 blocks", "E5 packings"]


def test_no_part_begins_when_the_time_is_up(proof, run):
    clock = iter(range(0, 100_000, 50))
    code, results, _ = run(parts := Parts(), proof.card, minutes=10, clock=lambda: next(clock))
    assert code == 0
    assert 0 < len(parts.started) < 18
    late = [each["reason"] for each in results.values() if each["state"] == "skipped"]
    assert sum("GPU_PROOF_MINUTES" in each for each in late) == 18 - len(parts.started)


def test_a_file_that_holds_no_results_is_refused_in_one_line(proof, run, tmp_path):
    (tmp_path / "gpu-proof.json").write_text("[]")
    with pytest.raises(SystemExit, match="is not a file of results"):
        run(Parts(), proof.card)


def test_one_card_takes_fourteen_minutes_at_most_and_each_experiment_ten(proof):
    of = {key: sum(part.deadline_s for part in each.parts) for key, each in proof.experiments.EXPERIMENTS.items()}
    assert set(of) == set(proof.experiments.ORDER) == TWELVE
    assert max(of.values()) <= 600
    assert sum(of[f"E{number}"] for number in range(1, 7)) <= proof.experiments.ONE_CARD_S == 840


def test_the_function_of_each_part_is_there_and_takes_its_arguments(proof):
    for part in proof.experiments.PARTS.values():
        module, _, name = part.function.partition(":")
        tree = ast.parse((BENCHMARKS / "gpu_proof" / f"{module}.py").read_text())
        [function] = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name]
        assert len(function.args.args) == 1 + len(part.arguments), part.name


def test_expectations_are_judged_by_figures_of_a_card_alone(proof, run):
    codes = {"E3 given back": "row(what='gradients given back, update 2', kept_gib=3.0)"}
    _, _, page = run(Parts(codes), proof.card)
    assert re.search(r"^\| reserved - allocated < 1 GiB .* \| \*\*no\*\* \|$", page, flags=re.M)


@pytest.fixture(scope="module")
def kit(proof: Proof) -> Any:
    from gpu_proof import kit

    return kit


def test_the_kit_has_all_that_its_packages_need_but_what_comes_with_torch(kit):
    there = {canonicalize_name(each) for each in (*kit.PACKAGES, *kit.TORCH_AND_MORE)}
    wanted = [*kit.requirements(), *kit.FOR_TESTS]
    for name in [Requirement(each).name for each in wanted] + list(kit.PACKAGES):
        assert canonicalize_name(name) in there, name
        if name in kit.TORCH_AND_MORE:
            continue
        for need in map(Requirement, importlib.metadata.requires(name) or ()):
            if need.marker is None or need.marker.evaluate({"extra": "", "python_version": "3.12"}):
                assert canonicalize_name(need.name) in there, f"{name} needs {need.name}"
    pins = kit.pinned((ROOT / "constraints.txt").read_text())
    assert len(pins) == len(set(kit.PACKAGES))


def test_a_kit_that_is_too_large_or_no_kit_is_refused(kit, tmp_path, monkeypatch):
    def download(command: list[str], check: bool) -> None:
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        with (folder / "large-1.whl").open("wb") as file:
            file.truncate(kit.MOST_BYTES + 1)

    monkeypatch.setattr(kit.subprocess, "run", download)
    with pytest.raises(SystemExit, match="and a kit may have 60"):
        kit.collect(tmp_path / "kit", "3.12")
    with pytest.raises(SystemExit, match="has no wheels"):
        kit.install(tmp_path, tmp_path / "environment")
    (tmp_path / "kit" / "mine.txt").write_text("")
    with pytest.raises(SystemExit, match="holds more than wheels"):
        kit.collect(tmp_path / "kit", "3.12")
    assert (tmp_path / "kit" / "mine.txt").exists()
