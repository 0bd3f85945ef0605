"""The papers' lines of examples/recipes, over whole vocabularies in float64. They share no code with the package."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


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
    def gap(self) -> Tensor:
        """What OPD's advantage is."""
        return self.of(self.teacher) - self.old

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
CAL_OPD_WORDS = ("so one", "then two")  # of its configuration


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
    draw = random.Random(f"0 {int(one.sample['iteration']) - 1} {one.sample['problem_id']}")
    return torch.tensor([draw.random() for _ in one.ids], dtype=torch.float64) < one.gap.exp()


def tropd(one: Response, group: Group) -> Tensor:
    return torch.where(near(one), one.policy(one.of(one.teacher) - one.old), forward_kl(one.teacher, one.student))


def cal_opd(one: Response, group: Group) -> Tensor:
    """The difference to the student that is beyond half of what words on the answer do to the teacher."""
    teacher = one.of(one.teacher)
    told = torch.stack([one.of(one.rows("teacher", [f"{one.sample['problem']} {word}"])) for word in CAL_OPD_WORDS])
    falls, rises = ((teacher - told).amax(0).clamp(min=0), (told - teacher).amax(0).clamp(min=0))
    low, high = teacher - 0.5 * falls, teacher + 0.5 * rises
    return one.policy((low - one.old).clamp(min=0) - (one.old - high).clamp(min=0))


def vopd(one: Response, group: Group) -> Tensor:
    return one.policy(one.of(one.teacher) - one.old + forward_kl(one.student, one.teacher))


def taid(one: Response, group: Group) -> Tensor:
    t = 0.4 + 0.6 * one.progress
    moved = ((1 - t) * one.student.detach() + t * one.teacher).log_softmax(-1)
    return forward_kl(moved, one.student)


def veto(one: Response, group: Group) -> Tensor:
    b = 0.8 * (1 - one.progress)
    return forward_kl((one.teacher + b * one.student.detach()).log_softmax(-1), one.student)


def opd_then_rl(one: Response, group: Group) -> Tensor:
    if one.sample["iteration"] == 1:
        return one.policy(one.of(one.teacher) - one.old)
    return one.policy(one.old * 0 + group_advantage(group, one))


def guided_prefix(one: Response, group: Group) -> Tensor:
    continued = one.policy(one.of(one.teacher) - one.old)
    return torch.where(one.is_students, continued, forward_kl(one.teacher, one.student))


def iw_opd(one: Response, group: Group) -> Tensor:
    drift = one.gap.abs().cumsum(0) - one.gap.abs()
    return one.policy((1.5 - 0.5 * drift / one.gap.abs().sum()) * one.gap)


def demystifying_opd(one: Response, group: Group) -> Tensor:
    return one.policy(one.gap.sign() * (1 + one.gap.abs()).log())


def agreed(one: Response) -> Tensor:
    return one.gap > 0 if one.reward else one.gap < 0


def sg_opd(one: Response, group: Group) -> Tensor:
    if not one.is_students.all():
        return -one.of(one.student)
    return one.policy(torch.where(agreed(one), 1.8, 0.5) * one.gap)


def margin(group: Group) -> float:
    """By how much the teacher's sums prefer what was right; at least two where all have the same reward."""
    right, wrong = ([float(one.gap.mean()) for one in group if one.reward == reward] for reward in (1.0, 0.0))
    return statistics.mean(right) - statistics.mean(wrong) if right and wrong else 2.0


def uni_opd(one: Response, group: Group) -> Tensor:
    return one.policy(one.gap + one.reward * max(0.0, 2.0 - margin(group)))


def distillm_2(one: Response, group: Group) -> Tensor:
    p, q, b = one.teacher, one.student, 1 + min(0.5, one.progress)
    if one.is_students.all():
        return b * forward_kl(q, (0.1 * q.exp() + 0.9 * p.exp()).log())
    return (2 - b) * forward_kl(p, (0.1 * p.exp() + 0.9 * q.exp()).log())


def fast_opd(one: Response, group: Group) -> Tensor:
    return one.policy(one.gap)
