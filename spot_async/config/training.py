"""The `training` section (batches, the loss, the optimiser, LoRA, ranks and memory, checkpoints) and the `cluster`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import pydantic
from pydantic import Field

from spot_async.config.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section
from spot_async.config.suggestions import other_name

LossAggregation = Literal["sequence_mean", "token_mean"]
IMPORTANCE_CAP = 2.0  # of runs with staleness
# The layers of each choice, by the last part of their names. These are PEFT's and the servers' names for them.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS: Mapping[str, tuple[str, ...]] = {"attention": ATTENTION, "mlp": MLP, "all": (*ATTENTION, *MLP)}


class KeptCheckpoints(Section):
    """Which checkpoints stay on disk. The newest is read back before one is deleted."""

    last: int = Field(2, ge=1, description="the newest ones")
    every: PositiveInt | None = Field(None, description="those of multiples of this iteration stay for good")


class LoraConfig(Section):
    """Adapters of low rank. The student's own weights stay as they are."""

    rank: PositiveInt = Field(16, description="inner size r of an adapter's two matrices, (out x r) and (r x in)")
    alpha: PositiveFloat = Field(32.0, description="what an adapter adds is multiplied by alpha / rank")
    targets: Literal["attention", "mlp", "all"] = Field(
        "all", description="the layers that get one: q, k, v, o; gate, up, down; or all seven"
    )

    @property
    def scale(self) -> float:
        """The factor of what an adapter adds to its layer's output."""
        return self.alpha / self.rank

    @pydantic.model_validator(mode="before")
    @classmethod
    def _explain(cls, tree: Any) -> Any:
        """Give the reason for what is not there before anything else is said."""
        if not isinstance(tree, dict):
            return tree
        targets = tree.get("targets")
        names = targets if isinstance(targets, list) else [targets]
        for name in [*tree, *(each for each in names if isinstance(each, str))]:
            meant = other_name(name, "training.lora")
            if meant is not None and (meant.says or name in tree):
                raise ValueError(f"{name}: {meant.answer}")
        return tree


class TrainingConfig(Section):
    """The student's optimisation."""

    epochs: PositiveInt | None = Field(None, description="passes over the problems; exclusive with iterations")
    iterations: PositiveInt | None = Field(None, description="rollout-and-train iterations")
    batch_size: PositiveInt = Field(128, description="prompts per iteration")
    refill: bool = Field(
        False,
        description="a batch is `batch_size` prompts with supervision, and those without lie between them: others come "
        "in their place. So `iterations` and `epochs` draw so many prompts at least",
    )
    refill_at_most: PositiveInt = Field(
        4, description="with `refill`: the run ends if more than so many batches of prompts in a row taught nothing"
    )
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
        3e-6, description="AdamW's highest learning rate, after warm-up; `lora` needs a higher one (docs/running.md)"
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
        "the trainer before an iteration's first update; default: `served` with `max_staleness: 0` and a policy "
        "without `revise`, else `recomputed`",
    )
    importance_cap: PositiveFloat | None = Field(
        None,
        description="weighs each token's policy term by min(recomputed / served probability, cap); off by default, but "
        "2.0 in a run with staleness. Needs `behavior: recomputed`",
    )
    normalize_advantages: bool = Field(
        False,
        description="shift and scale the advantages of an iteration's sampled tokens to mean 0 and standard deviation "
        "1 before its first update",
    )
    lora: LoraConfig | None = Field(
        None, description="train adapters of low rank beside frozen weights (docs/running.md); default: all weights"
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
    step_timeout_s: PositiveFloat = Field(
        1800.0, description="longest time of a training step, a `revise` or `observe`"
    )

    def _check(self) -> None:
        if self.batch_size % self.mini_batch_size:
            divisors = [number for number in range(1, self.batch_size + 1) if self.batch_size % number == 0]
            nearest = min(divisors, key=lambda number: abs(number - self.mini_batch_size))  # on a tie the smaller one
            raise ValueError(
                f"mini_batch_size={self.mini_batch_size} must divide batch_size={self.batch_size}: "
                f"the nearest that does is {nearest}"
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

    def recomputed_layers(self, layers: int) -> int:
        """Return how many of the student's layers run again in the backward pass."""
        return layers if self.recompute_layers is True else min(int(self.recompute_layers), layers)

    def tokens_per_pass(self, *, is_packed: bool) -> int:
        """Return `micro_batch_tokens`, or its default."""
        return self.micro_batch_tokens or (16384 if is_packed else 4096)

    def recomputes_apart(self, update: int) -> bool:
        """Whether a pass of its own recomputes log pi_old for an update of an iteration, counted from 0.

        The first update's training pass finds it itself, unless advantages are normalised over the iteration before.
        """
        return self.behavior == "recomputed" and (update > 0 or self.normalize_advantages)

    def under_staleness(self, max_staleness: int, *, is_revised: bool = False) -> TrainingConfig:
        """Return the settings to train with where samples lag, without defaults that follow from others.

        The reasons are in docs/methods.md, "What is measured at which version".

        `behavior` is what its default means. With staleness there is also an `importance_cap`, unless the configuration
        states one or `behavior: served`. Recomputed advantages alone would be weighed as older weights sampled the
        tokens. More directories of weights are kept, because those being served may be older by `max_staleness` steps.

        Where a policy revises batches, log pi_old is the trainer's too, as what the policy is told is.
        """
        behavior = self.behavior or ("recomputed" if max_staleness or is_revised else "served")
        changes: dict[str, Any] = {"behavior": behavior, "keep_weights": self.keep_weights + max_staleness}
        if max_staleness and behavior == "recomputed" and self.importance_cap is None:
            changes["importance_cap"] = IMPORTANCE_CAP
        return self.model_copy(update=changes)


class ClusterConfig(Section):
    """The machines (nodes) that the trainer's ranks are spread over. Each runs the same command.

    What is not given is taken from the scheduler's environment variables (docs/distributed.md). With `kind: ray` the
    command is given once: node 0 is this machine, and Ray chooses the others.
    """

    DEVICE_GIB: ClassVar[float] = 80.0  # of the GPUs that the paper's recipes are for

    device_gib: PositiveFloat | None = Field(
        None,
        description="memory of each GPU, which `launch.memory_fraction` is a share of; default: as nvidia-smi says, "
        "else 80",
    )
    kind: Literal["ray"] | None = Field(
        None,
        description="`ray`: Ray chooses the machines of servers with `launch.resources`, and of the trainer's other "
        "nodes; needs the package `ray`",
    )
    resources: dict[str, PositiveFloat] = Field(
        {},
        description="with kind=ray: what each of the trainer's nodes but this one takes of a machine, by Ray's names, "
        "such as `{GPU: 8, CPU: 32}`",
    )
    nodes: PositiveInt | None = Field(
        None, description="how many machines; default: as many as the scheduler says, else 1"
    )
    node_rank: int | None = Field(
        None, ge=0, description="this machine's number, from 0: node 0 has the run, its files and its servers"
    )
    address: str | None = Field(
        None,
        min_length=1,
        description="node 0's address or name, as the other nodes reach it; with kind=ray: HOST:PORT of Ray's head, "
        "default: $RAY_ADDRESS, else the cluster that this machine is a node of",
    )
    port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="node 0 listens on this port; default: the scheduler's, else 29600",
    )
    secret_file: Path | None = Field(
        None,
        description="file with the run's secret, readable by its owner alone; default: $SPOT_ASYNC_CLUSTER_SECRET. Who "
        "does not know it cannot join. With kind=ray the run makes one where none is given",
    )
    join_timeout_s: PositiveFloat = Field(
        600.0,
        description="longest wait for all nodes, at the start and after one was lost; with kind=ray also for Ray to "
        "find room",
    )

    def _check(self) -> None:
        if self.kind == "ray" and self.node_rank is not None:
            raise ValueError("node_rank: with kind=ray this machine is node 0: remove this key, or kind")
        if self.resources and (self.kind != "ray" or not self.placed_nodes):
            raise ValueError("resources: needs kind=ray, and nodes=2 or more")
        if self.placed_nodes and not self.resources:
            raise ValueError(f"nodes={self.nodes}: with kind=ray say in resources what each but this one takes")

    @property
    def placed_nodes(self) -> Sequence[int]:
        """Return the trainer's nodes that Ray places."""
        return range(1, self.nodes or 1) if self.kind == "ray" else ()
