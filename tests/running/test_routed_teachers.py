"""A run whose prompts ask one of two teachers, or both: its first step is that of dense float64 rows of all models."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import EXAMPLE, example_run, rows
from transformers import AutoModelForCausalLM, AutoTokenizer

import spot_async
from spot_async.checks.plan import plan_training
from spot_async.config.loading import config_from
from spot_async.errors import ConfigError
from spot_async.run_directory.reading import RunFiles
from spot_async.tools.compare.compute import read_compute
from spot_async.tools.inspect.report import learning_section

ROOT = Path(__file__).parents[2]
RATE, DECAY, EPSILON = 1e-3, 0.01, 1e-8  # of AdamW
ROUTE = {"by": "tier", "to": {"easy": "short"}, "default": "long"}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second teacher: the shipped one with other weights."""
    directory = tmp_path_factory.mktemp("models") / "other"
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE / "teacher", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.1 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(directory)
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((EXAMPLE / "teacher" / name).read_bytes())
    return directory


@pytest.fixture(scope="module")
def run(other, few_problems, tmp_path_factory, servers_on_threads, trainer_on_thread):
    """Makes the run of a policy, of one iteration; returns its directory."""

    def make(policy: dict[str, Any], **weights: float) -> Path:
        directory = tmp_path_factory.mktemp("run") / "run"
        spot_async.run(tree(other, few_problems, policy, weights) | {"run": {"directory": str(directory)}})
        return directory

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield make


def tree(other: Path, problems: Path, policy: dict[str, Any], weights: dict[str, float]) -> dict[str, Any]:
    models = {"short": str(EXAMPLE / "teacher"), "long": str(other)}
    training = {
        "iterations": 1,
        "batch_size": 12,
        "mini_batch_size": 12,
        "learning_rate": RATE,
        "weight_decay": DECAY,
        "schedule": "constant",
        "warmup_iterations": 0,
        "max_grad_norm": 1e9,
    }
    return example_run(
        teachers={name: {"model": model, "weight": weights.get(name, 1.0)} for name, model in models.items()},
        data={"train": str(problems)},
        sampling={"max_prompt_tokens": 64, "max_response_tokens": 48},
        policy=policy,
        training=training,
    )


@pytest.fixture(scope="module")
def routed(run) -> Path:
    return run({"kind": "opd", "route": ROUTE})


def stepped(directory: Path, other: Path, shares: Any) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Return the loss, the gradient and the weights after one step, all of dense rows in float64.

    `shares` gives a sample's teachers with their parts of the pull.
    """
    paths = {"student": EXAMPLE / "student", "short": EXAMPLE / "teacher", "long": other}
    models = {name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for name, path in paths.items()}
    tokenizer = AutoTokenizer.from_pretrained(paths["student"])

    def logprobs(name: str, sample: dict[str, Any]) -> torch.Tensor:
        chat = [{"role": "user", "content": sample["problem"]}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        ids = torch.tensor(sample["response_ids"])
        logits = models[name](torch.tensor([[*prompt, *ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]

    losses = []
    for sample in rows(directory / "samples.jsonl"):
        own = logprobs("student", sample)
        with torch.no_grad():
            pull = sum(share * (logprobs(name, sample) - own) for name, share in shares(sample).items())
        losses.append((-(own - own.detach()).exp() * pull).mean())
    loss = torch.stack(losses).mean()
    loss.backward()
    gradient = {name: weight.grad for name, weight in models["student"].named_parameters()}
    after = {
        name: weight.detach() * (1 - RATE * DECAY) - RATE * weight.grad / (weight.grad.abs() + EPSILON)
        for name, weight in models["student"].named_parameters()
    }
    return loss.item(), gradient, after


@pytest.mark.parametrize("kind", ["routed", pytest.param("average", marks=pytest.mark.long)])
def test_the_first_step_is_that_of_dense_rows_in_float64(run, routed, other, kind):
    if kind == "routed":
        directory, shares = routed, lambda sample: {"short" if sample["tier"] == "easy" else "long": 1.0}
    else:
        directory = run({"kind": "opd"}, short=1.0, long=3.0)
        shares = lambda sample: {"short": 0.25, "long": 0.75}  # noqa: E731
    loss, gradient, expected = stepped(directory, other, shares)
    (row,) = rows(directory / "metrics.jsonl")
    norm = math.sqrt(sum(float(each.square().sum()) for each in gradient.values()))
    assert row["train/loss"] == pytest.approx(loss, abs=2e-6)
    assert row["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    trained = AutoModelForCausalLM.from_pretrained(directory / "student", dtype=torch.float64).state_dict()
    compared = 0
    for name, weights in expected.items():
        is_clear = gradient[name].abs() > 1e-5  # AdamW's first step is the gradient's sign, which rounding may turn
        compared += int(is_clear.sum())
        assert (trained[name] - weights)[is_clear].abs().max() < 1e-2 * RATE
    assert compared > 0.5 * sum(each.numel() for each in expected.values())


def test_what_a_run_says_is_said_of_each_teacher_and_domain(routed):
    samples, (row,) = rows(routed / "samples.jsonl"), rows(routed / "metrics.jsonl")
    assert {(each["domain"], each["teacher"]) for each in samples} == {
        ("easy", "short"),
        ("medium", "long"),
        ("hard", "long"),
    }
    counts = Counter(each["teacher"] for each in samples)
    assert {name: row[f"stage/score.{name}/requests"] for name in counts} == counts
    right = [each["verdict"] == "correct" for each in samples if each["tier"] == "easy"]
    assert row["rollout/easy/accuracy"] == pytest.approx(sum(right) / len(right))
    for name in counts:
        assert {f"teacher/{name}/{figure}" for figure in ("entropy_nats", "pull_nats", "agreement")} <= row.keys()
    assert "teacher/long/hard/agreement" in row
    assert not {name for name in row if name.startswith("teacher/") and name.count("/") == 1}
    titles = [plot.title for plot in learning_section(RunFiles(routed).metrics(), None).plots]
    assert {"Accuracy by domain", "Pull"} <= set(titles)
    compute = read_compute(routed / "evaluation-after.json", routed / "student")
    assert compute.keys() >= {"accuracy at the end: easy", "pull at the end: long", "entropy at the end: short"}


@pytest.mark.parametrize(
    ("policy", "weights", "line"),
    [
        ({"kind": "spot"}, {}, "teachers: policy spot asks one teacher of each prompt, and given are short and long"),
        (
            {"kind": "opd", "route": {"by": "tier", "to": {}, "default": "long"}},
            {},
            "teachers.short: policy.route gives it no problem of data.train",
        ),
        (
            {"kind": "opd", "route": {"default": "middle"}},
            {},
            "policy.route.default=middle: no such teacher: `teachers` has short, long",
        ),
        (
            {"kind": "opd", "route": {"by": "level", "to": {"1": "short"}, "default": "long"}},
            {},
            "no column 'level', which policy.route.by names",
        ),
        (
            {"kind": "opd", "route": {"by": "tier", "to": {"easy": "short"}, "default": "long"}},
            {"long": 3.0},
            "teachers.long.weight=3: a prompt asks one teacher by policy.route",
        ),
    ],
)
def test_a_run_is_refused_in_one_line_before_anything_starts(other, few_problems, monkeypatch, policy, weights, line):
    monkeypatch.chdir(ROOT)
    with pytest.raises((ConfigError, spot_async.DataError), match=line):
        plan_training(config_from(tree(other, few_problems, policy, weights)))
