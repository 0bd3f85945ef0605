"""The settings and rows of README.md: what `run.py` runs. Whoever changes them changes the plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RELAY, RUNNING_SUMS = "experiments/mechanism/relay", "configs/running_sum"
BATCH = 64
FIRST_SEED = 100
ALL_SEEDS, FEW_SEEDS = 8, 3  # of rows that a hypothesis names, and of the others
PILOT_SEEDS = (0, 1)
PART_FIVE_SEEDS = range(300, 300 + ALL_SEEDS)

OPD: Mapping[str, object] = {"policy.kind": "opd"}
KD: Mapping[str, object] = {"policy.kind": "kd", "training.loss_aggregation": "token_mean"}
GRPO: Mapping[str, object] = {
    "policy.kind": "grpo",
    "policy.samples": 8,
    "teacher": None,
    "prompt.template": "student",
    "prompt.thinking": None,
    "training.loss_aggregation": "token_mean",
    "training.clip": 0.2,
    "training.dual_clip": 3.0,
    "training.reference_kl": 1.0e-3,
}


@dataclass(frozen=True)
class Row:
    """One method with its keys."""

    name: str
    keys: Mapping[str, object] = field(default_factory=dict)
    prompts: int = BATCH  # of an iteration
    seeds: int = FEW_SEEDS


Sample = Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """One task with one student and one teacher."""

    name: str
    config: str
    folder: str  # of the example: student/ and data/
    wide: str  # the problems that Pass@64 is measured on; empty: it is not
    rows: Sequence[Row]
    choices: frozenset[str]  # the tokens that are a choice with a consequence
    read_choices: Callable[[Sample], Iterator[tuple[str, str]]]  # of a response: what the choice depends on, the choice
    place_of: Callable[[int, str, str], str | None]  # what the choice at a position of a response depends on
    evaluation: Mapping[str, object] = field(default_factory=dict)
    model: str = ""  # the untrained student, if it has another name in its folder

    @property
    def student(self) -> str:
        return self.model or f"{self.folder}/student"

    @property
    def train(self) -> str:
        return f"{self.folder}/data/train.jsonl"

    @property
    def heldout(self) -> str:
        return f"{self.folder}/data/heldout.jsonl"


def relay_choices(sample: Sample) -> Iterator[tuple[str, str]]:
    """Yield operation and method of each step of a response to a relay problem."""
    for place, operation in enumerate(sample["problem"][1:]):
        step = sample["response"][6 * place :][:6]
        if step[:1] == operation and step[1:2] in set("WXYZ"):
            yield operation, step[1]


def relay_place(position: int, problem: str, tier: str) -> str | None:
    """Return the operation whose method stands at a position of a response to a problem."""
    step, place = divmod(position, 6)
    return problem[1 + step] if place == 1 and step + 1 < len(problem) else None


def sum_place(position: int, problem: str, tier: str) -> str | None:
    return tier


def sum_choices(sample: Sample) -> Iterator[tuple[str, str]]:
    """Yield the tier and the strategy of each line of a response to a running-sum problem."""
    for word in re.findall(r"\b(?:one|two|three)\b", sample["response"]):
        yield sample["tier"], word


def spot(name: str, **keys: object) -> Row:
    return Row(name, {f"policy.{key}": value for key, value in keys.items()})


def tested(*rows: Row) -> tuple[Row, ...]:
    """Return the rows with all seeds: a hypothesis names them."""
    return tuple(replace(row, seeds=ALL_SEEDS) for row in rows)


def long_opd(iterations: int) -> Row:
    """Return OPD at the CPU time of SPOT, which in the pilots took 140 iterations in place of 60."""
    return Row("OPD, equal compute", {**OPD, "training.iterations": iterations})


SMALL_GRPO = Row("GRPO 16 x 8", {**GRPO, "training.batch_size": 16, "training.mini_batch_size": 4}, prompts=16)
OPD_ROW = Row("OPD", OPD)
GRPO_ROW = Row("GRPO 64 x 8", GRPO)
SPOT = spot("SPOT", gamma=1.0, beta=1.0)
NEITHER = spot("gamma 0, no gate", verifier_guidance=False, beta=1.0)
GATE_ONLY = spot("gate only", gamma=0.0, beta=1.0)
TILT_ONLY = spot("tilt only", gate=False, beta=1.0)
OTHERS = (
    Row("EOPD", {"policy.kind": "eopd", "policy.top_k": 16, "policy.alpha": 1.0, "policy.tau_nats": 0.8}),
    Row("KD", KD),
    SMALL_GRPO,
)

CHOICE_ROWS = (
    *tested(OPD_ROW, GRPO_ROW, SPOT, GATE_ONLY, TILT_ONLY, NEITHER),
    *tested(spot("SPOT gamma 4", gamma=4.0, beta=1.0)),
    *tested(spot("shuffled gamma 4", shuffle_outcomes=True, gamma=4.0, beta=1.0)),
    *OTHERS,
    spot("SPOT beta .1", gamma=1.0, beta=0.1),
    spot("SPOT gamma 4, beta .1", gamma=4.0, beta=0.1),
    spot("random positions", selection="random", beta=1.0),
    spot("entropy positions", selection="entropy", beta=1.0),
    spot("shuffled", shuffle_outcomes=True, beta=1.0),
    long_opd(280),
)
KNOWLEDGE_ROWS = (*tested(OPD_ROW, SPOT, NEITHER), GRPO_ROW, *OTHERS, GATE_ONLY, TILT_ONLY, long_opd(140))
SUM_ROWS = (
    OPD_ROW,
    *(
        spot(f"{'shuffled' if is_shuffled else 'SPOT'} gamma {gamma:g}, beta {beta:g}",
             gamma=gamma, beta=beta, **({"shuffle_outcomes": True} if is_shuffled else {}))
        for gamma in (1.0, 4.0) for beta in (0.1, 1.0) for is_shuffled in (False, True)
    ),
)  # fmt: skip


def rule_rows(**training: object) -> tuple[Row, ...]:
    """Return OPD, and SPOT at gamma 4 by each rule that selects positions. `training` are keys of all of them."""
    keys = {f"training.{key}": value for key, value in training.items()}
    rules: Mapping[str, Mapping[str, object]] = {
        "score": {"selection": "score"},
        "score, not the answer": {"selection": "score", "skip_answer": True},
        "entropy": {"selection": "entropy"},
        "earliest": {"selection": "earliest"},
        "random": {"selection": "random"},
    }
    rows = (OPD_ROW, *(spot(name, gamma=4.0, beta=1.0, **rule) for name, rule in rules.items()))
    return tested(*(replace(row, keys={**row.keys, **keys}) for row in rows))


class BranchLoss(NamedTuple):
    """A row of the pilot of `baseline`."""

    alpha: float
    gamma: float
    times: int  # beta, in betas of the setting

    @property
    def row(self) -> str:
        return f"alpha {self.alpha:g}, gamma {self.gamma:g}{f', beta x {self.times}' if self.times > 1 else ''}"


PILOT_GAMMAS = (1.0, 4.0)
PAPERS = tuple(BranchLoss(0.0, gamma, times) for gamma in PILOT_GAMMAS for times in (1, 4))
WITH_BASELINE = tuple(BranchLoss(alpha, gamma, 1) for gamma in PILOT_GAMMAS for alpha in (0.5, 0.8, 0.9, 1.0))


def pilot_rows(beta: float) -> tuple[Row, ...]:
    return tuple(
        spot(each.row, baseline=each.alpha, gamma=each.gamma, beta=each.times * beta)
        for each in (*PAPERS, *WITH_BASELINE)
    )


# What the pilot's rule chose, with `baseline` and for the paper's loss.
CHOSEN, PAPERS_BEST = BranchLoss(0.8, 4.0, 1), BranchLoss(0.0, 4.0, 1)


CLAIMED = {"choice": ("random", "shuffled"), "running-sum": ("random",)}  # controls that a claim names


def prior_rows(setting: str, beta: float) -> tuple[Row, ...]:
    """Return the rows of part five, for a setting's beta."""

    def row(loss: BranchLoss, name: str, **keys: object) -> Row:
        return spot(name, **{"baseline": loss.alpha, "gamma": loss.gamma, "beta": loss.times * beta, **keys})

    controls = {
        "random": row(CHOSEN, "alpha*, random", selection="random"),
        "entropy": row(CHOSEN, "alpha*, entropy", selection="entropy"),
        "shuffled": row(CHOSEN, "alpha*, shuffled", shuffle_outcomes=True),
    }
    return (
        *tested(
            OPD_ROW, row(PAPERS_BEST, "alpha 0"), row(CHOSEN, "alpha*"), row(CHOSEN._replace(alpha=1.0), "alpha 1")
        ),
        *tested(*(controls.pop(name) for name in CLAIMED.get(setting, ()))),
        *controls.values(),
        replace(GRPO_ROW, keys={**GRPO, "prompt.teacher": None}),
    )


METHODS, STRATEGIES = frozenset("WXYZ"), frozenset({"one", "two", "three"})
WIDE = f"{RELAY}/data/heldout-wide.jsonl"
PART_TWO = (
    Setting(
        "choice", f"{RELAY}/choice.yaml", RELAY, WIDE, CHOICE_ROWS,
        METHODS, relay_choices, relay_place,
    ),
    Setting(
        "knowledge", f"{RELAY}/knowledge.yaml", RELAY, WIDE, KNOWLEDGE_ROWS,
        METHODS, relay_choices, relay_place,
    ),
    Setting(
        "running-sum", f"{RUNNING_SUMS}/spot.yaml", "examples/running_sum", "examples/running_sum/data/heldout.jsonl",
        SUM_ROWS, STRATEGIES, sum_choices, sum_place, {"evaluation.samples": 16},
    ),
)  # fmt: skip
CHOICE, KNOWLEDGE, RUNNING_SUM = PART_TWO
SELF = replace(KNOWLEDGE, config=f"{RELAY}/self.yaml", model=f"{RELAY}/reader")
PART_THREE = tuple(
    replace(setting, name=f"where-{name}", rows=rows)
    for name, setting, rows in (
        ("choice", CHOICE, rule_rows()),
        ("knowledge", KNOWLEDGE, rule_rows()),
        ("running-sum", RUNNING_SUM, rule_rows(iterations=30)),
        ("self", SELF, rule_rows()),
    )
)
BETAS = (("choice", CHOICE, 1.0), ("knowledge", KNOWLEDGE, 1.0), ("running-sum", RUNNING_SUM, 1.4), ("self", SELF, 1.0))
PILOT = tuple(replace(setting, name=f"pilot-{name}", rows=pilot_rows(beta), wide="") for name, setting, beta in BETAS)
PART_FIVE = tuple(replace(setting, name=f"prior-{name}", rows=prior_rows(name, beta)) for name, setting, beta in BETAS)
PARTS = {"two": PART_TWO, "three": PART_THREE, "pilot": PILOT, "five": PART_FIVE}
PART_SEEDS = {"pilot": PILOT_SEEDS, "five": PART_FIVE_SEEDS}  # the others have 100 to 107
SETTINGS = {setting.name: setting for part in PARTS.values() for setting in part}
