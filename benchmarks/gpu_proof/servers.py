"""E7 to E10: real servers, by the commands that a user would type.

On a CPU they are started as `make test-servers` starts them, to try these experiments and not the servers.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Container
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml
from qwen3_models import save_qwen3, save_words, vocabulary_of

from gpu_proof.machine import ROOT
from gpu_proof.place import Place, Rows

TOLERANCE_NATS = 0.3  # of servers in 16 bits
ITERATIONS = 3
SPREAD = 3.0  # of logits
CPU_FRACTION = 0.1  # of this machine's memory, a bound that vLLM looks at


def model_of(place: Place, wanted: str, seed: int = 0) -> Path:
    """Return the directory of a random model with a tokenizer, whose words are numbers of tokens.

    It prefers some tokens to others, as trained ones do: else no check could tell a right reply from a wrong one.
    """
    size = place.size(wanted)
    directory = Path(place.models) / f"{size}-served-{seed}"
    save_qwen3(size, directory, place.device, seed, SPREAD)
    return save_words(directory, vocabulary_of(size))


def launch(
    place: Place,
    kind: str,
    *,
    memory_fraction: float = 0.4,
    devices: str = "0",
    float32_logits: bool = True,
    **keys: Any,
) -> dict[str, Any]:
    """Return a `launch` section. Without `float32_logits` the output layer computes in the model's own type."""
    if place.device == "cpu":
        return {**_on_cpu(place, kind), "memory_fraction": CPU_FRACTION, **keys}
    arguments = [] if float32_logits else ["--hf-overrides", '{"head_dtype": "model"}']
    return {
        "python": {"vllm": place.vllm, "sglang": place.sglang}[kind],
        "devices": devices,
        "dtype": "bfloat16",
        "memory_fraction": memory_fraction,
        **({"arguments": arguments} if arguments else {}),
        **keys,
    }


def conformance(place: Place, kind: str, keys: dict[str, Any]) -> Rows:
    """The contract of backends; a row for each check that did not pass, and one for all."""
    model, report = model_of(place, "0.6b"), Path(place.scratch) / "contract.xml"
    tensor_parallel = keys.get("tensor_parallel_size", 1)
    if place.device == "cpu":
        keys = {}
    section = launch(place, kind, memory_fraction=0.5, devices=",".join(map(str, range(tensor_parallel))), **keys)
    python = section.pop("python")
    settings = [word for key, each in section.items() for word in ("--set", f"launch.{key}={json.dumps(each)}")]
    tolerance = TOLERANCE_NATS if place.device == "cuda" else 5e-5
    options = ["--backend", kind, "--model", str(model), "--launch-python", python, "--tolerance", str(tolerance)]
    options += ["--device", place.device, *settings, f"--junitxml={report}"]
    contract = "spot_async.testing.conformance"
    words = ["-q", "-p", "no:cacheprovider", "-p", f"{contract}.plugin", "--pyargs", contract, *options]
    said = _command(*words, codes=(0, 1), module="pytest")
    tests = list(ElementTree.parse(report).iter("testcase"))
    if not tests:
        raise SystemExit(_reason(said))
    failed = [test for test in tests if test.find("failure") is not None or test.find("error") is not None]
    skipped = [test for test in tests if test.find("skipped") is not None]
    nats = [float(found.attrib["value"]) for test in tests for found in test.iterfind(".//property[@name='nats']")]
    yield {
        "what": "all checks",
        "passed": len(tests) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
        "nats_at_most": max(nats, default=None),
    }
    for test in failed:
        why = next(part for part in test if part.tag in ("failure", "error"))
        yield {"what": test.attrib["name"].removeprefix("test_"), "said": why.attrib["message"][:200]}


def check(place: Place, kind: str, keys: dict[str, Any]) -> Rows:
    """`spot-async check` of two servers on one card."""
    own = {} if place.device == "cpu" else keys
    config = _config(place, "0.6b", kind, {"memory_fraction": 0.3, **own}, {"memory_fraction": 0.3, **own})
    found = json.loads(_command("check", str(config), "--json", codes=(0, 1)))
    warnings, refusals = found.get("warnings", []), found.get("refusals", [])
    yield {"what": "check", "warnings": len(warnings), "refusals": len(refusals)}
    for name, facts in found.get("roles", {}).items():
        yield {
            "what": name,
            **{key: each for key, each in facts.items() if "nats" in key and isinstance(each, int | float)},
        }
    for each in (*refusals, *warnings):
        yield {"what": "said", "said": str(each)[:300]}


def iteration(place: Place, kind: str) -> Rows:
    """Two iterations of SPOT, of which the second counts."""
    tokens, batch = (16, 4) if place.is_tiny else (1024, 32)
    config = _config(
        place, "0.6b", kind, {"memory_fraction": 0.3}, {"memory_fraction": 0.3}, tokens=tokens, batch=batch
    )
    _command("train", str(config), "training.iterations=2", codes=(0,))
    figures = _metrics(place)[-1]
    chosen = ("time/iteration_s", "throughput/generated_tokens_per_s", "time/train_s", "time/update_weights_s",
              "train/mismatch_mean", "train/mismatch_max", "spot/selection_certain", "spot/selection_uncertain",
              "spot/refined_by_student", "spot/refined_by_teacher")  # fmt: skip
    yield {"what": f"{kind}, iteration 2", **{key: figures.get(key) for key in chosen}}


def one_card(place: Place, kind: str) -> Rows:
    """Student, teacher and trainer on one card. After the first iteration the student's server is killed."""
    sleeps = place.device == "cuda"  # servers on a CPU do not start with the flags for it
    config = _config(
        place,
        "1.7b",
        kind,
        {"memory_fraction": 0.35},
        {"memory_fraction": 0.3},
        tokens=16 if place.is_tiny else 512,
        batch=4 if place.is_tiny else 16,
        sleeps=sleeps,
    )
    command = [sys.executable, "-m", "spot_async", "train", str(config), "training.recompute_layers=true"]
    most, killed = 0.0, 0
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            while process.poll() is None:
                time.sleep(0.5)
                most = max(most, _used_gib(place))
                if not killed and len(_metrics(place)) == 1:
                    killed = _kill_server(place, kind, model_of(place, "1.7b"))
        finally:
            process.terminate()
    rows = _metrics(place)
    yield {
        "what": f"{kind}, {ITERATIONS} iterations",
        "exit_code": process.returncode,
        "iterations": len(rows),
        "restarted": killed > 0 and len(rows) == ITERATIONS,
        "card_used_gib": most or None,
        "iteration_s": rows[-1].get("time/iteration_s") if rows else None,
    }


def _run(place: Place) -> Path:
    return Path(place.scratch) / "train"


def _config(
    place: Place,
    size: str,
    kind: str,
    student: dict[str, Any],
    teacher: dict[str, Any],
    *,
    tokens: int = 64,
    batch: int = 4,
    sleeps: bool = False,
) -> Path:
    directory = place.with_models()
    problems = directory / "problems.jsonl"
    lines = [{"problem": f"w{number} w{number + 1}", "answer": f"w{number + 2}"} for number in range(8 * batch)]
    problems.write_text("".join(json.dumps(line) + "\n" for line in lines))
    on_cuda = place.device == "cuda"
    model, teachers = model_of(place, size), model_of(place, size, seed=1)
    tree = {
        "student": {
            "model": str(model),
            "backend": {
                "kind": kind,
                "launch": launch(place, kind, **student),
                **({"sleep_while_training": True} if sleeps else {}),
            },
        },
        "teacher": {"model": str(teachers), "backend": {"kind": kind, "launch": launch(place, kind, **teacher)}},
        "data": {"train": str(problems)},
        "prompt": {"instruction": ""},
        "sampling": {"max_prompt_tokens": 64, "max_response_tokens": tokens},
        "policy": {"kind": "spot", "score_top_k": 16, "probe_top_k": 2},
        "verifier": "boxed_match",
        "training": {
            "iterations": ITERATIONS,
            "batch_size": batch,
            "mini_batch_size": batch,
            "learning_rate": 1e-6,
            "dtype": "bfloat16" if on_cuda else "float32",
            "behavior": "recomputed",
            "device": place.device,
        },
        "run": {"directory": str(_run(place))},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def _command(*words: str, codes: Container[int], module: str = "spot_async") -> str:
    """Run a command; return what it printed. Raises `SystemExit` with its error at another exit code."""
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    sys.stderr.write(done.stderr + done.stdout)
    if done.returncode not in codes:
        raise SystemExit(f"{module} {words[0]}: exit code {done.returncode}: {_reason(done.stderr)}")
    return done.stdout or done.stderr


def _reason(said: str) -> str:
    """Return the line in which a command says why it failed, or the last one."""
    lines = [line for line in said.splitlines() if line.strip()]
    return next((line for line in lines if "error: " in line), lines[-1] if lines else "it said nothing")


def _metrics(place: Place) -> list[dict[str, Any]]:
    path = _run(place) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _kill_server(place: Place, kind: str, model: Path) -> int:
    """Kill the server of a model, but not our guard, which waits for it. Return how many processes that were."""
    python, killed = {"vllm": place.vllm, "sglang": place.sglang}[kind], 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_text().split("\0")
            except OSError:
                continue  # it has ended
            if words[0] == python and str(model) in words:
                os.kill(int(entry.name), signal.SIGKILL)
                killed += 1
    return killed


def _used_gib(place: Place) -> float:
    """Return how much of the first card is in use, as `nvidia-smi` says it; 0 on a CPU."""
    if place.device == "cpu":
        return 0.0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) / 1024


def _on_cpu(place: Place, kind: str) -> dict[str, Any]:
    """Return the `launch` section of tests/servers for a CPU."""
    tests = ROOT / "tests" / "servers"
    sys.path.insert(0, str(tests))
    try:
        given = importlib.import_module("conftest")
    finally:
        sys.path.remove(str(tests))
    if kind == "vllm":
        return {
            "python": place.vllm,
            "dtype": "float32",
            "arguments": given.VLLM_ARGUMENTS,
            "environment": given.VLLM_ENVIRONMENT,
        }
    wrapper = given.sglang_wrapper(place.sglang, place.with_models())
    return {
        "python": str(wrapper),
        "dtype": "float32",
        "arguments": given.SGLANG_ARGUMENTS,
        "environment": given.SGLANG_ENVIRONMENT,
    }
