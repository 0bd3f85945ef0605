"""Suggests the key that was meant by one that does not exist.

It may be misspelt, belong to another section, or be another trainer's name for the same thing. For some features the
answer is that they are not built yet, or were removed.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence

from pydantic import BaseModel

from spot_async.base import registry
from spot_async.base.secrets import looks_secret, names_secret

# From TRL's and verl's names to ours. After a comma: what is different about ours.
OTHER_TRAINERS: Mapping[str, str] = {
    "beta": "training.reference_kl",
    "bf16": "training.dtype, bfloat16",
    "clip_ratio": "training.clip",
    "cliprange": "training.clip",
    "clip_ratio_c": "training.dual_clip",
    "clip_grad": "training.max_grad_norm",
    "dataset_name": "data.train",
    "dataset_train_split": "data.train.split",
    "enable_cpu_offload": "training.offload, all",
    "epsilon": "training.clip",
    "fsdp_cpu_offload": "training.offload, all",
    "fsdp_offload_params": "training.offload, all",
    "eval_steps": "evaluation.eval_every",
    "fsdp": "training.sharding, fsdp2",
    "fsdp_config": "training.sharding, fsdp2",
    "gpu_memory_utilization": "student.backend.launch.memory_fraction",
    "grad_clip": "training.max_grad_norm",
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
    "learning_rate_scheduler": "training.schedule",
    "logger": "telemetry",
    "logging": "telemetry",
    "lr_scheduler_type": "training.schedule",
    "lr_warmup_steps": "training.warmup_iterations",
    "max_completion_length": "sampling.max_response_tokens",
    "max_length": "sampling.max_response_tokens, without the prompt",
    "max_new_tokens": "sampling.max_response_tokens",
    "max_prompt_length": "sampling.max_prompt_tokens",
    "max_response_length": "sampling.max_response_tokens",
    "max_steps": "training.iterations",
    "mem_fraction_static": "student.backend.launch.memory_fraction",
    "max_tokens": "sampling.max_response_tokens",
    "model_name_or_path": "student.model",
    "n_gpus_per_node": "training.ranks, of all nodes together",
    "nnodes": "cluster.nodes",
    "num_generations": "policy.samples, of kind grpo",
    "num_iterations": "training.mini_batch_size, by which an iteration has batch_size / mini_batch_size updates",
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
    "project_name": "telemetry.wandb",
    "report_to": "telemetry",
    "reward": "verifier",
    "reward_funcs": "verifier",
    "reward_function": "verifier",
    "reward_model": "verifier, of kind http",
    "rollout_n": "policy.samples, of kind grpo",
    "save_freq": "training.checkpoint_every",
    "save_steps": "training.checkpoint_every",
    "save_total_limit": "training.keep_weights",
    "steps": "training.iterations",
    "teacher_model_name_or_path": "teacher.model",
    "teacher_prompt": "prompt.teacher.text, what the teacher reads in place of the student's prompt",
    "tensor_parallel_size": "student.backend.launch.tensor_parallel_size",
    "total_epochs": "training.epochs",
    "total_training_steps": "training.iterations",
    "test_freq": "evaluation.eval_every",
    "train_batch_size": "training.batch_size",
    "train_files": "data.train",
    "val_files": "evaluation.problems",
    "vllm_gpu_memory_utilization": "student.backend.launch.memory_fraction",
    "vllm_tensor_parallel_size": "student.backend.launch.tensor_parallel_size",
    "wandb_project": "telemetry.wandb",
    "warmup_ratio": "training.warmup_iterations",
    "warmup_steps": "training.warmup_iterations",
}
# Features that people look for and that are not there, by the names that TRL, verl, PEFT or we would give them.
_LORA = "LoRA is `training.lora: {rank, alpha, targets, rank_stabilised}`"
_ADAMW = "the optimiser is AdamW: its keys are `training.learning_rate` and `training.weight_decay`"
_SERVERS = "servers are `student.backend` and `teacher.backend`, of a kind such as `vllm`"
_NOT_BUILT = "it is not built (docs/not-built.md)"
_QUANTISED = "there is no training over quantised weights: LoRA is `training.lora`, over weights of training.dtype"
CANNOT_RESUME = "runs are resumed by a command: `spot-async train --resume RUN`, `spot-async eval --resume RUN`"
NOT_THERE: Mapping[str, str] = {
    **dict.fromkeys(("lora", "lora_rank", "lora_r", "lora_alpha", "use_lora", "lora_config"), _LORA),
    **dict.fromkeys(("peft", "peft_config", "use_peft", "adapter"), _LORA),
    **dict.fromkeys(("qlora", "load_in_4bit", "load_in_8bit"), _QUANTISED),
    **dict.fromkeys(
        ("resume", "resume_from", "resume_mode", "resume_from_checkpoint", "resume_from_path"), CANNOT_RESUME
    ),
    **dict.fromkeys(("optim", "optimizer", "adam", "adamw", "adam_beta1", "adam_beta2", "adam_epsilon"), _ADAMW),
    **dict.fromkeys(("inference", "generator", "use_vllm", "vllm", "vllm_mode", "sglang"), _SERVERS),
    **dict.fromkeys(
        ("tools", "tool_config", "multi_turn", "environments", "entropy_coef", "entropy_coeff"), _NOT_BUILT
    ),
    "deepspeed": "DeepSpeed is not built in: `training.sharding: fsdp2` shards, `training.offload` offloads",
    "hedge_after_s": "hedged requests were removed: take it out",
    "lmbda": "TRL's lmbda is `policy.student_share` of `policy.kind: distill` (docs/coming-from.md)",
    "logging_steps": "every iteration is logged",
    **dict.fromkeys(
        ("save", "load"),
        "KD's responses are kept in the file of `teacher.cache`; `teacher.replay: true` trains from them alone",
    ),
    **dict.fromkeys(("push_to_hub", "hub_model_id"), "a student is pushed by a command: `spot-async push RUN`"),
}
# What users of other programs give as a `kind`, and what fits. Where nothing does, the known kinds are listed.
_OPD = "on-policy distillation by the reverse KL is 'opd'"
_DISTILL = "divergences and their mixtures are keys of 'distill', which has presets (docs/coming-from.md)"
_OF_TEACHER = "learning from the teacher's own responses is 'kd'"
_REWARDS = "of methods that learn from rewards alone there is 'grpo'; one of your own is a plug-in (docs/library.md)"
_V1 = "'openai' speaks to servers with OpenAI's routes (docs/remote-teachers.md says what these can give)"
_TORCH = "'local' computes a Hugging Face directory in torch"
_JUDGED = "'http' asks a server that judges or runs code (docs/data.md); one of your own is a plug-in (docs/library.md)"
OTHER_KINDS: Mapping[registry.Group, Mapping[str, str]] = {
    "policies": {
        **dict.fromkeys(("minillm", "on_policy_distillation"), _OPD),
        **dict.fromkeys(("gkd", "jsd", "opsd", "forward_kl", "reverse_kl", "rkl"), _DISTILL),
        **dict.fromkeys(("seqkd", "seq_kd", "sft"), _OF_TEACHER),
        **dict.fromkeys(("dapo", "dpo", "gspo", "kto", "orpo", "ppo", "reinforce", "rloo"), _REWARDS),
        **dict.fromkeys(("gold", "uld"), "models with different tokenizers are not built (docs/not-built.md)"),
    },
    "backends": {
        **dict.fromkeys(
            ("api", "azure", "deepinfra", "fireworks", "http", "litellm", "llama.cpp", "llama_cpp", "llamacpp",
             "lm_studio", "lmdeploy", "lmstudio", "mlx", "ollama", "openrouter", "tensorrt_llm", "tgi", "together",
             "trtllm"), _V1,
        ),
        **dict.fromkeys(("hf", "huggingface", "pytorch", "torch", "transformers"), _TORCH),
    },
    "verifiers": {
        **dict.fromkeys(("code", "judge", "llm_judge", "reward_model", "rubric"), _JUDGED),
    },
}  # fmt: skip
PLACES_SHOWN = 3
CLOSE = 0.75  # of names that are likely misspelt; less alike ones mislead
SAME_START = 5  # letters, as in `trainer` for `training`


def unknown_key(name: str, known: Sequence[str], root: type[BaseModel]) -> str:
    """Return the complaint about the key `name` in a section of the `known` keys.

    It suggests what was most likely meant: a key of this section, or of any other below `root`.
    """
    if name in NOT_THERE:
        return f"unknown key; {NOT_THERE[name]}"
    if name in OTHER_TRAINERS:
        key, _, note = OTHER_TRAINERS[name].partition(", ")
        return f"unknown key; here it is `{key}`" + (f" ({note})" if note else "")
    section = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if not section and (places := [path for path in paths(root) if path.rpartition(".")[2] == name]):
        listed = " or ".join(f"`{path}`" for path in places[:PLACES_SHOWN])
        return f"unknown key; did you mean {listed}?"
    close = section or difflib.get_close_matches(name, known, n=1, cutoff=CLOSE)
    close = close or [key for key in known if key.startswith(name[:SAME_START])][:1]
    return "unknown key; " + (f"did you mean `{close[0]}`?" if close else f"known keys: {', '.join(known)}")


def unknown_option(option: str, value: str, root: type[BaseModel]) -> str:
    """Return the complaint about an option such as `--lr` of a command that takes keys of the configuration."""
    name = option.lstrip("-").replace("-", "_")
    if name in ("config", "config_file"):
        return f"{option}: no such option; the file is given without one: {value or 'CONFIG'}"
    if name in NOT_THERE:
        return f"{option}: no such option; {NOT_THERE[name]}"
    keys = [path for path in paths(root) if path.rpartition(".")[2] == name]
    if name in OTHER_TRAINERS:
        keys = [OTHER_TRAINERS[name].partition(", ")[0]]
    if name.partition(".")[0] in root.model_fields:
        keys = [name]
    shown = "..." if not value or names_secret(name) or looks_secret(value) else value
    given = " or ".join(f"{key}={shown}" for key in keys[:PLACES_SHOWN])
    return f"{option}: no such option; keys are given without dashes: {given or 'section.key=value'}"


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
