"""The commands that the paper's configurations start servers with, in the real servers' own argument parsers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from spot_async.backends.sglang.launch import sglang_command
from spot_async.backends.shared.launch import Command, Doorway
from spot_async.backends.shared.weight_transport import WeightSettings
from spot_async.backends.vllm.launch import vllm_command
from spot_async.backends.vllm.transfer import transfer_config
from spot_async.config import LoraConfig
from spot_async.config.loading import config_from, laid_over, read_tree

ROOT = Path(__file__).parents[2]
PAPER = ROOT / "configs" / "paper"
LORA = LoraConfig(rank=16, alpha=32)
QWEN3_8B = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936, "hidden_size": 4096,
            "num_hidden_layers": 36, "intermediate_size": 12288, "num_attention_heads": 32}  # fmt: skip
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


def paper_commands(kind: str, directory: Path) -> list[Command]:
    """Return the different commands of all the paper's runs, with adapters and without."""
    python = os.environ[f"SPOT_{kind.upper()}_PYTHON"]
    doorway = Doorway(8123, directory, "secret")
    found: dict[str, Command] = {}
    recipes = [each for folder in ("table*", "figure-*") for each in PAPER.glob(f"{folder}/*.yaml")]
    assert len(recipes) > 20
    for path in [*recipes, PAPER / "lora.yaml", PAPER / "lora-24gb.yaml"]:
        tree = read_tree(path)
        if path.name.startswith("lora"):
            tree = laid_over(tree, read_tree(PAPER / "table1" / "qwen3-1.7b-spot.yaml"))
        elif kind == "vllm":
            over = "vllm.yaml" if tree["teacher"] is not None else "vllm-grpo.yaml"
            tree = laid_over(read_tree(PAPER / over), tree)
        config = config_from(tree)
        for role, model in (("student", config.student), ("teacher", config.teacher)):
            if model is None or model.backend.kind != kind:
                continue
            for server in model.backend.servers():
                launch = server.launch.model_copy(update={"python": python, "cache_gib": 10.0})  # type: ignore[attr-defined]
                sleeps, adapters = server.sleep_while_training, LORA if role == "student" else None  # type: ignore[attr-defined]
                for lora in {None, adapters}:
                    if kind == "vllm":
                        command = vllm_command(
                            launch,
                            directory,
                            doorway,
                            max_logprobs=65,
                            takes_weights=role == "student",
                            sleeps=sleeps,
                            weight_transfer=transfer_config(WeightSettings(transport="distributed")),
                            adapters=lora,
                        )
                    else:
                        command = sglang_command(launch, directory, doorway, sleeps=sleeps, adapters=lora)
                    found[json.dumps(command.argv)] = command
    return list(found.values())


@pytest.mark.parametrize(("kind", "words_before"), [("vllm", 3), ("sglang", 3)])
def test_the_paper_s_commands_are_understood(kind: str, words_before: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    commands = paper_commands(kind, tmp_path)
    assert len(commands) >= 3  # student, teacher, adapters
    for each in commands:
        for name, text in each.files.items():
            (tmp_path / name).write_text(text)
    python = commands[0].argv[0]
    done = subprocess.run(
        [python, "-c", PARSERS[kind]],
        input=json.dumps([list(each.argv[words_before:]) for each in commands]),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    parsed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(parsed) == len(commands)
    cache = {"vllm": 10 * 2**30, "sglang": 10 * 2**30 // (36 * 2 * 8 * 128 * 2)}  # bytes, or tokens of layers and heads
    for model, head, fraction, cached in parsed:
        assert model == str(tmp_path)
        assert cached == cache[kind]
        assert head in (True, {"head_dtype": "float32"})
        assert 0.1 < fraction < 0.9 if kind == "vllm" else fraction == 0.95
