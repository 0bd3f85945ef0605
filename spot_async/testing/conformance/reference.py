"""Computes exact log-probabilities of the served model: a plain float32 forward that shares no code with any backend.

It also makes the weights that an update is checked with, and broken weights, which must be refused. No other module of
the checks loads torch.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from spot_async.models.weight_files import weight_files
from spot_async.types import Float64Array, IntArray

PERTURBATION = 0.2  # times each tensor's standard deviation; changes log-probabilities by more than any tolerance


class Reference:
    """Log-probabilities of a model directory, computed in this process."""

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        """Load the model. Raises `DataError` if transformers cannot."""
        from transformers.utils.logging import disable_progress_bar

        from spot_async.models.causal_model import load_whole

        disable_progress_bar()
        model: Any = load_whole(directory, dtype=torch.float32)
        self._model = model.eval().to(device)
        self._one_at_a_time = asyncio.Lock()

    async def logprobs(self, prompt_ids: IntArray, response_ids: IntArray, temperature: float = 1.0) -> Float64Array:
        """Return (T, V) float64, where row t is the distribution that decides `response_ids[t]`."""
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._logprobs, prompt_ids, response_ids, temperature)

    @torch.no_grad()
    def _logprobs(self, prompt_ids: IntArray, response_ids: IntArray, temperature: float) -> Float64Array:
        # The last token decides nothing. Without it, the last T outputs are those that decide the response's tokens.
        read = np.concatenate([prompt_ids, response_ids])[:-1]
        ids = torch.from_numpy(read.astype(np.int64))[None].to(self._model.device)
        logits = self._model(input_ids=ids, use_cache=False, logits_to_keep=len(response_ids)).logits[0]
        rows: Float64Array = (logits.double() / temperature).log_softmax(-1).cpu().numpy()
        return rows


def write_changed(source: Path, target: Path, seed: int = 1) -> Path:
    """Write a copy of a model directory with changed weights, as training might have left them."""
    shutil.copytree(source, target)
    draw = torch.Generator().manual_seed(seed)
    for path in weight_files(target):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.ndim > 1 and tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=draw) * tensor.float().std() * PERTURBATION
                tensors[name] = (tensor.float() + noise).to(tensor.dtype)
        save_file(tensors, path, metadata={"format": "pt"})
    return target


def write_broken(source: Path, target: Path) -> dict[str, Path]:
    """Write copies of a model directory that no server may take; return them by what is wrong with each."""
    broken = {name: target / name.replace(" ", "-") for name in ("a file cut off", "a wrong shape", "a tensor missing")}
    for path in broken.values():
        shutil.copytree(source, path, dirs_exist_ok=True)
    cut_off, wrong_shape, missing = (weight_files(path)[-1] for path in broken.values())
    cut_off.write_bytes(cut_off.read_bytes()[: cut_off.stat().st_size // 2])
    tensors = load_file(wrong_shape)
    name = max(tensors)
    save_file({**tensors, name: torch.zeros(3)}, wrong_shape, metadata={"format": "pt"})
    save_file({key: value for key, value in tensors.items() if key != name}, missing, metadata={"format": "pt"})
    return {**broken, "no such directory": target / "nowhere"}
