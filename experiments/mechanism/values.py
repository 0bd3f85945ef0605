"""What a student's choices are worth in the contexts that a forecast measured: E[V] a decision.

A forecast knows the value of each candidate at the positions that it probed: how often the untrained student ended
right after it. A trained student has other probabilities there. So what it gained can be held against the forecast in
the very contexts that the forecast is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from forecasts import MeasuredPrompt, ProbedPosition
from transformers import AutoModelForCausalLM


def decision_value(model: Path, prompts: Sequence[MeasuredPrompt]) -> float:
    """Return the mean over measured positions of sum_v pi(v) s(v), in float64.

    `pi` is the model's distribution at the position, normalised over the candidates, and `s` their share of correct
    probes.
    """
    student = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False).eval()
    worth = []
    with torch.inference_mode():
        for prompt in prompts:
            if not prompt.positions:
                continue
            ids = torch.tensor([*prompt.prompt_ids, *prompt.response_ids])
            logits = student(ids[None]).logits[0].double()
            worth += [value_at(each, logits[prompt.prompt_tokens + each.position - 1]) for each in prompt.positions]
    return sum(worth) / len(worth)


def value_at(position: ProbedPosition, logits: torch.Tensor) -> float:
    """Return sum_v pi(v) s(v) at a position. `logits` (V,) are those that predict its token."""
    candidates = [each for each in position.candidates if each.judged]
    shares = torch.tensor([each.correct / each.judged for each in candidates], dtype=torch.float64)
    return float(torch.softmax(logits[[each.token_id for each in candidates]], dim=0) @ shares)
