"""E7 to E10: real servers, by the commands that a user would type.

On a CPU they are started as `make test-servers` starts them, to try these experiments and not the servers.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import yaml
from qwen3_models import save_qwen3, save_words, vocabulary_of

from gpu_proof.machine import ROOT
from gpu_proof.place import Place, Rows

TOLERANCE_NATS = 0.3  # of servers in 16 bits
ITERATIONS = 3


def model_of(place: Place, wanted: str) -> Path:
    """Return the directory of a random model with a tokenizer, whose words are numbers of tokens."""
    size = place.size(wanted)
    directory = Path(place.models) / size
    save_qwen3(size, directory, place.device)
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
        return {**_on_cpu(place, kind), **keys}
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
    """`spot-async conformance`; a row for each check that did not pass, and one for all."""
    model = model_of(place, "0.6b")
    tensor_parallel = keys.get("tensor_parallel_size", 1)
    if place.device == "cpu":
        keys = {}
    section = launch(place, kind, memory_fraction=0.5, devices=",".join(map(str, range(tensor_parallel))), **keys)
    python = section.pop("python")
    settings = [f"launch.{key}={json.dumps(each)}" for key, each in section.items()]
    tolerance = TOLERANCE_NATS if place.device == "cuda" else 5e-5
    options = ["--backend", kind, "--model", str(model), "--launch-python", python, "--tolerance", str(tolerance)]
    said = _command("conformance", *options, "--device", place.device, *settings, codes=(0, 1))
    checks = re.findall(r"^ ?(\w+) +(passed|failed|not offered|not checked)\b *(.*)$", said, flags=re.M)
    nats = [float(each) for each in re.findall(r"([\d.]+(?:e-?\d+)?) nats", said)]
    counts = {
        state: sum(found == state for _, found, _ in checks)
        for state in ("passed", "failed", "not offered", "not checked")
    }
    yield {"what": "all checks", **{state.replace(" ", "_"): count for state, count in counts.items()},
           "nats_at_most": max(nats, default=None)}  # fmt: skip
    for name, state, note in checks:
        if state in ("failed", "not checked"):
            yield {"what": name, "state": state, "said": note[:200]}


def doctor(place: Place, kind: str, keys: dict[str, Any]) -> Rows:
    """`spot-async doctor` of two servers on one card."""
    model = model_of(place, "0.6b")
    own = {} if place.device == "cpu" else keys
    config = _config(place, model, kind, {"memory_fraction": 0.3, **own}, {"memory_fraction": 0.3, **own})
    found = json.loads(_command("doctor", str(config), "--json", codes=(0, 1)))
    warnings, refusals = found.get("warnings", []), found.get("refusals", [])
    yield {"what": "doctor", "warnings": len(warnings), "refusals": len(refusals)}
    for name, facts in found.get("roles", {}).items():
        yield {
            "what": name,
            **{key: each for key, each in facts.items() if "nats" in key and isinstance(each, int | float)},
        }
    for each in (*refusals, *warnings):
        yield {"what": "said", "said": str(each)[:300]}


def iteration(place: Place, kind: str) -> Rows:
    """Two iterations of SPOT, of which the second counts."""
    model = model_of(place, "0.6b")
    tokens, batch = (16, 4) if place.is_tiny else (1024, 32)
    config = _config(place, model, kind, {"memory_fraction": 0.3}, {"memory_fraction": 0.3}, tokens=tokens, batch=batch)
    code = _command("train", str(config), "training.iterations=2", codes=range(256), tells_code=True)
    rows = _metrics(place)
    figures = rows[-1] if rows else {}
    chosen = ("time/iteration_s", "throughput/generated_tokens_per_s", "time/train_s", "time/update_weights_s",
              "train/mismatch_mean", "train/mismatch_max", "spot/selection_certain", "spot/selection_uncertain",
              "spot/refined_by_student", "spot/refined_by_teacher")  # fmt: skip
    yield {"what": f"{kind}, iteration 2", "exit_code": code, **{key: figures.get(key) for key in chosen}}


def one_card(place: Place, kind: str) -> Rows:
    """Student, teacher and trainer on one card. After the first iteration the student's server is killed."""
    model = model_of(place, "1.7b")
    sleeps = place.device == "cuda"  # servers on a CPU do not start with the flags for it
    config = _config(
        place,
        model,
        kind,
        {"memory_fraction": 0.35},
        {"memory_fraction": 0.3},
        tokens=16 if place.is_tiny else 512,
        batch=4 if place.is_tiny else 16,
        sleeps=sleeps,
    )
    command = [sys.executable, "-m", "spot_async", "train", str(config), f"training.iterations={ITERATIONS}"]
    most, over = [0.0], threading.Event()
    watching = threading.Thread(target=_watch_memory, args=(most, over), daemon=True)
    with subprocess.Popen([*command, "training.recompute_layers=true"], cwd=ROOT) as process:
        watching.start()
        killed_at = None
        try:
            while process.poll() is None:
                time.sleep(0.5)
                if killed_at is None and len(_metrics(place)) == 1:
                    killed_at = _kill_server(model, "student", place)
        finally:
            over.set()
            process.terminate()
    rows = _metrics(place)
    events = (place_run(place) / "events.jsonl").read_text() if (place_run(place) / "events.jsonl").exists() else ""
    yield {
        "what": f"{kind}, {ITERATIONS} iterations",
        "exit_code": process.returncode,
        "iterations": len(rows),
        "killed": killed_at is not None,
        "restarted": killed_at is not None and len(rows) == ITERATIONS,
        "card_used_gib": most[0] or None,
        "events": events.count("\n"),
        "iteration_s": rows[-1].get("time/iteration_s") if rows else None,
    }


def place_run(place: Place) -> Path:
    return Path(place.scratch) / "train"


def _config(
    place: Place,
    model: Path,
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
    tree = {
        "student": {
            "model": str(model),
            "backend": {
                "kind": kind,
                "launch": launch(place, kind, **student),
                **({"sleep_while_training": True} if sleeps else {}),
            },
        },
        "teacher": {"model": str(model), "backend": {"kind": kind, "launch": launch(place, kind, **teacher)}},
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
        "run": {"directory": str(place_run(place))},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def _command(*words: str, codes: Any, tells_code: bool = False) -> Any:
    """Run a command of ours; return what it printed, or its exit code. Fails with its last line at another code."""
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "spot_async", *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    sys.stdout.write(done.stdout)
    sys.stdout.flush()
    if done.returncode not in codes:
        raise SystemExit(f"spot-async {words[0]}: exit code {done.returncode}")
    return done.returncode if tells_code else done.stdout


def _metrics(place: Place) -> list[dict[str, Any]]:
    path = place_run(place) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _kill_server(model: Path, role: str, place: Place) -> float:
    """Kill a server of a role: the processes whose log is the role's."""
    log = str(place_run(place) / "logs" / f"{role}.log")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                is_its = str((entry / "fd" / "1").readlink()) == log and str(model) in (entry / "cmdline").read_text()
            except OSError:
                continue  # it ended, or belongs to another user
            if is_its:
                os.kill(int(entry.name), signal.SIGKILL)
    return time.time()


def _watch_memory(most: list[float], over: threading.Event) -> None:
    """Note the most memory of the first card that is in use, as `nvidia-smi` says it."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    while not over.wait(1.0):
        try:
            said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return
        most[0] = max(most[0], float(said.split()[0]) / 1024)


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
