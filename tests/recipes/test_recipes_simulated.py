"""Whatever befalls a run of a recipe, the invariants of a run hold; and `simulate` says how long it takes."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import msgspec
import pytest
from faults.run import faulty_run
from only_teacher import only
from recipes import NAMES, RECIPES, simulated_recipe
from typer.testing import CliRunner

from spot_async.cli import app
from spot_async.testing.services import SimulatedVerifier
from spot_async.testing.simulation import simulated_prompts, simulated_run, simulated_turn_ids
from spot_async.types import ChatTurn, Judgement, Verdict

WRITTEN = ("distillm_2", "gkd", "guided_prefix", "sg_opd", "speculative_kd")  # by teachers too


@pytest.mark.parametrize("max_staleness", [pytest.param(0, marks=pytest.mark.nightly), 2])
@pytest.mark.parametrize("name", NAMES)
def test_the_invariants_hold_whatever_befalls_the_run(name, max_staleness):
    runs = [faulty_run(seed, simulated_recipe(name), max_staleness=max_staleness).run for seed in range(3)]
    trained = [each for run in runs for each in run.trained]
    assert trained
    written_by = {span.version is None for each in trained for span in each.version_spans}
    assert written_by == ({True, False} if name in WRITTEN else {False})


class Numbers(SimulatedVerifier):
    """Gives the responses to each problem these judgements, one after the other."""

    def __init__(self, *judgements: Judgement) -> None:
        super().__init__()
        self.judgements, self.asked = judgements, Counter[str]()
        self.given: dict[str, Judgement] = {}  # by the response's text

    async def verify(self, problem: Any, response_text: str, *, deadline: float) -> Judgement:
        judged = self.judgements[self.asked[problem.id] % len(self.judgements)]
        self.asked[problem.id] += 1
        self.given[response_text] = judged
        return judged


def run_of(name: str, *judgements: Judgement) -> tuple[Any, Numbers, list[list[ChatTurn]]]:
    """Return the run of a recipe under such a verifier, and the turns of each prompt that it made for the teacher."""
    read: list[list[ChatTurn]] = []

    def render(turns: Any, tools: Any) -> Any:
        read.append([*turns])
        return simulated_turn_ids(turns)

    earlier = (ChatTurn(role="system", content="EARLIER"),)
    prompts = [
        msgspec.structs.replace(
            each,
            message=f"{each.problem.text} BOX",
            problem=msgspec.structs.replace(each.problem, history=earlier, solution="SOLVED"),
        )
        for each in simulated_prompts(4)
    ]
    verifier = Numbers(*judgements)
    given = {"prompts": prompts, "iterations": 1, "batch_size": 4, "verifier": verifier}
    return simulated_run(simulated_recipe(name), teachers=only(render_turns=render), **given), verifier, read


RIGHT, WRONG = Judgement(Verdict.CORRECT), Judgement(Verdict.WRONG)
TAKEN_FOR_TRUTH = [
    Judgement(Verdict.WRONG, -1.0),
    Judgement(Verdict.WRONG, 0.5),
    Judgement(Verdict.UNJUDGED, 0.5),
    Judgement(Verdict.UNJUDGED, -1.0),
    Judgement(Verdict.NO_ANSWER, 1.0),
]


@pytest.mark.parametrize("other", TAKEN_FOR_TRUTH, ids=str)
def test_sdpo_shows_right_attempts_whatever_numbers_the_verifier_gives(other):
    run, verifier, read = run_of("sdpo", other, Judgement(Verdict.CORRECT, -1.0), other)
    assert len(run.trained) == len(read) == 12
    shown = [turns[-1].content.partition(" BOX ")[2] for turns in read]
    assert all(verifier.given[text].verdict is Verdict.CORRECT for text in shown if text)
    assert sum(map(bool, shown)) == 8  # the other two of each group


def test_what_a_recipe_shows_the_teacher_has_the_students_instruction_and_earlier_turns():
    _, _, of_sdpo = run_of("sdpo", RIGHT)
    _, _, of_sdft = run_of("sdft", RIGHT)
    for turns in (*of_sdpo, *of_sdft):
        assert turns[0].content == "EARLIER"
    for turns in of_sdpo:
        assert [turn.role for turn in turns] == ["system", "user"]
        assert turns[1].content.startswith("problem ")
        assert " BOX " in turns[1].content
    for turns in of_sdft:
        assert [turn.role for turn in turns] == ["system", "user", "assistant", "user"]
        assert turns[1] == turns[3]
        assert turns[1].content.endswith(" BOX")
        assert turns[2].content == "SOLVED"


@pytest.mark.parametrize("name", ["scope", "paced"])
@pytest.mark.parametrize("other", [Judgement(Verdict.TIMEOUT), Judgement(Verdict.ERROR), *TAKEN_FOR_TRUTH], ids=str)
def test_what_has_no_verdict_is_taken_neither_for_right_nor_for_wrong(name, other):
    run, *_ = run_of(name, other)
    is_wrong = other.verdict.reward is not None
    assert len(run.trained) == is_wrong * len(run.samples)
    assert all(bool(each.record.get("left_out")) != is_wrong for each in run.samples)
    for each in run.trained:
        if name == "paced":  # no rate of right ones is between 0 and 1
            assert not any(term.weights is None or term.weights.any() for term in (*each.pulls, *each.soft_targets))
            continue
        assert not each.soft_targets  # a likelihood is of right responses
        assert len(each.pulls) == 1


RATES = """
student: {tokens_per_s: 4000, tokens_per_s_each: 200}
teacher: {tokens_per_s: 4000}
reference: {tokens_per_s: 4000}
trainer: {tokens_per_s: 4000, fixed_s: 0.2}
update_s: 0.3
lengths: {median: 50, sigma: 0.4}
"""


OFTEN = ("kdrl", "rethinking_opd", "speculative_kd")  # a group, chosen tokens, rounds


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[] if each in OFTEN else [pytest.mark.long]) for each in NAMES],
)
def test_simulate_foretells_its_run(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.chdir(RECIPES.parents[1])
    (tmp_path / "rates.yaml").write_text(RATES)
    few = ["training.batch_size=16", "training.mini_batch_size=16"]
    command = ["simulate", str(RECIPES / f"{name}.yaml"), *few, "--rates", str(tmp_path / "rates.yaml")]
    done = CliRunner().invoke(app, [*command, "--max-staleness", "1", "--iterations", "2", "--json"])
    assert done.exit_code == 0, done.output
    strict, stale = json.loads(done.stdout)["outcomes"]
    assert 0 < stale["iteration_s"] <= strict["iteration_s"]
