"""Compiled layers: compiled once, and refused where they cannot be or where their numbers are others.

That their numbers are right is shown beside those of plain layers, in test_trainer.py, test_lora.py, test_process.py
and test_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from makers import MakeTrainer, MixedBatch
from torch._dynamo.utils import counters
from transformers import BertConfig, BertModel

from spot_async.errors import DataError
from spot_async.trainer.compiling import compile_layers
from spot_async.trainer.messages import Batch


@pytest.mark.long
@pytest.mark.parametrize("recomputed", [False, True])
def test_layers_are_compiled_once_for_all_lengths_and_numbers_of_documents(
    student_trainer: MakeTrainer, mixed_batch: MixedBatch, recomputed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.compiler.reset()
    counters.clear()
    trainer = student_trainer(compile=True, recompute_layers=recomputed)
    assert "compiled the layers in " in capsys.readouterr().err
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    for iteration, count in enumerate((7, 3, 1)):
        trainer.train(Batch(iteration, tuple(mixed_batch()[:count])))
    assert counters["stats"]["unique_graphs"] == graphs


class Compiler:
    """Stands for `torch.compile`. Layers are right in the trial's plain pass, and from then on off by a factor.

    Without a factor they cannot be compiled.
    """

    def __init__(self, factor: float | None) -> None:
        self._factor = factor

    def __call__(self, forward: Callable[..., torch.Tensor], **_: Any) -> Callable[..., torch.Tensor]:
        calls = 0

        def compiled(*given: Any, **keys: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 1:
                return forward(*given, **keys)
            if self._factor is None:
                raise RuntimeError("No working C++ compiler found\nin many lines")
            return forward(*given, **keys) * self._factor

        return compiled


@pytest.mark.parametrize(
    ("factor", "training", "reason"),
    [
        (1.001, {}, r"compiled layers are 0\.\S+ off plain ones, of the norm, and 1e-05 is allowed in float32; set "
                    "training.compile=false$"),
        (1.5, {"dtype": "bfloat16"}, r"compiled layers are 0\.\S+ off plain ones, of the norm, and 0\.05 is allowed"),
        (torch.nan, {}, "compiled layers are nan off plain ones"),
        (None, {}, r"the student cannot be compiled: No working C\+\+ compiler found; set training.compile=false$"),
    ],
    ids=["wrong", "wrong in bfloat16", "not a number", "no compiler"],
)  # fmt: skip
def test_layers_that_cannot_be_compiled_or_are_wrong_then_are_refused_before_training(
    student_trainer: MakeTrainer,
    monkeypatch: pytest.MonkeyPatch,
    factor: float | None,
    training: dict[str, Any],
    reason: str,
) -> None:
    monkeypatch.setattr(torch, "compile", Compiler(factor))
    with pytest.raises(DataError, match=f"^training.compile=true: {reason}"):
        student_trainer(compile=True, **training)


def test_right_layers_pass_the_trial_and_leave_nothing_behind(
    student_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", Compiler(1.0))
    trainer = student_trainer(compile=True)
    assert all(each.grad is None for each in trainer.model.parameters())


def test_a_student_that_marks_no_layers_is_refused() -> None:
    with pytest.raises(DataError, match=r"^training.compile=true: BertModel marks no layers; set training.compile=f"):
        compile_layers(BertModel(BertConfig(num_hidden_layers=0, vocab_size=5)))
