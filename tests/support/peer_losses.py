"""Runs the distillation losses of other programs on given numbers: `python peer_losses.py NUMBERS.npz FOUND.npz`.

The interpreter is that of an environment with torch and these programs, but not all that they depend on. So functions
are executed from their installed source, and what they import is given here. Nothing of spot-async is imported.

Axes: B responses of T tokens at most, V tokens of the vocabulary. Each loss is a mean over all tokens of the responses.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

UNASKED = -100  # a label that has no loss


def functions(package: str, file: str, *names: str, **given: Any) -> SimpleNamespace:
    """Return functions and methods of a file of a package, which see one another, torch and what is `given`."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"no {package}")
    path = Path(spec.submodule_search_locations[0]) / file
    found = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names
    ]
    missing = set(names) - {node.name for node in found}
    assert not missing, f"{path} has no {sorted(missing)}"
    for node in found:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    module = ast.parse("from __future__ import annotations")
    module.body += found
    known = {"torch": torch, "F": torch.nn.functional, "dataclass": dataclass} | given
    exec(compile(module, str(path), "exec"), known)
    return SimpleNamespace(**{name: known[name] for name in names})


class Numbers:
    """What student and teacher say of each token, in float64."""

    def __init__(self, file: str) -> None:
        self.__dict__ |= {name: torch.tensor(array) for name, array in np.load(file).items()}
        self.labels = torch.where(self.mask, self.sampled, UNASKED)  # (B, T)

    mask: torch.Tensor  # (B, T) bool
    sampled: torch.Tensor  # (B, T) int64
    student: torch.Tensor  # (B, T, V) logits
    teacher: torch.Tensor  # (B, T, V) logits
    served: torch.Tensor  # (B, T) log-probabilities of the sampled tokens, by the server

    def sampled_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities (B, T) of the sampled tokens."""
        return logits.log_softmax(-1).gather(-1, self.sampled[..., None]).squeeze(-1)


# trl.experimental.gkd


def trl_gkd(numbers: Numbers, student: torch.Tensor, beta: float) -> torch.Tensor:
    """`compute_loss` passes no temperature on, so this is at temperature 1, whatever the responses were sampled at."""
    trl = functions("trl", "experimental/gkd/gkd_trainer.py", "generalized_jsd_loss")
    loss: torch.Tensor = trl.generalized_jsd_loss(
        student, numbers.teacher, numbers.labels, beta=beta, num_items_in_batch=numbers.mask.sum()
    )
    return loss


# verl.trainer.distillation


class Settings(SimpleNamespace):
    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


def verl_distillation(numbers: Numbers, student: torch.Tensor, **keys: Any) -> torch.Tensor:
    """`distillation_loss` with the keys of `distillation.distillation_loss` and the defaults of its YAML."""
    masked = functions("verl", "utils/torch_functional.py", "masked_sum", "masked_mean")
    core = functions(
        "verl",
        "trainer/ppo/core_algos.py",
        "agg_loss",
        "kl_penalty",
        "kl_penalty_forward",
        "compute_policy_loss_vanilla",
        verl_F=masked,
        AlgoConfig=type("AlgoConfig", (), {}),
    )
    topk = functions(
        "verl",
        "trainer/distillation/fsdp/losses.py",
        "compute_forward_kl_topk",
        "kl_divergence",
        get_ulysses_sequence_parallel_world_size=lambda: 1,
    )
    losses = functions(
        "verl",
        "trainer/distillation/losses.py",
        "distillation_loss",
        "compute_distillation_loss_range",
        "compute_distillation_loss_reverse_kl_estimator",
        "compute_forward_kl_topk",
        no_padding_2_padding=lambda values, data: values,
        get_distillation_loss_fn=lambda mode: (
            losses.compute_forward_kl_topk
            if mode == "forward_kl_topk"
            else losses.compute_distillation_loss_reverse_kl_estimator
        ),
        get_policy_loss_fn=lambda mode: core.compute_policy_loss_vanilla,
        agg_loss=core.agg_loss,
        kl_penalty=core.kl_penalty,
        Metric=lambda *given, **how: None,
        AggregationType=SimpleNamespace(MIN=0, MAX=1, MEAN=2),
    )
    defaults = {"loss_max_clamp": None, "log_prob_min_clamp": None, "topk": 32, "policy_loss_mode": "vanilla"}
    clips = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "global_batch_info": {}}
    config = SimpleNamespace(distillation_loss=Settings(**defaults | clips | keys))
    actor = Settings(loss_agg_mode="token-mean", loss_scale_factor=None, global_batch_info={})
    output = {"log_probs": numbers.sampled_logprobs(student)}
    data = {
        "response_mask": numbers.mask,
        "old_log_probs": numbers.served,
        "teacher_logprobs": numbers.sampled_logprobs(numbers.teacher)[..., None],
        "dp_size": 1,
        "batch_num_tokens": int(numbers.mask.sum()),
        "global_batch_size": len(numbers.mask),
    }
    if keys["loss_mode"] == "forward_kl_topk":
        best = numbers.teacher.log_softmax(-1).topk(keys["topk"], dim=-1)
        rows = [torch.nested.nested_tensor([*each], layout=torch.jagged) for each in (best.values, best.indices)]
        found = topk.compute_forward_kl_topk(student.flatten(0, 1)[None], *rows, config, "thd")
        output |= {name: each.view(numbers.mask.shape) for name, each in found.items()}
    loss: torch.Tensor = losses.distillation_loss(actor, config, output, data)[0]
    return loss


# prime_rl.trainer.rl


def prime_rl_opd(numbers: Numbers, student: torch.Tensor) -> torch.Tensor:
    """`compute_loss` with the loss type `ref_kl`, which is the algorithms' `opd` and `opsd`."""
    prime = functions(
        "prime_rl",
        "trainer/rl/loss.py",
        "compute_loss",
        "ref_kl_loss_fn",
        "compute_importance_ratio_and_mismatch_kl",
        "_safe_mean",
        LossInputs=SimpleNamespace,
        LossOutputs=SimpleNamespace,
    )
    nothing = torch.zeros_like(numbers.served)
    loss: torch.Tensor = prime.compute_loss(
        [*numbers.sampled_logprobs(student)],
        [*numbers.served],
        [*numbers.sampled_logprobs(numbers.teacher)],
        [*nothing],
        [*numbers.mask],
        rl_weights=[*nothing],
        ce_weights=None,
        ref_kl_weights=[*numbers.mask.double()],
        rl_loss_fn=None,
        rl_scale=1,
        ce_scale=1,
        ref_kl_scale=int(numbers.mask.sum()),
    )[0]
    return loss


# swift.rlhf_trainers


def swift_gkd(
    numbers: Numbers, student: torch.Tensor, beta: float, temperature: float, topk: int | None = None
) -> torch.Tensor:
    """`gkd_loss`, divided by the number of tokens as `GKDTrainer._compute_jsd_loss` does."""
    swift = functions(
        "swift",
        "rlhf_trainers/gkd_loss.py",
        "TeacherOutput",
        "default_log_softmax",
        "default_kl_div",
        "default_gather",
        "jsd_loss",
        "_align_vocab",
        "extract_active",
        "gkd_loss",
    )
    teacher = swift.TeacherOutput(full_logits=numbers.teacher, labels=numbers.labels)
    if topk is not None:
        teacher = teacher.to_topk(topk)
    total, tokens = swift.gkd_loss(student, teacher, numbers.labels, beta, temperature)
    return total / tokens


LOSSES: dict[str, Callable[[Numbers, torch.Tensor], torch.Tensor]] = {
    "gkd@trl beta 0": lambda *given: trl_gkd(*given, beta=0),
    "gkd@trl beta 0.1": lambda *given: trl_gkd(*given, beta=0.1),
    "gkd@trl": lambda *given: trl_gkd(*given, beta=0.5),
    "gkd@trl beta 1": lambda *given: trl_gkd(*given, beta=1),
    "opd@verl": lambda *given: verl_distillation(*given, loss_mode="k1", use_policy_gradient=True),
    "opd@verl k3": lambda *given: verl_distillation(*given, loss_mode="k3", use_policy_gradient=False),
    "opd@verl forward_kl_topk": lambda *given: verl_distillation(
        *given, loss_mode="forward_kl_topk", topk=8, use_policy_gradient=False
    ),
    "opd@prime-rl": prime_rl_opd,
    "opsd@ms-swift": lambda *given: swift_gkd(*given, beta=0.5, temperature=1.2),
    "opsd@ms-swift top-k": lambda *given: swift_gkd(*given, beta=0.5, temperature=1.2, topk=8),
    "opsd@ms-swift beta 0": lambda *given: swift_gkd(*given, beta=0, temperature=1.2),
    "opsd@ms-swift beta 1": lambda *given: swift_gkd(*given, beta=1, temperature=1.2),
}


def main(given: str, found: str) -> None:
    results = {}
    for name, loss_of in LOSSES.items():
        numbers = Numbers(given)
        student = numbers.student.clone().requires_grad_()
        try:
            loss = loss_of(numbers, student)
        except ModuleNotFoundError as error:
            sys.stderr.write(f"{name}: {error}\n")
            continue
        loss.backward()
        assert student.grad is not None
        results |= {f"{name}: loss": loss.item(), f"{name}: gradient": student.grad.numpy()}
    np.savez(found, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
