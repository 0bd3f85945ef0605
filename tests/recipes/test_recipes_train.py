"""Each recipe trains with its own configuration, at staleness 2, and its loss is the paper's over whole vocabularies.

The references compute a paper's line from the full logits of both models in float64. They share no code with the
package: what they know of a run is what `samples.jsonl` says of its first iteration, when the weights are the initial
ones.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import NAMES, RECIPES
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import spot_async

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "running_sum"
WHOLE = 48  # tokens of the vocabulary
SMALL = [
    "max_staleness=2",
    "evaluation=null",
    "training.batch_size=8",
    "training.mini_batch_size=8",
    "training.warmup_iterations=0",
    "sampling.max_response_tokens=64",
]
OWN: dict[str, list[str]] = {  # keys by which more of the loss is seen
    "dapo": ["policy.samples=2", "training.batch_size=6", "training.mini_batch_size=6", "training.refill_at_most=9"],
    "mopd": ["policy.route={odd: short, even: long}"],
    "teacher_average": [f"policy.top_k={WHOLE}"],
    "gkd": [f"policy.top_k={WHOLE}", "policy.beta=0.3"],
    "guided_prefix": [f"policy.top_k={WHOLE}"],
    "opsd": [f"policy.top_k={WHOLE}"],
    "pw_opsd": [f"policy.top_k={WHOLE}", "policy.power=0.5"],
    "sdft": [f"policy.top_k={WHOLE}"],
    "sdpo": [f"policy.top_k={WHOLE}", "policy.samples=4", "training.batch_size=3", "training.mini_batch_size=3"],
    "speculative_kd": [f"policy.top_k={WHOLE}"],
    "reopold": ["policy.mixture=0.3", "policy.share=0.5"],
    "ta_opd": [f"policy.top_k={WHOLE}", "policy.candidates=2", "policy.mass=0.8"],
    "tropd": [f"policy.top_k={WHOLE}", "policy.delta=1.0"],
    "cal_opd": [f"policy.top_k={WHOLE}"],
    "paced": [f"policy.top_k={WHOLE}"],
    "taid": [f"policy.top_k={WHOLE}"],
    "veto": [f"policy.top_k={WHOLE}"],
    "vopd": [f"policy.top_k={WHOLE}"],
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
    *("tropd", "veto", "vopd"),
)
# What they compute of the student is of the one in training. That of TIP is compared in the others, these are long.
REVISED = ("cal_opd", "paced", "reopold", "rethinking_opd", "rlsd", "scope", "ta_opd", "taid", "tropd", "veto", "vopd")
# Their four iterations are trained in the long tests, and their lines are compared in the others.
ALONE = {*NAMES} - {*SHOWN, *ALIKE}


def plain(name: str) -> str:
    """The recipe of a configuration."""
    return name.removesuffix("_live").removesuffix("_averaged")


@dataclass(frozen=True, eq=False)
class Response:
    """A response of the first iteration, and the models' log-probabilities (T, V) there."""

    sample: dict[str, Any]
    ids: Tensor  # (T,)
    student: Tensor  # of the weights in training, with a gradient
    solution: str
    rows: Callable[[str, list[str]], Tensor]  # a frozen model's, behind these turns
    batch: list[Response] = field(repr=False)  # all of its batch

    @cached_property
    def teacher(self) -> Tensor:
        return self.rows("teacher", [self.sample["problem"]])

    @cached_property
    def informed(self) -> Tensor:
        """The frozen student behind problem and solution."""
        return self.behind(f"{self.sample['problem']} {self.solution}")

    @cached_property
    def shown(self) -> Tensor:
        """The frozen student behind a demonstration."""
        problem = self.sample["problem"]
        return self.rows("student", [problem, self.solution, problem])

    def behind(self, text: str) -> Tensor:
        """The frozen student behind another problem."""
        return self.rows("student", [text])

    def of(self, rows: Tensor) -> Tensor:
        """The log-probabilities (T,) of the response's own tokens."""
        return rows.gather(1, self.ids[:, None])[:, 0]

    @property
    def old(self) -> Tensor:
        return self.of(self.student).detach()

    @property
    def progress(self) -> float:
        """Of a run of four iterations."""
        return (int(self.sample["iteration"]) - 1) / 4

    @property
    def is_unsure(self) -> Tensor:
        """Where the student's entropy is at least the median of its batch."""
        entropies = [-(each.student.exp() * each.student).sum(-1).detach() for each in self.batch]
        return entropies[self.batch.index(self)] >= torch.cat(entropies).quantile(0.5)

    @property
    def reward(self) -> float:
        return float(self.sample["verdict"] == "correct")

    @property
    def is_students(self) -> Tensor:
        written = torch.ones(len(self.ids), dtype=torch.bool)
        for start, end, version in self.sample.get("writers", []):
            written[start:end] = version is not None
        return written

    def policy(self, advantage: Tensor) -> Tensor:
        """The policy term (T,) of an advantage at the first update, where the ratio to the sampling weights is 1."""
        served = torch.tensor([each or 0.0 for each in self.sample["behavior_logprobs"]], dtype=torch.float64)
        weights = (self.old - served).exp().clamp(max=2.0)  # 1 where the weights in training sampled the response
        return -weights * (self.of(self.student) - self.old).exp() * advantage.detach()


Group = list[Response]  # of one prompt


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
        case "gkd":
            assert set(shares) == {0.0, 1.0}
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


def forward_kl(p: Tensor, q: Tensor, clip: float = math.inf) -> Tensor:
    return (p.exp() * (p - q)).clamp(max=clip).sum(-1)


def dapo(one: Response, group: Group) -> Tensor:
    """Nothing is counted of a group that gives no direction."""
    teaches = len({each.reward for each in group}) > 1
    return one.policy(torch.tensor(group_advantage(group, one))) if teaches else one.old[:0]


def group_advantage(group: Group, one: Response) -> float:
    rewards = [each.reward for each in group]
    return (one.reward - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6)


# Each recipe's loss per token (T,), of a response in its prompt's group: the paper's line.


def opsd(one: Response, group: Group) -> Tensor:
    return forward_kl(one.informed, one.student, clip=0.05)


def pw_opsd(one: Response, group: Group) -> Tensor:
    weights = torch.tensor([math.sqrt(t) for t in range(1, len(one.ids) + 1)], dtype=torch.float64)
    return weights / weights.mean() * opsd(one, group)


def sdft(one: Response, group: Group) -> Tensor:
    return forward_kl(one.student, one.shown)  # of the student from the teacher


def sdpo(one: Response, group: Group) -> Tensor:
    right = [other.sample["response"] for other in group if other is not one and other.reward]
    return forward_kl(one.student, one.behind(" ".join([one.sample["problem"], *right[:1]])))


def kdrl(one: Response, group: Group) -> Tensor:
    return one.policy(group_advantage(group, one) + one.of(one.teacher) - one.old)


def exopd(one: Response, group: Group) -> Tensor:
    reference = one.old  # the initial student, which these weights are
    return one.policy(1.25 * (one.of(one.teacher) - reference) - (one.old - reference))


def paced(one: Response, group: Group) -> Tensor:
    rate = statistics.mean(each.reward for each in group)
    reverse = one.policy(one.of(one.teacher) - one.old)
    return rate * (1 - rate) * (forward_kl(one.teacher, one.student) if one.progress < 0.5 else reverse)


def scope(one: Response, group: Group) -> Tensor:
    if one.reward:
        perplexity = math.exp(-one.old.mean())
        return -perplexity * one.of(one.student)
    perplexity = math.exp(-one.of(one.teacher).mean())
    return one.policy((one.of(one.teacher) - one.old) / perplexity)


def reopold(one: Response, group: Group) -> Tensor:
    kept = 1 if one.progress < 0.5 else one.is_unsure
    return one.policy(kept * torch.maximum(one.of(one.teacher) - one.old, torch.tensor(math.log(0.3 / 0.7))))


def gkd(one: Response, group: Group) -> Tensor:
    p, q = one.teacher, one.student
    mixed = (0.3 * p.exp() + 0.7 * q.exp()).log()
    return 0.3 * forward_kl(p, mixed) + 0.7 * forward_kl(q, mixed)


def forward_kl_tail(one: Response, group: Group) -> Tensor:
    top = one.teacher.topk(16).indices
    p, q = one.teacher.exp().gather(1, top), one.student.exp().gather(1, top)
    rest_p, rest_q = 1 - p.sum(-1), 1 - q.sum(-1)
    return (p * (p / q).log()).sum(-1) + rest_p * (rest_p / rest_q).log()


def rethinking_opd(one: Response, group: Group) -> Tensor:
    top = one.student.topk(16).indices
    p, q = one.teacher.exp().gather(1, top), one.student.exp().gather(1, top)
    rest_p, rest_q = 1 - p.sum(-1), 1 - q.sum(-1)
    return (q * (q / p).log()).sum(-1) + rest_q * (rest_q / rest_p).log()


def rlsd(one: Response, group: Group) -> Tensor:
    advantage = group_advantage(group, one)
    sign = math.copysign(1, advantage) if advantage else 0.0
    return one.policy(advantage * (sign * (one.of(one.informed) - one.old)).exp().clamp(0.8, 1.2))


def speculative_kd(one: Response, group: Group) -> Tensor:
    return forward_kl(one.teacher, one.student)


def mopd(one: Response, group: Group) -> Tensor:
    of_teacher = one.of(one.teacher) if one.sample["domain"] == "even" else one.old
    return one.policy(of_teacher - one.old)


def teacher_average(one: Response, group: Group) -> Tensor:
    return 0.75 * forward_kl(one.teacher, one.student) + 0.25 * forward_kl(one.student.detach(), one.student)


def tip(one: Response, group: Group) -> Tensor:
    return one.policy(2 * one.is_unsure * (one.of(one.teacher) - one.old))


def teachable(one: Response) -> Tensor:
    return one.teacher.exp().gather(1, one.student.topk(2).indices).sum(-1) >= 0.8


def ta_opd(one: Response, group: Group) -> Tensor:
    return one.policy(teachable(one) * (one.of(one.teacher) - one.old))


def near(one: Response) -> Tensor:
    return (one.of(one.teacher) - one.old).abs() <= 1.0


def tropd(one: Response, group: Group) -> Tensor:
    return torch.where(near(one), one.policy(one.of(one.teacher) - one.old), forward_kl(one.teacher, one.student))


def cal_opd(one: Response, group: Group) -> Tensor:
    return one.policy(one.of(one.teacher) - one.old - forward_kl(one.teacher, one.student))


def vopd(one: Response, group: Group) -> Tensor:
    return one.policy(one.of(one.teacher) - one.old + forward_kl(one.student, one.teacher))


def taid(one: Response, group: Group) -> Tensor:
    t = 0.4 + 0.6 * one.progress
    moved = ((1 - t) * one.student.detach() + t * one.teacher).log_softmax(-1)
    return forward_kl(moved, one.student)


def veto(one: Response, group: Group) -> Tensor:
    return forward_kl((0.5 * one.teacher + 0.5 * one.student.detach()).log_softmax(-1), one.student)


def opd_then_rl(one: Response, group: Group) -> Tensor:
    if one.sample["iteration"] == 1:
        return one.policy(one.of(one.teacher) - one.old)
    return one.policy(one.old * 0 + group_advantage(group, one))


def guided_prefix(one: Response, group: Group) -> Tensor:
    continued = one.policy(one.of(one.teacher) - one.old)
    return torch.where(one.is_students, continued, forward_kl(one.teacher, one.student))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Easy problems: the student solves about half of them, in less than the tokens that it may write."""
    rows = [json.loads(row) for row in (EXAMPLE / "data" / "train.jsonl").read_text().splitlines()[:300]]
    easy = [row | {"category": ("even", "odd")[number % 2]} for number, row in enumerate(rows) if row["tier"] == "easy"]
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
            in_groups = ("kdrl", "opd_then_rl", "paced", "rlsd")
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
    solutions = {row["id"]: row["solution"] for row in map(json.loads, data.read_text().splitlines())}
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "student")

    def rows(model: Any, turns: list[str], ids: list[int]) -> Tensor:
        roles = ["user", "assistant"]
        chat = [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)

    def response(sample: dict[str, Any], student: Any = models["student"]) -> Response:
        ids = sample["response_ids"]
        return Response(
            sample=sample,
            ids=torch.tensor(ids),
            student=rows(student, [sample["problem"]], ids),
            solution=solutions[sample["problem_id"]],
            rows=lambda role, turns: rows(models[role], turns, ids).detach(),
            batch=[],
        )

    return response


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "name", [each if each in SHOWN else pytest.param(each, marks=pytest.mark.long) for each in NAMES] + [*SELVES]
)
def test_four_iterations_train_at_staleness_2(run: Callable[[str], Path], name: str) -> None:
    metrics = lines(run(name) / "metrics.jsonl")
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
    first = [sample for sample in lines(directory / "samples.jsonl") if sample["iteration"] == 1]
    compare(name, lines(directory / "metrics.jsonl")[0], first, rows_of, models["student"])


@pytest.mark.parametrize(
    "name", ["tip", "opd_then_rl", *(pytest.param(each, marks=pytest.mark.long) for each in REVISED)]
)
def test_what_revise_gives_old_samples_is_of_the_student_in_training(
    run: Callable[..., Path], rows_of: Callable[..., Response], name: str
) -> None:
    directory = run(name)
    third = [sample for sample in lines(directory / "samples.jsonl") if sample["iteration"] == 3]
    trained = lines(directory / "metrics.jsonl")[2]
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
    losses = [globals()[plain(name)](one, group) for group in groups for one in group]
    loss = torch.cat(losses).mean() if name in TOKEN_MEAN else torch.stack([each.mean() for each in losses]).mean()
    student.zero_grad()
    loss.backward()
    norm = math.sqrt(sum(float(each.grad.square().sum()) for each in student.parameters()))
    off = trained["train/loss"] - loss.item(), trained["train/grad_norm"] / norm - 1
    sys.stdout.write(f"{name}: loss {loss.item():.7f}, off by {off[0]:.1e}; gradient {norm:.5f}, by {off[1]:.1e}\n")
    assert trained["train/loss"] == pytest.approx(loss.item(), abs=near)
    assert trained["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
