"""The schema of LoRA: small matrices that are trained beside frozen weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import pydantic
from pydantic import Field

from spot_async.config.base import PositiveFloat, PositiveInt, Section

# The layers of each choice, by the last part of their names. These are PEFT's and the servers' names for them.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
TARGETS: Mapping[str, tuple[str, ...]] = {"attention": ATTENTION, "mlp": MLP, "all": (*ATTENTION, *MLP)}

_DORA = "DoRA is not there: vLLM and SGLang refuse it, and sharded ranks would merge it wrongly"
_MODULES = "whole layers are not trained beside an adapter: SGLang ends on such a file, or answers with other numbers"
_EMBEDDINGS = (
    "no adapter for the embedding or the output layer: merging is wrong where they are tied, and vLLM fails when it "
    "scores prompts"
)
# Names of PEFT's that ask for what is not there, with the reason.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("dora", "use_dora"), _DORA),
    "modules_to_save": _MODULES,
    **dict.fromkeys(("embeddings", "embed_tokens", "lm_head", "output_layer"), _EMBEDDINGS),
    **dict.fromkeys(("dropout", "lora_dropout"), "no dropout: what is trained must be what has sampled"),
    "bias": "biases stay as they are: servers take none with an adapter",
}
OTHER_NAMES: Mapping[str, str] = {
    "r": "rank",
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "target_modules": "targets",
    "use_rslora": "rank_stabilised",
}


class LoraConfig(Section):
    """Adapters of low rank. The student's own weights stay as they are."""

    rank: PositiveInt = Field(16, description="inner size r of an adapter's two matrices, (out x r) and (r x in)")
    alpha: PositiveFloat = Field(32.0, description="what an adapter adds is multiplied by alpha / rank")
    targets: Literal["attention", "mlp", "all"] = Field(
        "all", description="the layers that get one: q, k, v, o; gate, up, down; or all seven"
    )
    rank_stabilised: bool = Field(False, description="multiply by alpha / sqrt(rank) instead")

    @property
    def scale(self) -> float:
        """The factor of what an adapter adds to its layer's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _explain(cls, tree: Any) -> Any:
        """Give the reason for what is not there before anything else is said."""
        if not isinstance(tree, dict):
            return tree
        targets = tree.get("targets")
        names = targets if isinstance(targets, list) else [targets]
        for name in [*tree, *(each for each in names if isinstance(each, str))]:
            if name in REFUSED:
                raise ValueError(f"{name}: {REFUSED[name]}")
            if name in OTHER_NAMES and name in tree:
                raise ValueError(f"{name}: here it is `{OTHER_NAMES[name]}`")
        return tree
