"""Each recipe trains with its own configuration, at staleness 2, and its loss is the paper's over whole vocabularies.

The references are in `paper_lines.py`. What they know of a run is what `samples.jsonl` says of its first iteration,
when the weights are the initial ones.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import paper_lines
import pytest
import torch
from paper_lines import Group, Response, agreed, cal_opd, forward_kl, margin, near, opsd, teachable
from recipes import NAMES, RECIPES
from small_runs import EXAMPLE, rows
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import spot_async

ROOT = Path(__file__).parents[2]
WHOLE = 48  # tokens of the vocabulary
SMALL = [
    "max_staleness=2",
    "evaluation=null",
    "training.batch_size=8",
    "training.mini_batch_size=8",
    "training.warmup_iterations=0",
    "sampling.max_response_tokens=64",
]
WHOLE_ROWS = (
    *("teacher_average", "guided_prefix", "opsd", "sdft", "speculative_kd", "tropd"),
    *("paced", "taid", "veto", "vopd", "distillm_2"),
)
OWN: dict[str, list[str]] = {  # keys by which more of the loss is seen
    **{name: [f"policy.top_k={WHOLE}"] for name in WHOLE_ROWS},
    "dapo": ["policy.samples=2", "training.batch_size=6", "training.mini_batch_size=6", "training.refill_at_most=9"],
    "mopd": ["policy.route={odd: short, even: long}"],
    "gkd": [f"policy.top_k={WHOLE}", "policy.beta=0.3"],
    "pw_opsd": [f"policy.top_k={WHOLE}", "policy.power=0.5"],
    "sdpo": [f"policy.top_k={WHOLE}", "policy.samples=4", "training.batch_size=3", "training.mini_batch_size=3"],
    "reopold": ["policy.mixture=0.3", "policy.share=0.5"],
    "ta_opd": [f"policy.top_k={WHOLE}", "policy.candidates=2", "policy.mass=0.8"],
    "sg_opd": ["policy.gates=[1.8,0.5]"],
    "uni_opd": ["policy.margin=2.0"],
}
# The same recipes with other selves as teachers. `running/test_following.py` has all kinds of selves.
OTHERS = [pytest.param(each, marks=pytest.mark.nightly) for each in ("sdft_averaged", "sdpo_live")]
TOKEN_MEAN = ("dapo",)  # others take the mean of each response, and then over responses
# Two models write, one writes a beginning, groups have rewards, groups show each other. Others are long: runs with
# several teachers are in `running/test_routed_teachers.py` and `running/test_several_teachers.py` too.
SHOWN = ("gkd", "guided_prefix", "kdrl", "sdpo")
SELVES = (pytest.param("sdft_live", marks=pytest.mark.long), *OTHERS)
# Their lines are those of kdrl, opsd, exopd, tip and taid, weighted, clipped or moved, and of forward_kl_tail and gkd
# turned.
ALIKE = (
    *("cal_opd", "paced", "pw_opsd", "reopold", "rethinking_opd", "rlsd", "speculative_kd", "ta_opd"),
    *("tropd", "veto", "iw_opd", "demystifying_opd", "sg_opd", "distillm_2", "fast_opd"),
)
# What they compute of the student is of the one in training. That of TIP is compared in the others, these are long.
REVISED = (
    *("cal_opd", "paced", "reopold", "rethinking_opd", "rlsd", "scope", "ta_opd", "taid", "tropd", "veto", "vopd"),
    *("iw_opd", "demystifying_opd", "sg_opd", "uni_opd", "distillm_2", "fast_opd"),
)
# Their four iterations are trained in the long tests, and their lines are compared in the others.
ALONE = {*NAMES} - {*SHOWN, *ALIKE}


def plain(name: str) -> str:
    """The recipe of a configuration."""
    return name.removesuffix("_live").removesuffix("_averaged")


def assert_telling(name: str, groups: list[Group]) -> None:
    """The comparison means something: clips bite, coins fall both ways, rewards differ, two models wrote."""
    ones = [one for group in groups for one in group]
    shares = [float(one.is_students.double().mean()) for one in ones]
    match name:
        case "mopd":
            assert {one.sample["teacher"] for one in ones} == {"short", "long"}
        case "scope":
            assert {one.reward for one in ones} == {0.0, 1.0}
        case "dapo":
            assert {len({one.reward for one in group}) for group in groups} == {1, 2}
        case "kdrl" | "opd_then_rl" | "paced" | "rlsd":
            assert any(len({one.reward for one in group}) > 1 for group in groups)
        case "gkd" | "distillm_2":
            assert set(shares) == {0.0, 1.0}
        case "sg_opd":
            ones = [one for one in ones if one.is_students.all()]
            assert {one.reward for one in ones} == {0.0, 1.0}
            assert 0 < torch.cat([agreed(one) for one in ones]).double().mean() < 1
            assert 0.0 in shares or ones[0].progress
        case "uni_opd":
            assert any(margin(group) < 2 and {one.reward for one in group} == {0.0, 1.0} for group in groups)
            assert all(len({one.reward for one in group}) == 1 or len(group) in (2, 4) for group in groups)
        case "cal_opd":
            assert 0 < torch.cat([cal_opd(one, group) != 0 for group in groups for one in group]).double().mean() < 1
        case "fast_opd":
            assert max(len(one.ids) for one in ones) == 8 + 40 * ones[0].progress
        case "guided_prefix" | "speculative_kd":
            assert any(0 < share < 1 for share in shares)
        case "reopold":
            clipped = [one.of(one.teacher) - one.old < math.log(0.3 / 0.7) for one in ones]
            assert any(each.any() for each in clipped)
        case "ta_opd" | "tropd":
            kept = torch.cat([(teachable if name == "ta_opd" else near)(one) for one in ones])
            assert 0 < kept.double().mean() < 1
        case "sdpo":
            assert {one.reward for one in ones} == {0.0, 1.0}
        case "opsd" | "pw_opsd":
            assert any((forward_kl(one.informed, one.student) > opsd(one, [])).any() for one in ones)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Easy problems: the student solves about half of them, in less than the tokens that it may write."""
    given = enumerate(rows(EXAMPLE / "data" / "train.jsonl")[:300])
    easy = [row | {"category": ("even", "odd")[number % 2]} for number, row in given if row["tier"] == "easy"]
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in easy))
    return path


@pytest.fixture(scope="module")
def run(
    data: Path, tmp_path_factory: pytest.TempPathFactory, servers_on_threads: None, trainer_on_thread: None
) -> Iterator[Callable[..., Path]]:
    """The directory of a recipe's run: its own configuration, a few small batches, each run made once."""
    made: dict[tuple[str, int], Path] = {}

    def directory(name: str, iterations: int = 4) -> Path:
        if (name, iterations) not in made:
            made[name, iterations] = made_in = tmp_path_factory.mktemp(name)
            path = "data.train.path" if plain(name) == "sdft" else "data.train"
            groups = ["policy.samples=4", "training.batch_size=3", "training.mini_batch_size=3"]
            in_groups = ("kdrl", "opd_then_rl", "paced", "rlsd", "uni_opd")
            own = [*(groups if name in in_groups else []), *OWN.get(plain(name), [])]
            kept = [f"run.directory={made_in}/run", f"{path}={data}", f"training.iterations={iterations}"]
            own = [*own, "policy.enough=0"] if name == "opd_then_rl" else own  # after its first iteration
            spot_async.run(RECIPES / f"{name}.yaml", [*kept, *SMALL, *own])
        return made[name, iterations] / "run"

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.syspath_prepend(str(RECIPES))
        yield directory


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {
        role: AutoModelForCausalLM.from_pretrained(EXAMPLE / role, dtype=torch.float64).eval()
        for role in ("student", "teacher")
    }


@pytest.fixture(scope="module")
def rows_of(data: Path, models: dict[str, Any]) -> Callable[[dict[str, Any]], Response]:
    solutions = {row["id"]: row["solution"] for row in rows(data)}
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "student")

    def logprobs(model: Any, turns: list[str], ids: list[int]) -> Tensor:
        roles = ["user", "assistant"]
        chat = [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)

    def response(sample: dict[str, Any], student: Any = models["student"]) -> Response:
        ids = sample["response_ids"]
        return Response(
            sample=sample,
            ids=torch.tensor(ids),
            student=logprobs(student, [sample["problem"]], ids),
            solution=solutions[sample["problem_id"]],
            rows=lambda role, turns: logprobs(models[role], turns, ids).detach(),
            batch=[],
        )

    return response


@pytest.mark.parametrize(
    "name", [each if each in SHOWN else pytest.param(each, marks=pytest.mark.long) for each in NAMES] + [*SELVES]
)
def test_four_iterations_train_at_staleness_2(run: Callable[[str], Path], name: str) -> None:
    metrics = rows(run(name) / "metrics.jsonl")
    assert [row["iteration"] for row in metrics] == [1, 2, 3, 4]
    for row in metrics:
        assert math.isfinite(row["train/loss"])
        assert 0 < row["train/grad_norm"] < math.inf
    lags = {key for row in metrics for key in row if key.startswith("lag/")}
    assert lags <= {"lag/0", "lag/1", "lag/2"}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.long) if each in ALIKE else each for each in NAMES] + [*SELVES]
)
def test_the_first_loss_and_gradient_are_those_of_the_papers_line(
    run: Callable[..., Path], models: dict[str, Any], rows_of: Callable[..., Response], name: str
) -> None:
    directory = run(name, iterations=1 if name in ALONE else 4)
    first = [sample for sample in rows(directory / "samples.jsonl") if sample["iteration"] == 1]
    compare(name, rows(directory / "metrics.jsonl")[0], first, rows_of, models["student"])


@pytest.mark.parametrize(
    "name", ["tip", "opd_then_rl", *(pytest.param(each, marks=pytest.mark.long) for each in REVISED)]
)
def test_what_revise_gives_old_samples_is_of_the_student_in_training(
    run: Callable[..., Path], rows_of: Callable[..., Response], name: str
) -> None:
    directory = run(name)
    third = [sample for sample in rows(directory / "samples.jsonl") if sample["iteration"] == 3]
    trained = rows(directory / "metrics.jsonl")[2]
    assert trained["train/lag_mean"] > 0, "they are of older weights"
    weights = directory / "weights" / "step-000002"
    student = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float64).eval()
    compare(name, trained, third, lambda sample: rows_of(sample, student), student, near=1e-5)


def compare(
    name: str,
    trained: dict[str, float],
    samples: list[dict[str, Any]],
    response: Callable[[dict[str, Any]], Response],
    student: Any,
    near: float = 2e-6,
) -> None:
    """Compare an iteration's loss and gradient with the paper's line, of the student before its only update."""
    groups = [list(map(response, group)) for _, group in groupby(samples, key=lambda sample: sample["problem_id"])]
    ones = [one for group in groups for one in group]
    for one in ones:
        one.batch.extend(ones)
    assert_telling(name, groups)
    losses = [getattr(paper_lines, plain(name))(one, group) for group in groups for one in group]
    loss = torch.cat(losses).mean() if name in TOKEN_MEAN else torch.stack([each.mean() for each in losses]).mean()
    student.zero_grad()
    loss.backward()
    norm = math.sqrt(sum(float(each.grad.square().sum()) for each in student.parameters()))
    off = trained["train/loss"] - loss.item(), trained["train/grad_norm"] / norm - 1
    sys.stdout.write(f"{name}: loss {loss.item():.7f}, off by {off[0]:.1e}; gradient {norm:.5f}, by {off[1]:.1e}\n")
    assert trained["train/loss"] == pytest.approx(loss.item(), abs=near)
    assert trained["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
