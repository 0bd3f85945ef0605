"""What the files of configs/start name: models of the hub with their true shapes, data sets with their true columns.

The models' weights are holes in sparse files, and their tokenizer is a small one of bytes. Rows of data are made up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hub_stand_in
import pytest
from paper_directory import SHAPES, make_model_of_shape

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
# The columns of the data sets on the hub, as their pages show them.
COLUMNS: dict[str, tuple[str, ...]] = {
    "agentica-org/DeepScaleR-Preview-Dataset": ("problem", "answer", "solution"),
    "HuggingFaceH4/MATH-500": ("problem", "solution", "answer", "subject", "level", "unique_id"),
    "openai/gsm8k": ("question", "answer"),
}
ROWS = 640


def row(name: str, number: int) -> dict[str, Any]:
    """Return a row as the data set has it: GSM8K's answers end a solution, and few of DeepScaleR's rows have one."""
    found = {each: f"What is {number} + 0, as a {each} of {name}?" for each in COLUMNS[name]}
    if name == "openai/gsm8k":
        return found | {"answer": f"It is <<{number}+0={number}>>{number}.\n#### {number}"}
    solution = "" if name.startswith("agentica") and number % 5 else f"It is \\boxed{{{number}}}."
    return found | {"answer": str(number), "solution": solution, "level": 1 + number % 5}


def make_tokenizer(directory: Path) -> Path:
    """Write a byte-level tokenizer as Qwen's are, with 256 bytes and three special tokens, and its chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {each: number for number, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = Tokenizer(models.BPE(alphabet, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|im_end|>", extra_special_tokens=["<|endoftext|>", "<|im_start|>"]
    )
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    return directory


def make_models(directory: Path) -> dict[str, Path]:
    """Write a model of each published shape of Qwen3; return their directories by their ids on the hub."""
    tokenizer = make_tokenizer(directory / "tokenizer")
    found = {}
    for name in sorted({each.removesuffix("-Base") for each in SHAPES if each.startswith("Qwen3")}):
        make_model_of_shape(directory / name, tokenizer)
        (directory / name / "chat_template.jinja").write_text(TEMPLATE)
        found[f"Qwen/{name}"] = directory / name
    return found


@contextlib.contextmanager
def reached(monkeypatch: pytest.MonkeyPatch, models: dict[str, Path], cache: Path) -> Iterator[hub_stand_in.Hub]:
    """Let the hub's clients of this process find the models, without their weights, and the data sets."""
    import datasets
    import huggingface_hub

    def load_dataset(path: str, **_: object) -> Any:
        return datasets.Dataset.from_list([row(path, number) for number in range(ROWS)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    with hub_stand_in.reached(monkeypatch, cache) as hub:
        for name, directory in models.items():
            files = {each.name: each.read_bytes() for each in directory.iterdir() if each.suffix != ".safetensors"}
            hub.repositories[name] = hub_stand_in.Repository()
            hub.repositories[name].commit({**files, "model.safetensors": b"not downloaded"})
        yield hub
