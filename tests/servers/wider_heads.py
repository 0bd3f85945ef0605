"""Widens the attention heads of a Qwen3 model to twice their width, without changing what it computes.

vLLM's CPU kernels want heads of 32 or more. The new dimensions of each head are zero. Rotary pairs are
(i, i + width / 2), so the old halves go to the beginnings of the new ones, where the squared base gives them the
frequencies that they had. Queries and keys come out of their projections larger by sqrt(2), so that the mean square
over twice as many dimensions stays what it was. The weights of the norms take that back; those of the queries take back
less, since scores are divided by the root of the width.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any


def with_wider_heads(source: Path, target: Path) -> Path:
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(source, dtype=torch.float32)
    old = model.config
    width = old.head_dim
    rope = {**old.rope_parameters, "rope_theta": old.rope_parameters["rope_theta"] ** 2}
    settings = old.to_dict() | {"head_dim": 2 * width, "rope_parameters": rope}
    wider = Qwen3ForCausalLM(Qwen3Config(**settings)).to(torch.float32)
    places = torch.cat([torch.arange(width // 2), width + torch.arange(width // 2)])

    def widened(tensor: Any, heads: int) -> Any:
        """Rows (heads * width, ...) at their places among twice as many; the others are zero."""
        split = tensor.reshape(heads, width, *tensor.shape[1:])
        made = tensor.new_zeros(heads, 2 * width, *tensor.shape[1:])
        made[:, places] = split
        return made.flatten(0, 1)

    found = {}
    for name, tensor in model.state_dict().items():
        part = name.split(".")[-2]
        if part in ("q_proj", "k_proj"):
            heads = old.num_attention_heads if part == "q_proj" else old.num_key_value_heads
            found[name] = math.sqrt(2) * widened(tensor, heads)
        elif part == "v_proj":
            found[name] = widened(tensor, old.num_key_value_heads)
        elif part == "o_proj":
            found[name] = widened(tensor.T, old.num_attention_heads).T.contiguous()
        elif part in ("q_norm", "k_norm"):
            found[name] = widened(tensor, 1) / (1 if part == "q_norm" else math.sqrt(2))
        else:
            found[name] = tensor
    wider.load_state_dict(found)
    wider.generation_config = model.generation_config
    wider.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return target
