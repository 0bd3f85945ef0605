"""Authors of policies and verifiers get one line that names their class and what it must do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from spot_async.base.tasks import both, gather, leaves, root_cause
from spot_async.errors import ConfigError, PluginError
from spot_async.policies.opd import OpdPolicy
from spot_async.stages.plugin_contract import called, check_policy, state_of
from spot_async.telemetry.run_log import log_events_to
from spot_async.testing.simulation import make_policy, policy_context, simulated_run
from spot_async.trainer.feed_check import WrongSupervisionError
from spot_async.types import Judgement, PolicyNeeds, Supervision, Verdict


class Theirs(OpdPolicy):
    """A policy from outside, as OPD where a test says nothing else."""

    def __init__(self, change: Callable[[Any], Any] = lambda samples: samples) -> None:
        super().__init__(OpdPolicy.Settings(), policy_context())
        self._change = change

    async def supervise(self, prompt: Any, stages: Any) -> Any:
        return self._change(await super().supervise(prompt, stages))


class Revises(Theirs):
    """With a second word, which returns what a change makes of the batch."""

    def __init__(self, revision: Callable[[Any], Any]) -> None:
        super().__init__()
        self._revision = revision

    def revise(self, batch: Any) -> Any:
        return self._revision(batch)


class RevisesNotes(Revises):
    async def supervise(self, prompt: Any, stages: Any) -> Any:
        samples = await super().supervise(prompt, stages)
        return [msgspec.structs.replace(each, notes={"kept": np.arange(3.0)}) for each in samples]


class RevisesLater(Theirs):
    async def revise(self, batch: Any) -> Any:
        return batch.samples


class Observes(Theirs):
    """Is told of iterations, and keeps what `state` returns."""

    def __init__(self, state: Callable[[], Any] = dict, observed: Callable[[Any], Any] = id) -> None:
        super().__init__()
        self.observe = observed
        self.state_dict = state

    def load_state_dict(self, state: Any) -> None:
        raise KeyError(f"phase in {state}")


def divides(report: Any) -> None:
    report.metrics["rollout/accuracy"] /= 0


class ObservesLater(Observes):
    async def load_state_dict(self, state: Any) -> None:  # type: ignore[override]
        pass


class AtOnce(Theirs):
    def supervise(self, prompt: Any, stages: Any) -> Any:
        return []


class Raises(Theirs):
    async def supervise(self, prompt: Any, stages: Any) -> Any:
        return await both(stages.rollout(), self._divide())  # in a task of its own

    async def _divide(self) -> float:
        return 1 / 0


class RaisesToo:
    async def verify(self, problem: Any, response_text: str, *, deadline: float) -> Any:
        return {}["answer"]


class SaysTrue:
    async def verify(self, problem: Any, response_text: str, *, deadline: float) -> Any:
        return True


class Judges:
    """A verifier that makes such a judgement of everything."""

    def __init__(self, verdict: Any, **given: Any) -> None:
        self._verdict, self._given = verdict, given

    async def verify(self, problem: Any, response_text: str, *, deadline: float) -> Any:
        return Judgement(self._verdict, **self._given)


def wrong_logprobs(samples: Any) -> Any:
    supervision = msgspec.structs.replace(samples[0].supervision, behavior_logprobs=[np.nan])
    return [msgspec.structs.replace(samples[0], supervision=supervision)]


def with_terms(sample: Any, **terms: Any) -> Any:
    return msgspec.structs.replace(sample, supervision=msgspec.structs.replace(sample.supervision, **terms))


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        (Theirs(lambda _: None), "policy Theirs.supervise returned None; return a list of Samples"),
        (Theirs(lambda samples: samples[0]), "returned a Sample; return a list of Samples"),
        (Theirs(lambda _: ["x"]), "returned a list with a str in it; return a list of Samples"),
        (
            Theirs(lambda samples: [msgspec.structs.replace(samples[0], supervision={})]),
            "returned a Sample whose supervision is a dict; give a Supervision",
        ),
        (
            Theirs(lambda samples: [with_terms(samples[0], pulls=samples[0].supervision.pulls[0])]),
            "policy Theirs.supervise: pulls is a Pull; give a tuple of Pull, also of one: (term,)",
        ),
        (
            Theirs(lambda samples: [with_terms(samples[0], soft_targets=samples[0].supervision.pulls)]),
            "policy Theirs.supervise: soft_targets is a tuple; give a tuple of SoftTargets",
        ),
        (AtOnce(), "policy AtOnce.supervise returned a list at once; write it as `async def`"),
        (SaysTrue(), "verifier SaysTrue.verify returned True; return a Verdict, such as Verdict.CORRECT"),
        (
            Judges(Verdict.WRONG, reward=float("nan")),
            "verifier Judges.verify raised ValueError: reward nan is no number from -1e+30 to 1e+30, at",
        ),
        (
            Judges(Verdict.TIMEOUT, reward=0),
            "verifier Judges.verify raised ValueError: reward 0 beside the verdict timeout, which is none, at",
        ),
        (Judges("ok"), "verifier Judges.verify raised TypeError: verdict must be a Verdict, not 'ok', at"),
        (Revises(lambda _: None), "policy Revises.revise returned None; return the batch's 16 samples in order"),
        (
            Revises(lambda batch: batch.samples[:1]),
            "policy Revises.revise returned 1 samples; return the batch's 16 samples in order",
        ),
        (
            Revises(lambda batch: ["x"] * len(batch.samples)),
            "policy Revises.revise returned a list with a str in it; return a list",
        ),
        (
            Revises(lambda batch: batch.samples[::-1]),
            "policy Revises.revise changed prompt_ordinal of p0; change terms alone, and return samples in",
        ),
        (
            Revises(lambda batch: [with_terms(each, pulls=[]) for each in batch.samples]),
            "policy Revises.revise: pulls is a list; give a tuple of Pull, also of one: (term,)",
        ),
        (
            Revises(lambda batch: [with_terms(each, advantages=np.ones(1, np.float32)) for each in batch.samples]),
            "policy Revises: supervision of p0 (prompt 0) is wrong: advantages have shape (1,) instead of",
        ),
        (
            Observes(observed=divides),
            f"policy Observes.observe raised ZeroDivisionError: float division by zero, at {__file__}:",
        ),
        (
            Theirs(lambda samples: [msgspec.structs.replace(each, notes={"kept": [1.0]}) for each in samples]),
            "policy Theirs.supervise: notes['kept'] is a list; give an array of int32, float32 or bool",
        ),
        (
            RevisesNotes(lambda batch: batch.samples[0].notes["kept"].sort()),
            "policy RevisesNotes.revise raised ValueError: sort array is read-only, at",
        ),
        (Raises(), f"policy Raises.supervise raised ZeroDivisionError: division by zero, at {__file__}:"),
        (
            Theirs(lambda samples: [Supervision(teacher_logprobs=np.zeros(1))]),
            "policy Theirs.supervise: Supervision.teacher_logprobs is now a pull: give pulls=(pull(scores),)"
            f", at {__file__}:",
        ),
        (RaisesToo(), f"verifier RaisesToo.verify raised KeyError: 'answer', at {__file__}:"),
        (Theirs(wrong_logprobs), "policy Theirs: supervision of p0 (prompt 0) is wrong: behavior_logprobs are"),
    ],
)
def test_what_breaks_the_contract_is_one_line_and_a_trace_in_the_log(plugin: Any, said: str, tmp_path: Path) -> None:
    log, is_verifier = tmp_path / "run.jsonl", hasattr(plugin, "verify")
    with pytest.raises(ExceptionGroup) as caught, log_events_to(log):  # on virtual time, where a hang is another error
        simulated_run(Theirs() if is_verifier else plugin, iterations=1, verifier=plugin if is_verifier else None)
    cause = root_cause(caught.value)
    assert isinstance(cause, PluginError)
    assert said in str(cause)
    assert "\n" not in str(cause)
    assert "Traceback" in log.read_text()


class ScoresSixTimes(Theirs):
    async def supervise(self, prompt: Any, stages: Any) -> Any:
        samples = await OpdPolicy.supervise(self, prompt, stages)
        response_ids = samples[0].supervision.response_ids
        await gather(stages.score(response_ids, top_k=1) for _ in range(6))
        return samples


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_policy_that_asks_for_more_at_once_than_its_needs_state_is_told_at_its_first_prompt(staleness: int) -> None:
    policy = ScoresSixTimes()
    with pytest.raises(ExceptionGroup) as caught:
        simulated_run(policy, iterations=2, max_staleness=staleness)
    cause = root_cause(caught.value)
    assert isinstance(cause, PluginError)
    assert str(cause).startswith(
        "policy ScoresSixTimes.supervise: the policy asks score for 2 answers of a prompt at once, and its needs state "
        "1: set PolicyNeeds.scores_per_prompt to what it asks for"
    )
    assert f", at {__file__}:" in str(cause)
    policy.needs = msgspec.structs.replace(policy.needs, scores_per_prompt=6)
    assert len(simulated_run(policy, iterations=2, max_staleness=staleness).batches) == 2


@pytest.mark.parametrize("old", ["soft_target_bytes", "soft_target_bytes_per_token"])
def test_a_need_by_its_old_name_is_answered_with_the_new_one(old: str) -> None:
    with pytest.raises(PluginError, match=f"PolicyNeeds.{old} is now {old.replace('soft_target', 'term')}"):
        PolicyNeeds(**{old: 8})


def test_wrong_supervision_of_our_own_policies_stays_a_bug_with_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = OpdPolicy.supervise

    async def supervise(self: OpdPolicy, prompt: Any, stages: Any) -> Any:
        return wrong_logprobs(await honest(self, prompt, stages))

    monkeypatch.setattr(OpdPolicy, "supervise", supervise)
    with pytest.raises(ExceptionGroup) as caught:
        simulated_run(make_policy(OpdPolicy), iterations=1)
    assert any(isinstance(each, WrongSupervisionError) for each in leaves(caught.value))
    with pytest.raises(ExceptionGroup):  # so the command shows it
        root_cause(caught.value)


def test_a_policy_without_needs_or_supervise_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"policy\.kind=mine:P: SimpleNamespace\.needs is None: give it a property"):
        check_policy(SimpleNamespace(supervise=print), "mine:P")
    with pytest.raises(ConfigError, match="no method `supervise`"):
        check_policy(SimpleNamespace(needs=PolicyNeeds()), "mine:P")
    with pytest.raises(ConfigError, match=r"RevisesLater\.revise is a coroutine; it asks no server: write it as `def`"):
        check_policy(RevisesLater(), "mine:RevisesLater")
    with pytest.raises(ConfigError, match=r"ObservesLater\.load_state_dict is a coroutine; it asks no server: write"):
        check_policy(ObservesLater(), "mine:ObservesLater")
    forgets = Observes()
    forgets.state_dict = None  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"Observes has `observe` and no `state_dict`: a run that goes on needs"):
        check_policy(forgets, "mine:Observes")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (torch_like := type("Tensor", (), {})(), r"returned a Tensor; give plain JSON values, in a dict \(.*Tensor"),
        ({"mean": torch_like}, r"returned a dict; give plain JSON values, in a dict \(.* Tensor is not JSON"),
        ({"mean": np.float32(0.5)}, "returned a dict; give plain JSON values.* float32 is not JSON"),
        ({"mean": np.zeros(2)}, "returned a dict; give plain JSON values.* ndarray is not JSON"),
        ({"mean": float("nan")}, "returned a dict; give plain JSON values.* float values are not JSON"),
        ({"phases": (1, 2)}, r"returned a dict; .*, in a dict \(without tuples, and with texts as keys\)$"),
        ({"by": {1: 0.5}}, r"returned a dict; .*, in a dict \(without tuples, and with texts as keys\)$"),
        ([1, 2], "returned a list; give plain JSON values, in a dict$"),
        (None, "returned None; give plain JSON values, in a dict$"),
    ],
)
def test_a_state_that_json_would_not_give_back_is_refused_before_anything_starts(state: Any, said: str) -> None:
    with pytest.raises(PluginError, match=f"policy Observes.state_dict {said}"):
        check_policy(Observes(lambda: state), "mine:Observes")


def test_a_state_comes_back_as_it_was_and_what_a_policy_raises_of_it_names_its_line() -> None:
    state = {"best": 0.1 + 0.2, "seen": [1, None, "\ud800"], "by": {"p1": 2**70, "": True}, "last": np.float64(0.1)}
    kept = state_of(Observes(lambda: state))
    assert kept is not None
    assert json.loads(kept) == state
    assert state_of(Theirs()) is None
    with pytest.raises(PluginError, match=rf"policy Observes\.load_state_dict raised KeyError: .*, at {__file__}:"):
        called(Observes(), "load_state_dict", json.loads(kept))
