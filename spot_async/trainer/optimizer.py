"""AdamW, with its state where `training.offload` says.

Offloaded state rests on the CPU. One parameter's moments at a time come to its device for the step, so the step's
arithmetic, and with it the numbers, are those of a run without. With `offload: all` FSDP2 keeps the parameters on the
CPU, and plain AdamW steps them there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from spot_async.config import TrainingConfig
from spot_async.trainer.parallel import local

STATE = ("step", "exp_avg", "exp_avg_sq")  # of a parameter in AdamW; copies that teachers have may stand beside


def new_optimizer(parameters: Iterable[nn.Parameter], training: TrainingConfig) -> torch.optim.AdamW:
    """Return the optimiser of the parameters that are trained, with the state in which AdamW begins.

    Moments that the first step allocated would lie among what that step's activations leave free, and a GPU could not
    give that memory back while another process needs it.
    """
    kind = OffloadedAdamW if training.offload == "optimizer" else torch.optim.AdamW
    optimizer = kind(parameters, lr=training.learning_rate, weight_decay=training.weight_decay, fused=True)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state_of(optimizer, parameter)
    return optimizer


def state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return a parameter's live state. One that has had no step gets the state with which AdamW begins."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        device = torch.device("cpu") if isinstance(optimizer, OffloadedAdamW) else parameter.device
        state["step"] = torch.zeros((), device=device)
        for kind in ("exp_avg", "exp_avg_sq"):
            state[kind] = torch.zeros_like(parameter, requires_grad=False).to(device)
    return state


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose moments and steps rest on the CPU. A parameter's are copied to its device for its own step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is ever given
        """Step every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = state_of(self, parameter)
                resting = {kind: local(state[kind]) for kind in STATE}
                # A copy also on a CPU, so that what is tested there is what a GPU does.
                moved = {kind: each.to(parameter.device, copy=True) for kind, each in resting.items()}
                adamw(
                    [local(parameter)],
                    [local(parameter.grad)],
                    [moved["exp_avg"]],
                    [moved["exp_avg_sq"]],
                    [],
                    [moved["step"]],
                    fused=True,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                for kind, each in resting.items():
                    each.copy_(moved[kind])
