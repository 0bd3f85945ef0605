"""Suggests the key that was meant by one that does not exist.

It may be misspelt, belong to another section, or be another trainer's name for the same thing. For some features the
answer is that they are not built yet, or were removed.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence

from pydantic import BaseModel

# From TRL's and verl's names to ours. After a comma: what is different about ours.
OTHER_TRAINERS: Mapping[str, str] = {
    "beta": "training.reference_kl",
    "bf16": "training.dtype, bfloat16",
    "clip_ratio": "training.clip",
    "cliprange": "training.clip",
    "clip_ratio_c": "training.dual_clip",
    "dataset_name": "data.train",
    "dataset_train_split": "data.train.split",
    "enable_cpu_offload": "training.offload, all",
    "epsilon": "training.clip",
    "fsdp_cpu_offload": "training.offload, all",
    "fsdp_offload_params": "training.offload, all",
    "eval_steps": "evaluation.eval_every",
    "gradient_accumulation_steps": "training.mini_batch_size, prompts per update",
    "gradient_checkpointing": "training.recompute_layers",
    "enable_gradient_checkpointing": "training.recompute_layers",
    "torch_compile": "training.compile",
    "use_torch_compile": "training.compile",
    "kl_coef": "training.reference_kl",
    "kl_loss_coef": "training.reference_kl",
    "loss_agg_mode": "training.loss_aggregation",
    "loss_type": "training.loss_aggregation",
    "lr": "training.learning_rate",
    "lr_decay_iters": "training.schedule_iterations",
    "lr_decay_steps": "training.schedule_iterations",
    "lr_scheduler_type": "training.schedule",
    "lr_warmup_steps": "training.warmup_iterations",
    "max_completion_length": "sampling.max_response_tokens",
    "max_length": "sampling.max_response_tokens, without the prompt",
    "max_new_tokens": "sampling.max_response_tokens",
    "max_prompt_length": "sampling.max_prompt_tokens",
    "max_response_length": "sampling.max_response_tokens",
    "max_steps": "training.iterations",
    "max_tokens": "sampling.max_response_tokens",
    "model_name_or_path": "student.model",
    "nnodes": "cluster.nodes",
    "num_generations": "policy.samples, of kind grpo",
    "num_machines": "cluster.nodes",
    "num_nodes": "cluster.nodes",
    "num_train_epochs": "training.epochs",
    "optim_cpu_offload": "training.offload, optimizer",
    "optimizer_offload": "training.offload, optimizer",
    "output_dir": "run.directory",
    "param_offload": "training.offload, all",
    "per_device_train_batch_size": "training.batch_size, prompts per iteration",
    "ppo_micro_batch_size_per_gpu": "training.micro_batch_tokens",
    "ppo_mini_batch_size": "training.mini_batch_size",
    "report_to": "telemetry",
    "reward_funcs": "verifier",
    "rollout_n": "policy.samples, of kind grpo",
    "save_total_limit": "training.keep_weights",
    "teacher_model_name_or_path": "teacher.model",
    "total_epochs": "training.epochs",
    "total_training_steps": "training.iterations",
    "train_batch_size": "training.batch_size",
    "train_files": "data.train",
    "val_files": "evaluation.problems",
    "warmup_ratio": "training.warmup_iterations",
    "warmup_steps": "training.warmup_iterations",
}
# Features that people look for and that are not there, by the names that TRL, verl, PEFT or we would give them.
_LORA = "LoRA is `training.lora: {rank, alpha, targets, rank_stabilised}`"
_QUANTISED = "there is no training over quantised weights: LoRA is `training.lora`, over weights of training.dtype"
CANNOT_RESUME = "runs are resumed by a command: `spot-async train --resume RUN`, `spot-async eval --resume RUN`"
NOT_THERE: Mapping[str, str] = {
    **dict.fromkeys(("lora", "lora_rank", "lora_r", "lora_alpha", "use_lora", "lora_config"), _LORA),
    **dict.fromkeys(("peft", "peft_config", "use_peft", "adapter"), _LORA),
    **dict.fromkeys(("qlora", "load_in_4bit", "load_in_8bit"), _QUANTISED),
    **dict.fromkeys(
        ("resume", "resume_from", "resume_mode", "resume_from_checkpoint", "resume_from_path"), CANNOT_RESUME
    ),
    "hedge_after_s": "hedged requests were removed: take it out",
}
PLACES_SHOWN = 3


def unknown_key(name: str, known: Sequence[str], root: type[BaseModel]) -> str:
    """Return the complaint about the key `name` in a section of the `known` keys.

    It suggests what was most likely meant: a key of this section, or of any other below `root`.
    """
    if name in NOT_THERE:
        return f"unknown key; {NOT_THERE[name]}"
    section = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if not section and name in OTHER_TRAINERS:
        key, _, note = OTHER_TRAINERS[name].partition(", ")
        return f"unknown key; here it is `{key}`" + (f" ({note})" if note else "")
    if not section and (places := [path for path in paths(root) if path.rpartition(".")[2] == name]):
        listed = " or ".join(f"`{path}`" for path in places[:PLACES_SHOWN])
        return f"unknown key; did you mean {listed}?"
    close = section or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return "unknown key; " + (f"did you mean `{close[0]}`?" if close else f"known keys: {', '.join(known)}")


def paths(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Return every key below a section as a dotted path, without the plug-ins' own.

    Sections that users name themselves (`benchmarks.<name>`) are not entered.
    """
    for name, field in schema.model_fields.items():
        yield prefix + name
        if typing.get_origin(field.annotation) is dict:
            continue
        for section in classes(field.annotation):
            if issubclass(section, BaseModel) and section.model_fields:
                yield from paths(section, f"{prefix}{name}.")


def classes(annotation: object) -> Iterator[type]:
    """Return all classes of an annotation, those inside unions and containers too."""
    if isinstance(annotation, type):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from classes(argument)
