"""What the weights of a run's versions give by themselves, against what servers answered for them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spot_async.checks.plan import plan_training
from spot_async.config import LoraConfig
from spot_async.config.loading import load_config


def largest_difference_nats(run: Path, samples: list[dict[str, Any]], *, behind: int = 0) -> float:
    """The largest difference of a token's log-probability to a plain forward of base and adapter of its version.

    Or of the one so many steps `behind` it. `samples` are lines of samples.jsonl, and all of the run's adapters must
    still be in `weights/`.
    """
    config = load_config(run / "config.yaml")
    schedule = plan_training(config).schedule  # without an end
    prompts = {prompt.problem.id: prompt.token_ids for prompt in islice(schedule, schedule.per_epoch)}
    assert config.training.lora is not None
    model = AutoModelForCausalLM.from_pretrained(config.student.model, dtype=torch.float32).eval()
    base = {name: each.clone() for name, each in model.state_dict().items()}
    differences = []
    for version in sorted({sample["version"] for sample in samples}):
        merge(model, base, adapter_of(run, version, behind), config.training.lora)
        for sample in (each for each in samples if each["version"] == version):
            prompt, response = list(prompts[sample["problem_id"]]), sample["response_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1)[range(len(response)), response]
            differences.append((expected - torch.tensor(sample["behavior_logprobs"])).abs().max())
    return float(max(differences))


def adapter_of(run: Path, version: str, behind: int) -> dict[str, torch.Tensor]:
    step = max(0, int(version.partition(".")[2]) - behind)
    return load_file(run / f"weights/step-{step:06d}/adapter/adapter_model.safetensors") if step else {}


def merge(
    model: torch.nn.Module, base: dict[str, torch.Tensor], adapter: dict[str, torch.Tensor], lora: LoraConfig
) -> None:
    """Load base + scale B A into a model."""
    merged = dict(base)
    for name in {key.partition(".lora_")[0] for key in adapter}:
        down, up = adapter[f"{name}.lora_A.weight"], adapter[f"{name}.lora_B.weight"]
        weight = f"{name.removeprefix('base_model.model.')}.weight"
        merged[weight] = base[weight] + lora.scale * up @ down
    model.load_state_dict(merged)
