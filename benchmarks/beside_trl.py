"""Measures an iteration of `spot-async train` beside TRL's own trainers, by turns on one machine.

    python benchmarks/beside_trl.py --trl-python /tmp/trl-env/bin/python
    python benchmarks/beside_trl.py --trl-python PYTHON --python before=OTHER/.venv/bin/python after=.venv/bin/python

The second measures two checkouts of spot-async in the same rounds. Without `--trl-python`, TRL is left out. These make
its environment (where pip finds no CPU build of torch, add `--index-url https://download.pytorch.org/whl/cpu` to the
second; otherwise gigabytes of CUDA come with it):

    python3 -m venv /tmp/trl-env
    /tmp/trl-env/bin/pip install -c constraints.txt torch==2.13.0
    /tmp/trl-env/bin/pip install -c constraints.txt trl==1.16.0

Student, teacher, problems, lengths, sampling and optimiser are the quickstart's for both, in float32. An iteration has
64 prompts: 64 responses in OPD and SPOT, 128 in GRPO (`--samples 2`). `spot-async train` runs as it is shipped, but for
evaluations, with `max_staleness: 1` and four updates an iteration. TRL makes one, and saves nothing. Each process of
ours has one thread. TRL has one or two, whichever is faster in a trial before the first round.

TRL 1.16 has four trainers for on-policy distillation. `DistillationTrainer` with its default, `beta=1`, is nearest to
OPD: the student writes all responses, the teacher is local, the loss is the reverse KL. It compares whole rows, where
OPD has the sampled tokens alone; both have the same gradient in expectation. `GKDTrainer` can do the same and then
advises the other. `GOLDTrainer` is for teachers with another tokenizer. `ServerDistillationTrainer` compares sampled
tokens, but its teacher is a vLLM server.

A turn's figure is the mean over its iterations in steady state: the first ones do not count, nor do our last two, in
which no more responses are asked for. The tables have medians over the rounds, with the extremes. Wall times need two
idle cores.

"Learned" is the KL to the teacher in nats (OPD) or the share of right responses, over the first and the last three
iterations of all turns. Training that is the same starts at the same value and moves the same way. TRL makes a fourth
of the updates: `--iterations 30 --trl-iterations 120` compares what is learned.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from report import show, spread
from toy_runs import SPOT_KEYS

ROOT = Path(__file__).parents[1]
TOY = ROOT / "examples" / "running_sum"
PROMPTS, UPDATES = 64, 4
WARM_UP, TRL_WARM_UP = 3, 2  # iterations that do not count
TAIL = 2
ENDS = 3  # iterations at each end of a turn
TRIAL_ITERATIONS = 4
GOAL, GOAL_S = 2.5, 0.55  # times as fast as TRL; seconds of SPOT's iteration, which TRL does not have
ROLES = ("orchestrator", "student", "teacher or reference", "trainer")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Way(NamedTuple):
    """A method, and how it is trained."""

    method: str
    keys: dict[str, object]
    iterations: int
    trl_iterations: int
    learned: str  # a metric


OPD = Way("opd", {"max_staleness": 1, "student.serving.own_cores": 0}, 20, 10, "train/kl_to_teacher")
WAYS = {
    "opd": OPD,
    "strict": OPD._replace(keys={"max_staleness": 0}),
    "grpo": Way("grpo", {"max_staleness": 1}, 12, 7, "rollout/accuracy"),
    "spot": Way("spot", {"max_staleness": 1}, 10, 0, "rollout/accuracy"),
}


class Checkout(NamedTuple):
    name: str
    python: str
    root: Path


class Turn(NamedTuple):
    """One side's training; means over the iterations that count."""

    iteration_s: float
    cpu_s: dict[str, float]  # an iteration, by role
    tokens: float  # of a response
    learned: list[float]  # by iteration, all of them


def cpu_seconds(pid: int) -> dict[str, float]:
    """Return the CPU seconds of a run's processes by role, after which the log is named that a child writes to."""
    used: dict[str, float] = defaultdict(float)
    pids = [pid]
    while pids:
        process = Path("/proc") / str(pids.pop())
        role = "orchestrator" if process.name == str(pid) else (process / "fd" / "1").readlink().stem
        role = "teacher or reference" if role in ("teacher", "reference") else role
        user, system = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
        used[role] += (int(user) + int(system)) / TICKS_PER_S
        for thread in (process / "task").iterdir():
            pids += map(int, (thread / "children").read_text().split())
    return used


def iterations_of(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def trained(checkout: Checkout, way: Way, given: argparse.Namespace, seed: int) -> Turn:
    iterations = given.iterations or way.iterations
    keys = {
        "run.seed": seed,
        "evaluation": "null",
        "training.iterations": iterations,
        "training.batch_size": PROMPTS,
        "training.mini_batch_size": PROMPTS // UPDATES,
        "training.schedule": "constant",  # with a cosine, what is learned would depend on the number of iterations
        **way.keys,
        **({"policy.samples": given.samples} if way.method == "grpo" else {}),
        **(SPOT_KEYS if way.method == "spot" else {}),
    }
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile("w+") as said:
        run = Path(directory) / "run"
        command = [checkout.python, "-m", "spot_async", "train", f"configs/running_sum/{way.method}.yaml"]
        command += [f"{key}={value}" for key, value in keys.items()] + [f"run.directory={run}", *given.set]
        process = subprocess.Popen(command, cwd=checkout.root, stdout=said, stderr=said)
        marks = []
        for enough in (WARM_UP, iterations - TAIL):
            while (count := iterations_of(run)) < enough and process.poll() is None:
                time.sleep(0.02)
            if process.poll() is None:
                marks.append((count, cpu_seconds(process.pid)))
        if process.wait():
            said.seek(0)
            sys.exit(f"{' '.join(command)}: exit code {process.returncode}\n{said.read()[-3000:]}")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (start, before), (end, after) = marks
    counted = rows[start:end]
    return Turn(
        statistics.fmean(row["time/iteration_s"] for row in counted),
        {role: (after[role] - before[role]) / len(counted) for role in ROLES},
        statistics.fmean(row["rollout/tokens"] for row in counted),
        [row[way.learned] for row in rows],
    )


class Peer:
    """TRL, in a process that makes one turn after another."""

    def __init__(self, process: subprocess.Popen[str], said: IO[str], given: argparse.Namespace) -> None:
        self.threads: dict[str, int] = {}  # by method
        self._process, self._said, self._given = process, said, given

    def trained(self, way: Way, seed: int) -> Turn:
        if way.method not in self.threads:
            trials = {threads: self._made(way, seed, threads, TRIAL_ITERATIONS) for threads in self._given.trl_threads}
            self.threads[way.method] = min(trials, key=lambda threads: trials[threads].iteration_s)
        return self._made(way, seed, self.threads[way.method], self._given.trl_iterations or way.trl_iterations)

    def _made(self, way: Way, seed: int, threads: int, iterations: int) -> Turn:
        samples = self._given.samples if way.method == "grpo" else 1
        job = {
            "method": way.method,
            "student": str(TOY / "student"),
            "teacher": str(TOY / "teacher"),
            "problems": str(TOY / "data" / "train.jsonl"),
            "prompts": PROMPTS,
            "samples": samples,
            "iterations": iterations,
            "threads": threads,
            "seed": seed,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._said.seek(0)
            sys.exit(f"TRL: exit code {self._process.wait()}\n{self._said.read()[-3000:]}")
        found = json.loads(answer)
        means = [statistics.fmean(found[name][TRL_WARM_UP:]) for name in ("wall_s", "cpu_s", "tokens")]
        return Turn(means[0], {"TRL": means[1]}, means[2], found["learned"])


@contextmanager
def peer(given: argparse.Namespace) -> Iterator[Peer | None]:
    if given.trl_python is None:
        yield None
        return
    command = [given.trl_python, str(Path(__file__).with_name("beside_trl_peer.py"))]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, env=offline
        ) as process,
    ):
        yield Peer(process, said, given)


Turns = dict[tuple[str, str], list[Turn]]  # by way and side, one a round


def measure(given: argparse.Namespace, trl: Peer | None) -> tuple[Turns, list[str]]:
    """Return all turns, and the load before and after each round."""
    turns: Turns = defaultdict(list)
    loads = []
    for seed in range(given.rounds):
        before = os.getloadavg()[0]
        for name in given.ways:
            way = WAYS[name]
            for checkout in given.python[:: -1 if seed % 2 else 1]:
                turns[name, checkout.name].append(trained(checkout, way, given, seed))
            if trl is not None and way.trl_iterations:
                turns[name, "TRL"].append(trl.trained(way, seed))
        loads.append(f"{before:.1f} to {os.getloadavg()[0]:.1f}")
        sys.stderr.write(f"round {seed + 1}, load {loads[-1]}\n")
    return turns, loads


def verdict(name: str, seconds: list[float], gains: list[float]) -> str:
    if name == "spot":
        return f"{GOAL_S} s: {'met' if statistics.median(seconds) <= GOAL_S else 'missed'}"
    return f"{GOAL} x: {'met' if statistics.median(gains) >= GOAL else 'missed'}" if gains else ""


def ends(turns: list[Turn]) -> str:
    first = [value for turn in turns for value in turn.learned[:ENDS]]
    last = [value for turn in turns for value in turn.learned[-ENDS:]]
    return f"{statistics.fmean(first):.3f} to {statistics.fmean(last):.3f}"


def report(turns: Turns, samples: int, notes: list[str]) -> None:
    times, shares = [], []
    for (name, side), made in turns.items():
        seconds = [turn.iteration_s for turn in made]
        gains = [other.iteration_s / own for other, own in zip(turns.get((name, "TRL"), []), seconds, strict=False)]
        responses = PROMPTS * (samples if name == "grpo" else 1)
        row = [f"{name}, {side}", spread(seconds), f"{1000 * statistics.median(seconds) / responses:.2f}"]
        row += ["", ""] if side == "TRL" else [spread(gains) if gains else "", verdict(name, seconds, gains)]
        times.append([*row, f"{statistics.fmean(turn.tokens for turn in made):.0f}", ends(made)])
        cpu = {role: statistics.median(turn.cpu_s[role] for turn in made) for role in made[0].cpu_s}
        whole = sum(cpu.values())
        parts = [f"{1000 * cpu[role]:.0f}, {cpu[role] / whole:.0%}" if role in cpu else "" for role in ROLES]
        shares.append([f"{name}, {side}", *parts, f"{1000 * whole:.0f}"])
    columns = ["", "s an iteration", "ms a response", "TRL's / ours", "goal", "tokens", "learned"]
    show(f"An iteration of {PROMPTS} prompts", columns, times, notes)
    show("CPU time of an iteration, ms and share", ["", *ROLES, "sum"], shares)


def checkout_of(text: str) -> Checkout:
    """Read `NAME=PYTHON`, and ask the interpreter where its spot-async is."""
    name, _, python = text.rpartition("=")
    # Neither links are followed, which would lose the environment, nor is the package of this folder taken (-P).
    python = str(Path(python).absolute())
    where = subprocess.run(
        [python, "-P", "-c", "import spot_async; print(spot_async.__path__[0])"], capture_output=True, text=True
    )
    if where.returncode:
        raise argparse.ArgumentTypeError(f"{python} has no spot-async")
    return Checkout(name or "ours", python, Path(where.stdout.strip()).parent)


def main() -> None:
    parser = argparse.ArgumentParser(description="An iteration of spot-async beside one of TRL's trainers.")
    parser.add_argument("--trl-python", help="an interpreter that has trl")
    parser.add_argument("--python", nargs="+", type=checkout_of, metavar="NAME=PYTHON", help="checkouts of spot-async")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["opd", "grpo", "spot"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=2, help="responses to each of GRPO's prompts")
    parser.add_argument("--iterations", type=int, help="of a turn of ours")
    parser.add_argument("--trl-iterations", type=int)
    parser.add_argument("--trl-threads", type=int, nargs="+", default=[1, 2], help="tried; on a busy machine give 1")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of our configuration, besides")
    given = parser.parse_args()
    given.python = given.python or [checkout_of(sys.executable)]
    started = time.monotonic()
    with peer(given) as trl:
        turns, loads = measure(given, trl)
    notes = [f"{given.rounds} rounds by turns in {(time.monotonic() - started) / 60:.1f} minutes; medians"]
    notes.append(f"load before and after each round: {', '.join(loads)}")
    if trl is not None:
        notes.append(f"TRL's threads: {', '.join(f'{method} {count}' for method, count in trl.threads.items())}")
    for checkout in given.python:
        command = ["git", "-C", str(checkout.root), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        notes.append(f"{checkout.name}: {checkout.root}, {commit}")
    report(turns, given.samples, notes)


if __name__ == "__main__":
    main()
