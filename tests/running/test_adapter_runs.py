"""Runs whose local server gets each version as an adapter: one version a response, and what is learnt is the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problem_files import FEW, FOUR
from safetensors.numpy import load_file

import spot_async
from spot_async.backends.local import LocalBackend
from spot_async.models.adapter_files import WEIGHTS_FILE
from spot_async.models.weight_files import ADAPTER, SINGLE_FILE
from spot_async.types import Generation

pytestmark = pytest.mark.usefixtures("servers_on_threads", "trainer_on_thread")
ROOT = Path(__file__).parents[2]
KEYS = (
    FEW,
    "training.iterations=2",
    *FOUR,
    "training.learning_rate=1e-3",
    "training.lora={rank: 4, targets: all}",
    "sampling.max_response_tokens=48",
    "evaluation=null",
)
AS_ADAPTERS = "student.backend.weights={transport: adapter}"

Run = Callable[..., tuple[Path, list[Generation]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run in a directory of this name; return the directory, and what the student's server answered."""
    monkeypatch.chdir(ROOT)

    def make(name: str, *keys: str) -> tuple[Path, list[Generation]]:
        answered: list[Generation] = []
        generate = LocalBackend.generate

        @functools.wraps(generate)
        async def noted(*values: Any, **named: Any) -> Generation:
            answered.append(await generate(*values, **named))
            return answered[-1]

        with monkeypatch.context() as patch:
            patch.setattr(LocalBackend, "generate", noted)
            spot_async.run("configs/running_sum/opd.yaml", [*KEYS, f"run.directory={tmp_path / name}", *keys])
        return tmp_path / name, answered

    return make


def student(directory: Path) -> dict[str, np.ndarray]:
    return load_file(directory / "student" / ADAPTER / WEIGHTS_FILE)


def tokens(answered: list[Generation]) -> list[list[int]]:
    return sorted(reply.token_ids.tolist() for reply in answered)


@pytest.mark.long
def test_a_strict_run_learns_from_adapters_what_it_learns_from_merged_weights(run: Run) -> None:
    merged, before = run("merged")
    adapted, answered = run("adapted", AS_ADAPTERS)
    assert {reply.version_spans[0].version.step for reply in answered} == {0, 1}
    assert all(len(reply.version_spans) == 1 for reply in answered)
    assert tokens(answered) == tokens(before)
    # Until the checkpoint at its end the run writes adapters alone.
    assert [(adapted / "weights" / f"step-{step:06d}" / SINGLE_FILE).exists() for step in (1, 2)] == [False, True]
    assert (adapted / "student").resolve() == (adapted / "weights/step-000002")
    expected = student(merged)
    for name, tensor in student(adapted).items():
        np.testing.assert_allclose(tensor, expected[name], atol=1e-5, err_msg=name)  # one step changes them by 1e-3


@pytest.mark.long
def test_no_response_of_an_asynchronous_run_meets_an_update(run: Run) -> None:
    _, answered = run("run", AS_ADAPTERS, "max_staleness=1", "training.iterations=5")
    # The first batch is of step 0, the third of 1 or 2, the fifth of 3 or 4.
    assert len({reply.version_spans[0].version.step for reply in answered}) >= 3
    assert all(len(reply.version_spans) == 1 for reply in answered)


@pytest.mark.long
def test_the_students_servers_answer_for_the_reference_with_their_base(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    base_of, scores_of = LocalBackend.score_base, LocalBackend.score

    async def score_base(self: LocalBackend, *values: Any, **named: Any) -> Any:
        asked.append(f"base of {self._name}")
        return await base_of(self, *values, **named)

    async def score(self: LocalBackend, *values: Any, **named: Any) -> Any:
        asked.append(self._name)
        return await scores_of(self, *values, **named)

    monkeypatch.setattr(LocalBackend, "score_base", score_base)
    monkeypatch.setattr(LocalBackend, "score", score)
    keys = ("policy={kind: grpo, samples: 2}", "training.reference_kl=0.1")
    adapted, _ = run("adapted", AS_ADAPTERS, *keys)
    assert asked.count("base of student") == 16  # two iterations of four prompts, two responses to each
    assert "reference" not in asked
    asked.clear()
    merged, _ = run("merged", *keys)
    assert asked.count("reference") >= 16
    expected = student(merged)
    for name, tensor in student(adapted).items():
        np.testing.assert_allclose(tensor, expected[name], atol=1e-5, err_msg=name)


@pytest.mark.long
def test_a_run_that_goes_on_has_the_same_adapters_bit_for_bit_and_the_same_reference(run: Run) -> None:
    keys = (AS_ADAPTERS, "policy={kind: grpo, samples: 2}", "training.reference_kl=0.1", "training.schedule=constant")
    straight, _ = run("straight", *keys, "training.iterations=3")
    resumed, _ = run("resumed", *keys)
    assert (resumed / "student").resolve().name == "step-000002"
    spot_async.resume(resumed, ["training.iterations=3"])
    expected = student(straight)
    for name, tensor in student(resumed).items():
        np.testing.assert_array_equal(tensor, expected[name], err_msg=name)
