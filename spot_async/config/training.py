"""The `training` section: batches, the loss, the optimiser, ranks and memory, checkpoints."""

from __future__ import annotations

from typing import Literal, Self

import pydantic
from pydantic import Field

from spot_async.config.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section
from spot_async.config.lora import LoraConfig

LossAggregation = Literal["sequence_mean", "token_mean"]


class KeptCheckpoints(Section):
    """Which checkpoints stay on disk. The newest is read back before one is deleted."""

    last: int = Field(2, ge=1, description="the newest ones")
    every: PositiveInt | None = Field(None, description="those of multiples of this iteration stay for good")


class TrainingConfig(Section):
    """The student's optimisation."""

    epochs: PositiveInt | None = Field(None, description="passes over the problems; exclusive with iterations")
    iterations: PositiveInt | None = Field(None, description="rollout-and-train iterations")
    batch_size: PositiveInt = Field(128, description="prompts per iteration")
    mini_batch_size: PositiveInt = Field(32, description="prompts per optimiser update; divides batch_size")
    packing: Literal["auto"] | bool = Field(
        "auto",
        description="`true`: trajectories share a row, each with its own positions and attention, so there is no "
        "padding; `false`: one row each, padded; `auto`: packed unless the student's architecture cannot be (windows, "
        "states in place of attention)",
    )
    micro_batch_tokens: PositiveInt | None = Field(
        None,
        description="tokens per forward pass of one rank, padding included; default: 16384, or 4096 where trajectories "
        "are padded",
    )
    learning_rate: PositiveFloat = Field(
        3e-6, description="AdamW's highest learning rate, after warm-up; `lora` needs a higher one (docs/lora.md)"
    )
    schedule: Literal["cosine", "constant"] = Field(
        "cosine",
        description="after warm-up the learning rate falls to 0 by the end (`cosine`) or stays (`constant`); it "
        "changes once per iteration",
    )
    schedule_iterations: PositiveInt | None = Field(
        None,
        description="the iteration after which the cosine is 0; default: the run's last. If more iterations "
        "are to follow later, give the final number from the beginning; otherwise the learning rate rises on resuming",
    )
    warmup_iterations: int = Field(0, ge=0, description="iterations in which the learning rate rises from 0")
    weight_decay: NonNegativeFloat = Field(0.01, description="AdamW's weight decay")
    max_grad_norm: PositiveFloat = Field(1.0, description="gradients with a larger norm are scaled down to it")
    clip: PositiveFloat = Field(0.2, description="epsilon of the clipped policy ratio")
    dual_clip: float | None = Field(None, gt=1, description="bounds the loss at negative advantages; off by default")
    reference_kl: NonNegativeFloat = Field(0.0, description="coefficient of the KL to the reference")
    loss_aggregation: LossAggregation = Field(
        "sequence_mean",
        description="`sequence_mean`: the mean of each response, then over responses; `token_mean`: the mean over all "
        "tokens of a mini-batch",
    )
    behavior: Literal["served", "recomputed"] | None = Field(
        None,
        description="pi_old in ratios and advantages: as the inference server reported it (`served`), or recomputed by "
        "the trainer before an iteration's first update; default: `served` with `max_staleness: 0`, else `recomputed`",
    )
    importance_cap: PositiveFloat | None = Field(
        None,
        description="weighs each token's policy term by min(recomputed / served probability, cap); off by default, but "
        "2.0 in a run with staleness. Needs `behavior: recomputed`",
    )
    lora: LoraConfig | None = Field(
        None, description="train adapters of low rank beside frozen weights (docs/lora.md); default: train all weights"
    )
    device: Literal["auto", "cuda", "cpu"] = Field(
        "auto",
        description="where the ranks compute; `auto`: on a GPU each, or on the CPU if torch finds none. It refuses the "
        "CPU with `dtype: bfloat16`, and beside servers of this machine that name GPUs",
    )
    ranks: PositiveInt = Field(1, description="trainer processes; each of `cluster.nodes` has an equal share")
    sharding: Literal["none", "fsdp2"] = Field(
        "none",
        description="`none`: each rank holds the whole student; `fsdp2`: each holds a part of weights, gradients and "
        "optimiser state, and layers are gathered while they compute",
    )
    recompute_layers: bool | PositiveInt = Field(
        False,
        description="activation checkpointing: layers keep only their inputs and run again in the backward pass; a "
        "number: so many of the layers do, the first ones",
    )
    compile: bool = Field(
        False,
        description="compile the student's layers by torch.compile. It takes a minute when the trainer starts. The "
        "start fails if they cannot be compiled, or if their numbers are not those of plain layers",
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description="what of a rank's training state rests in the CPU's memory: `optimizer`: AdamW's moments, which "
        "come to the GPU for the step; `all`: weights and gradients too, stepped on the CPU (needs `sharding: fsdp2`)",
    )
    threads: PositiveInt = Field(1, description="CPU threads of each rank")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="type of forward passes and published weights")
    keep_weights: int = Field(
        2,
        ge=2,
        description="published weight directories kept; one is being served, so 2 at least, and `max_staleness` more "
        "are kept",
    )
    weights_directory: str | None = Field(
        None,
        min_length=1,
        description="directory in which a run publishes its weights, in a private one of its own that ends with the "
        "run; `/dev/shm`: in memory. `weights/` then gets those of checkpoints and of `best` alone. Needs checkpoints, "
        "and servers on this machine. Default: `weights/` of the run directory",
    )
    checkpoint_every: int = Field(
        10,
        ge=0,
        description="iterations between two checkpoints, which `train --resume` continues from; the last iteration has "
        "one too; 0: none at all",
    )
    keep_checkpoints: KeptCheckpoints = Field(KeptCheckpoints(), description="the checkpoints that are kept")
    restarts: int = Field(
        2,
        ge=0,
        description="how often in a run a trainer whose processes were lost (killed, out of memory) is started again, "
        "from the newest checkpoint; without checkpoints it is not",
    )
    step_timeout_s: PositiveFloat = Field(1800.0, description="longest time one iteration of training may take")

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.batch_size % self.mini_batch_size:
            raise ValueError(
                f"mini_batch_size={self.mini_batch_size} must divide batch_size={self.batch_size}: "
                f"the nearest that does is {nearest_divisor(self.batch_size, self.mini_batch_size)}"
            )
        if self.offload == "all" and self.sharding != "fsdp2":
            raise ValueError(
                f"offload=all needs sharding=fsdp2, not {self.sharding}: set training.sharding=fsdp2, or "
                "training.offload=optimizer, which keeps only AdamW's moments on the CPU"
            )
        if self.weights_directory is not None and not self.checkpoint_every:
            raise ValueError(
                f"weights_directory={self.weights_directory} with checkpoint_every=0: nothing of the run would be left "
                "after a kill: set checkpoint_every, or weights_directory=null"
            )
        if self.epochs is None and self.iterations is None:
            raise ValueError("give exactly one of epochs and iterations; both are missing")
        if self.epochs is not None and self.iterations is not None:
            raise ValueError(
                f"give exactly one of epochs and iterations, not both epochs={self.epochs} and "
                f"iterations={self.iterations}: take one away by training.iterations=null or training.epochs=null"
            )
        if self.iterations is not None and self.warmup_iterations >= self.iterations:
            raise ValueError(
                f"warmup_iterations={self.warmup_iterations} leaves nothing of iterations={self.iterations}: lower it"
            )
        if self.schedule_iterations is not None and self.schedule == "constant":
            raise ValueError(
                f"schedule_iterations={self.schedule_iterations}: with schedule=constant the learning rate never "
                "falls: set it to null"
            )
        return self

    def recomputed_layers(self, layers: int) -> int:
        """Return how many of the student's layers run again in the backward pass."""
        return layers if self.recompute_layers is True else min(int(self.recompute_layers), layers)

    def tokens_per_pass(self, *, is_packed: bool) -> int:
        """Return `micro_batch_tokens`, or its default."""
        return self.micro_batch_tokens or (16384 if is_packed else 4096)

    def behavior_under(self, max_staleness: int) -> Literal["served", "recomputed"]:
        """Return whose pi_old it is: `behavior`, or its default."""
        return self.behavior or ("recomputed" if max_staleness else "served")


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of `number` closest to `wanted`, the smaller one on a tie."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))
