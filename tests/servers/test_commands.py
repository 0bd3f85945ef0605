"""The commands that the paper's configurations start servers with, in the real servers' own argument parsers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import start_directory
from conftest import interpreter
from paper_directory import SHAPES, make_data, make_interpreter, make_model_of_shape
from tiny_models import make_model
from typer.testing import CliRunner

from spot_async.backends.sglang.process import sglang_command
from spot_async.backends.shared.launch import Command, Doorway
from spot_async.backends.shared.launch_settings import LaunchSettings
from spot_async.backends.shared.weight_transport import WeightSettings
from spot_async.backends.vllm.process import Uses, vllm_command
from spot_async.backends.vllm.transfer import transfer_config
from spot_async.checks.plan import TrainPlan, plan_training
from spot_async.cli import app
from spot_async.config import Config, LoraConfig
from spot_async.config.loading import load_config
from spot_async.models.hub import local_path, with_downloads

ROOT = Path(__file__).parents[2]
PAPER = ROOT / "configs" / "paper"
LORA = LoraConfig(rank=16, alpha=32)
# Each reads lists of words from standard input, and prints what the server makes of them.
PARSERS = {
    "vllm": """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for words in json.load(sys.stdin):
    parsed = parser.parse_args(words)
    print(json.dumps([parsed.model, parsed.hf_overrides, parsed.gpu_memory_utilization, parsed.kv_cache_memory_bytes]))
""",
    "sglang": """
import argparse, json, sys
import sglang_cpu_server
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for words in json.load(sys.stdin):
    parsed = parser.parse_args(ConfigArgumentMerger(parser).merge_config_with_args(words))
    cache = parsed.max_total_tokens
    print(json.dumps([parsed.model_path, parsed.enable_fp32_lm_head, parsed.mem_fraction_static, cache]))
""",
}


class Started(NamedTuple):
    """A server that a run would start."""

    command: Command
    launch: LaunchSettings
    model: str


@pytest.fixture(scope="module")
def working_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the recipes want to find: models of the published shapes, data, and the real servers."""
    directory = tmp_path_factory.mktemp("paper")
    make_model(directory / "tiny", seed=0)
    for name in SHAPES:
        make_model_of_shape(directory / "models" / name, directory / "tiny")
    for kind in PARSERS:
        make_interpreter(directory / f".venv-{kind}" / "bin" / "python", interpreter(f"SPOT_{kind.upper()}_PYTHON"))
    make_data(directory / "data")
    with contextlib.chdir(directory):
        yield directory


def paper_runs(kind: str, *, all_of_them: bool) -> Iterator[list[Path]]:
    """Yield the files that each of the paper's runs lays over each other for servers of a kind, or some of these."""
    recipes = [each for folder in ("table*", "figure-*") for each in sorted(PAPER.glob(f"{folder}/*.yaml"))]
    assert len(recipes) > 20
    recipes = recipes if all_of_them else recipes[::8]
    servers = [] if kind == "sglang" else [PAPER / "vllm.yaml"]
    for recipe in recipes:
        over = [PAPER / "vllm-grpo.yaml"] if servers and recipe.stem.endswith("grpo") else servers
        yield [recipe, *over]
    yield [PAPER / "table1" / "qwen3-1.7b-spot.yaml", *servers, PAPER / "lora.yaml"]


def dry_run(files: Sequence[Path], kind: str, monkeypatch: pytest.MonkeyPatch) -> TrainPlan:
    """Return the plan that `train --dry-run` of files over each other shows."""
    mine = Path("mine.yaml")
    mine.write_text(f"base: [{', '.join(map(str, files))}]\n")
    given = [f"{role}.backend.launch.python=.venv-vllm/bin/python" for role in ("student", "teacher")]
    overrides = given if kind == "vllm" and files[-1].name.startswith("lora") else []
    overrides = [*overrides, *(["data.train.path=data/dapo_math.jsonl"] if "4b" in files[0].name else [])]
    overrides.append("training.checkpoint_every=0")  # a checkpoint of 8B needs 48 GB, which this machine may not have
    plans: list[TrainPlan] = []

    def seen(config: Config, *, starts: bool) -> TrainPlan:
        assert not starts
        plans.append(plan_training(config))
        return plans[0]

    monkeypatch.setattr("spot_async.checks.plan.plan_training", seen)
    shown = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["train", str(mine), "--dry-run", "--brief", *overrides])
    assert shown.exit_code == 0, shown.output
    assert "attention " in shown.output
    assert "None of it is measured" in shown.output  # so there was an estimate
    return plans[0]


def would_start(plan: TrainPlan, directory: Path) -> Iterator[Started]:
    """Yield the servers that a run would start, each with adapters and without, with the words of its own backend."""
    doorway = Doorway(8123, directory, "secret")
    for role, model in plan.served.items():
        path = local_path(model.model)
        for server in model.backend.servers():
            launch, sleeps = server.launch, server.sleep_while_training  # type: ignore[attr-defined]
            for lora in {None, LORA if role == "student" else None}:
                if model.backend.kind == "vllm":
                    uses = Uses(
                        max_logprobs=65,
                        takes_weights=role == "student",
                        sleeps=sleeps,
                        weight_transfer=transfer_config(WeightSettings(transport="distributed")),
                        adapters=lora,
                    )
                    command = vllm_command(launch, Path(path), doorway, uses=uses)
                else:
                    command = sglang_command(launch, Path(path), doorway, sleeps=sleeps, adapters=lora)
                yield Started(command, launch, path)


def understood(kind: str, started: Collection[Started], directory: Path) -> list[list[Any]]:
    """Return what a server's own parser makes of the words that it would be started with."""
    for each in started:
        for name, text in each.command.files.items():
            (directory / name).write_text(text)
    done = subprocess.run(
        [interpreter(f"SPOT_{kind.upper()}_PYTHON"), "-c", PARSERS[kind]],
        input=json.dumps([list(each.command.argv[3:]) for each in started]),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    parsed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(parsed) == len(started)
    return parsed


@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["some", "all"])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_dry_run_of_each_recipe_starts_servers_by_commands_that_they_understand(
    kind: str, all_of_them: bool, working_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Started] = {}
    for files in paper_runs(kind, all_of_them=all_of_them):
        plan = dry_run(files, kind, monkeypatch)
        assert {model.backend.kind for model in plan.served.values()} == {kind}
        found |= {json.dumps(each.command.argv): each for each in would_start(plan, tmp_path)}
    assert not all_of_them or {each.model.removeprefix("models/") for each in found.values()} == {*SHAPES}
    parsed = understood(kind, found.values(), tmp_path)
    for each, (model, head, fraction, cached) in zip(found.values(), parsed, strict=True):
        assert model == each.model
        assert each.launch.cache_gib is not None
        shape, heads = SHAPES[Path(model).name], 8
        token_bytes = shape["num_hidden_layers"] * 2 * heads * shape["head_dim"] * 2
        cache_bytes = int(each.launch.cache_gib * 2**30)
        assert cached == (cache_bytes if kind == "vllm" else cache_bytes // token_bytes)
        assert head in (True, {"head_dtype": "float32"})
        assert 0.1 < fraction < 0.9 if kind == "vllm" else fraction == 0.95


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_servers_of_the_files_to_start_from_are_started_by_commands_that_they_understand(
    kind: str, working_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "a key of the tests")
    models = start_directory.make_models(tmp_path / "models")
    started: list[Started] = []
    with start_directory.reached(monkeypatch, models, tmp_path / "cache"):
        for path in sorted((ROOT / "configs" / "start").glob("*.yaml")):
            overrides = ["evaluation.eval_every=2"] if path.stem == "asynchronous" else []
            here = tmp_path / path.name
            here.write_text(path.read_text().replace("/opt/", ".venv-"))
            plan = plan_training(with_downloads(load_config(here, overrides), weights=()))
            served = {role: each for role, each in plan.served.items() if each.backend.kind == kind}
            started += would_start(dataclasses.replace(plan, served=served), tmp_path)
    assert len(started) == (5 if kind == "sglang" else 28)
    for each, (model, *_) in zip(started, understood(kind, started, tmp_path), strict=True):
        assert model == each.model
