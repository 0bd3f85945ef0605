"""A working directory as the recipes of configs/paper want it: stand-ins for models, data and servers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spot_async.data.layouts import GPQA_CHOICES

TEMPLATE = (
    "{% for message in messages %}user {{ message.content }} {% endfor %}assistant"
    "{% if enable_thinking is defined and not enable_thinking %} w7{% endif %}"
)
# As Llama 3.2's writes the date.
DATED_TEMPLATE = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{% for message in messages %}{{ date_string }} user {{ message.content }} {% endfor %}assistant"
)
PROBLEMS = 128
QWEN = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}
LLAMA = {"model_type": "llama", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 128256}
_WIDTHS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "tie_word_embeddings")
# The published shapes.
SHAPES: dict[str, dict[str, Any]] = {
    name: family | dict(zip(_WIDTHS, widths, strict=True))
    for family, shapes in (
        (
            QWEN,
            {
                "Qwen3-0.6B-Base": (28, 1024, 3072, 16, True),
                "Qwen3-1.7B-Base": (28, 2048, 6144, 16, True),
                "Qwen3-4B-Base": (36, 2560, 9728, 32, True),
                "Qwen3-4B": (36, 2560, 9728, 32, True),
                "Qwen3-8B": (36, 4096, 12288, 32, False),
            },
        ),
        (
            LLAMA,
            {
                "Llama-3.2-3B-Instruct": (28, 3072, 8192, 24, True),
                "Llama-3.1-8B-Instruct": (32, 4096, 14336, 32, False),
            },
        ),
    )
    for name, widths in shapes.items()
}


def make_data(directory: Path) -> None:
    """Write a few problems of each of the recipes' data sets; lines of JSON take the place of Parquet files."""
    directory.mkdir()
    rows = [{"problem": f"w{20 + i % 50} w{2 + i // 50} what is {i}?", "answer": str(i)} for i in range(PROBLEMS)]
    math_rows = [
        {**row, "solution": f"It is $\\boxed{{{row['answer']}}}$.", "level": "Level 2", "type": "t"} for row in rows
    ]
    write_lines(directory / "math_train.jsonl", math_rows)
    write_lines(directory / "dapo_math.jsonl", rows)
    for name in ("math500", "amc23", "hmmt_feb_2025", "hmmt_nov_2025", "aime24", "aime25"):
        write_lines(directory / f"{name}.jsonl", [{"problem": f"{name} {i}?", "answer": str(i)} for i in range(2)])
    write_lines(directory / "minerva.jsonl", [{"problem": "m?", "solution": "$\\boxed{3}$", "type": "t"}])
    (directory / "gpqa_diamond.csv").write_text(",".join(GPQA_CHOICES) + ",Question\n1,2,3,4,q?\n")
    (directory / "alpaca_eval.json").write_text(json.dumps([{"instruction": "Do.", "dataset": "d"}]))
    options = {"question": "q?", "options": ["1", "2"], "answer": "B", "category": "law"}
    write_lines(directory / "mmlu_pro_test.jsonl", [options])
    examples = [{**options, "question": f"e{i}?", "cot_content": "A: It is. The answer is (B)."} for i in range(5)]
    write_lines(directory / "mmlu_pro_validation.jsonl", examples)


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_interpreter(path: Path, words: str) -> None:
    """Write a program that takes an interpreter's place: it runs `words` with the arguments that it is given."""
    path.parent.mkdir(parents=True)
    path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    path.chmod(0o755)


def make_model_of_shape(directory: Path, tokenizer: Path) -> None:
    """Write a model of the shape that `SHAPES` has for the directory's name or its base, with another's tokenizer.

    Its weights have the true size, and are a hole in a sparse file.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(tokenizer, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    is_llama = directory.name.startswith("Llama")
    (directory / "chat_template.jinja").write_text(DATED_TEMPLATE if is_llama else TEMPLATE)
    path = directory / "config.json"
    shape = SHAPES.get(directory.name) or SHAPES[f"{directory.name}-Base"]
    changed = {"max_position_embeddings": 40960, "dtype": "bfloat16", "layer_types": None}
    path.write_text(json.dumps({**json.loads(path.read_text()), **shape, **changed}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16)
    header, end = {}, 0
    for name, parameter in model.named_parameters():
        begin, end = end, end + 2 * math.prod(parameter.shape)
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [begin, end]}
    words = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        file.truncate(file.tell() + end)
