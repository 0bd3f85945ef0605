"""Measures an update of the trainer on CPUs: packed, padded, compiled, by TRL, and in a plain transformers loop.

    python benchmarks/training.py --recompute-layers --state turns.jsonl --trl-python PYTHON    # takes hours
    python benchmarks/training.py --rounds 1 --layers 3 --vocabulary 4096 --recompute-layers

The second takes minutes. `PYTHON` is an interpreter that has `trl`; without it, TRL is left out. With `--state`, turns
that were made before are not made again.

Each turn makes one update of one way, in processes of its own, on the trajectories that the other ways of its round get
too. Lengths are drawn from a log-normal distribution, cut at 2,048. What counts is the CPU time of all ranks, so that
other work on the machine matters little. Weights are random, since only sizes count. The plain loop and TRL's
`SFTTrainer` have a loss of the same cost: cross-entropy of the tokens, with rows in the order given. What it takes to
load a model, or to compile it, is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import show, spread
from transformers import AutoModelForCausalLM, Qwen3Config

from spot_async.backends.shared.launch import free_port
from spot_async.trainer.batching import Layout, input_length, update_shares
from spot_async.trainer.checkpoint import Done
from spot_async.trainer.messages import Batch
from spot_async.trainer.parallel import process_group, strategy_of
from spot_async.trainer.rank import LINEAR_WORK, StudentTrainer
from spot_async.trainer.settings import TrainerSettings
from spot_async.types import Pull, Supervision, WeightSnapshot, WeightVersion

HIDDEN = 768  # with 12 layers and a vocabulary of 16,384, 0.1B parameters
SMALLEST_VOCABULARY = 256
MEDIAN_TOKENS, SPREAD, LONGEST_TOKENS, PROMPT_TOKENS = 700, 0.9, 2048, 16
WAYS = ("packed", "compiled", "padded", "trl", "transformers")
ONE_RANK = ("transformers",)  # a plain loop has no ranks


def trajectories(seed: int, count: int) -> list[Supervision]:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(np.log(MEDIAN_TOKENS), SPREAD, count), 2 * PROMPT_TOKENS, LONGEST_TOKENS)
    samples = []
    for ordinal, length in enumerate(lengths.astype(int)):
        tokens = int(length) - PROMPT_TOKENS + 1
        behavior = -rng.exponential(1.0, tokens).astype(np.float32)
        samples.append(
            Supervision(
                prompt_ordinal=ordinal,
                problem_id=str(ordinal),
                prompt_ids=rng.integers(0, SMALLEST_VOCABULARY, PROMPT_TOKENS).astype(np.int32),
                response_ids=rng.integers(0, SMALLEST_VOCABULARY, tokens).astype(np.int32),
                behavior_logprobs=behavior,
                pulls=(Pull(logprobs=behavior + rng.normal(0, 0.3, tokens).astype(np.float32)),),
                version=WeightVersion(0, 0),
            )
        )
    return samples


class Unpublished(StudentTrainer):
    """Writes no weights."""

    def _publish(self, step: int, published: Done) -> WeightSnapshot:
        return WeightSnapshot(directory="", version=WeightVersion(0, step))


def updated(settings: TrainerSettings, way: str, batch: list[Supervision], channel: str) -> dict[str, float]:
    """Make one update in this process, one of the ranks; return its seconds of CPU time, its peak and its loss."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    with process_group(channel, device, "none"):
        if way == "transformers":
            model = AutoModelForCausalLM.from_pretrained(
                settings.model_directory, dtype=torch.float32, trust_remote_code=False
            ).train()
            if settings.training.recompute_layers:
                model.gradient_checkpointing_enable()
            started = time.process_time()
            loss = plain_update(model, batch, settings.training.tokens_per_pass(is_packed=True))
        else:
            trainer = Unpublished(settings, strategy_of(settings.training), device)
            started = time.process_time()
            loss = trainer.train(Batch(0, tuple(batch))).metrics["loss"]
            del trainer
        seconds = time.process_time() - started
    return {"cpu_s": seconds, "loss": loss, "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)}


def plain_update(model: Any, batch: list[Supervision], token_budget: int) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    rows_per_pass = max(1, token_budget // LONGEST_TOKENS)
    total = 0.0
    for start in range(0, len(batch), rows_per_pass):
        rows = [
            torch.tensor([*s.prompt_ids.tolist(), *s.response_ids.tolist()])
            for s in batch[start : start + rows_per_pass]
        ]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True)
        labels = ids.masked_fill(mask == 0, -100)
        loss = model(input_ids=ids, attention_mask=mask.long(), labels=labels).loss * len(rows) / len(batch)
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total


def work(given: argparse.Namespace) -> None:
    way, seed = given.worker
    training = {
        "iterations": 1,
        "batch_size": given.trajectories,
        "mini_batch_size": given.trajectories,
        "micro_batch_tokens": given.micro_batch_tokens,
        "ranks": int(os.environ["WORLD_SIZE"]),
        "packing": way != "padded",
        "compile": way == "compiled",
        "recompute_layers": given.recompute_layers,
    }
    settings = TrainerSettings.model_validate(
        {
            "training": training,
            "model_directory": str(given.directory / "model"),
            "run_directory": str(given.directory / "run"),
            "temperature": 1.0,
            "seed": 0,
            "iterations": 1,
        }
    )
    batch = trajectories(int(seed), given.trajectories)
    found = updated(settings, way, batch, str(given.directory / "meeting"))
    sys.stdout.write(json.dumps(found) + "\n")


def turn(given: argparse.Namespace, way: str, ranks: int, seed: int) -> dict[str, float]:
    """Make one update in `ranks` processes; return the CPU time of all, the largest peak and the loss."""
    meeting = given.directory / "meeting"
    with tempfile.TemporaryDirectory(prefix="meeting", dir=given.directory) as channel:
        meeting.unlink(missing_ok=True)
        meeting.symlink_to(channel)
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", way, str(seed)]
        command += ["--directory", str(given.directory)]
        if way == "trl":
            command = [given.trl_python, str(Path(__file__).with_name("training_trl.py")), trl_job(given, seed)]
        environment = {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # TRL's ranks meet there
        processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        said = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            sys.exit(f"{way} on {ranks} ranks failed")
    found = [json.loads(each.splitlines()[-1]) for each in said]
    return {
        "cpu_s": sum(each["cpu_s"] for each in found),
        "loss": found[0]["loss"],
        "peak_gib": max(each["peak_gib"] for each in found),
    }


def trl_job(given: argparse.Namespace, seed: int) -> str:
    """Write what `training_trl.py` needs; return the file's path."""
    rows = [
        {
            "input_ids": [*each.prompt_ids.tolist(), *each.response_ids.tolist()],
            "completion_mask": [0] * len(each.prompt_ids) + [1] * len(each.response_ids),
        }
        for each in trajectories(seed, given.trajectories)
    ]
    job = {
        "model": str(given.directory / "model"),
        "rows": rows,
        "rows_per_pass": max(1, given.micro_batch_tokens // LONGEST_TOKENS),
        "recompute_layers": given.recompute_layers,
    }
    path: Path = given.directory / "trl.json"
    path.write_text(json.dumps(job))
    return str(path)


class Turns:
    """The turns that were made, kept in a file if there is one."""

    def __init__(self, path: Path | None, setting: list[object]) -> None:
        """`setting` is what turns of one file have in common. Those of others are not read."""
        self._path, self._setting = path, setting
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._made: dict[tuple[str, int, int], dict[str, float]] = {}
        for line in lines:
            of, *turn_of, found = json.loads(line)
            if of == setting:
                self._made[tuple(turn_of)] = found

    def made(self, way: str, ranks: int, seed: int, make: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Return a turn's figures, and make it if it was not made."""
        key = (way, ranks, seed)
        if key not in self._made:
            self._made[key] = make()
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps([self._setting, *key, self._made[key]]) + "\n")
        return self._made[key]


def padded_to_real(batch: list[Supervision], ranks: int, token_budget: int) -> float:
    """Return how many times as many tokens padded rows have."""
    layout = Layout(is_packed=False, token_budget=token_budget, linear_work=LINEAR_WORK * HIDDEN)
    groups = [group for share in update_shares(batch, ranks, layout) for group in share.micro_batches if group]
    cells = sum(len(group) * max(map(input_length, group)) for group in groups)
    return cells / sum(map(input_length, batch))


def measure(given: argparse.Namespace) -> Iterator[list[str]]:
    setting = [given.trajectories, given.layers, given.recompute_layers, given.vocabulary, given.micro_batch_tokens]
    turns = Turns(given.state, setting)
    for ranks in given.ranks:
        ways = [way for way in given.ways if ranks == 1 or way not in ONE_RANK]
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        tokens, paddings = [], []
        for seed in range(given.rounds):
            batch = trajectories(seed, given.trajectories)
            tokens.append(sum(map(input_length, batch)))
            paddings.append(padded_to_real(batch, ranks, given.micro_batch_tokens))
            for way in ways[:: 1 if seed % 2 else -1]:
                found[way].append(turns.made(way, ranks, seed, partial(turn, given, way, ranks, seed)))
                sys.stderr.write(f"{ranks} ranks, round {seed + 1}, {way}: {found[way][-1]}\n")
        for way, each in found.items():
            rates = [count / one["cpu_s"] for count, one in zip(tokens, each, strict=True)]
            row = [f"{way}, {ranks} rank{'s' * (ranks > 1)}", spread(rates, ".1f")]
            padded = found.get("padded", each)
            gains = [other["cpu_s"] / one["cpu_s"] for one, other in zip(each, padded, strict=True)]
            row += [spread(gains), spread(paddings) if way == "padded" else ""]
            yield [*row, f"{statistics.median(one['peak_gib'] for one in each):.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of an update: packed, compiled, padded, by TRL, plain.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--ways", nargs="+", choices=WAYS)
    parser.add_argument("--trl-python", help="an interpreter that has trl")
    parser.add_argument("--state", type=Path, help="a file of turns that were made")
    parser.add_argument("--trajectories", type=int, default=32)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--recompute-layers", action="store_true")
    parser.add_argument("--vocabulary", type=int, default=16_384)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given)
        return
    given.ways = given.ways or [way for way in WAYS if way != "trl" or given.trl_python]
    if "trl" in given.ways and not given.trl_python:
        parser.error("--ways trl needs --trl-python")
    with tempfile.TemporaryDirectory() as directory:
        given.directory = Path(directory)
        config = Qwen3Config(
            vocab_size=given.vocabulary,
            hidden_size=HIDDEN,
            intermediate_size=4 * HIDDEN * 2 // 3,
            num_hidden_layers=given.layers,
            num_attention_heads=12,
            num_key_value_heads=4,
            head_dim=64,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        model.save_pretrained(given.directory / "model")
        rows = list(measure(given))
    columns = ["way", "tokens per CPU-second", "padded / its CPU time", "padded / real tokens", "peak GiB of a rank"]
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    notes = [f"{given.rounds} rounds in turns, {size:.0f}M parameters, float32, load {os.getloadavg()[1]:.1f}; medians"]
    show(f"An update of {given.trajectories} trajectories", columns, rows, notes)


if __name__ == "__main__":
    main()
