"""A run continues only with the prompts that it began with."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from spot_async.checks.resuming import check_same_numbers, check_same_prompts, digest_of_prompts
from spot_async.config.loading import load_config
from spot_async.errors import ConfigError, DataError
from spot_async.types import Problem, Prompt


class Schedule(list):
    shares = None
    per_epoch = 1


def plan(*token_ids, reads_clock=False, response=None, teacher_ids=None):
    problem = Problem(id="p", text="1+1", answer="2", response=response)
    prompt = Prompt(ordinal=0, problem=problem, token_ids=np.array(token_ids), teacher_ids=teacher_ids)
    return SimpleNamespace(schedule=Schedule([prompt]), reads_clock=reads_clock)


def test_changed_prompts_are_refused_and_a_date_in_them_is_named():
    begun_with = digest_of_prompts(plan(1, 2))
    check_same_prompts(begun_with, plan(1, 2, reads_clock=True))
    with pytest.raises(DataError, match=r"data\.train has other problems, answers or prompts"):
        check_same_prompts(begun_with, plan(1, 3))
    with pytest.raises(DataError, match=r"data\.train has other problems"):
        check_same_prompts(begun_with, plan(1, 2, response="2"))
    with pytest.raises(DataError, match=r"data\.train has other problems"):
        check_same_prompts(begun_with, plan(1, 2, teacher_ids=np.array([1, 2, 3])))
    with pytest.raises(DataError, match="the chat template writes today's date into them"):
        check_same_prompts(begun_with, plan(1, 3, reads_clock=True))


def test_a_run_that_refills_goes_on_so_and_may_be_given_more_room_for_it(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "policy: {kind: grpo}\nstudent: {model: a}\ndata: {train: c}\ntraining: {iterations: 4, refill: true}\n"
    )
    before = load_config(tmp_path / "config.yaml", [])
    check_same_numbers(before, load_config(tmp_path / "config.yaml", ["training.refill_at_most=9"]))
    with pytest.raises(ConfigError, match=r"^training\.refill=False: the run began with True"):
        check_same_numbers(before, load_config(tmp_path / "config.yaml", ["training.refill=false"]))


def test_a_verifier_behind_a_url_may_move_and_become_another_kind_in_a_new_run_only(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "policy: {kind: spot}\nstudent: {model: a}\nteacher: {model: b}\ndata: {train: c}\ntraining: {iterations: 4}\n"
    )

    def config(verifier):
        return load_config(tmp_path / "config.yaml", [f"verifier={verifier}"])

    before = config("{kind: http, url: http://127.0.0.1:1/judge}")
    check_same_numbers(before, config("{kind: http, url: https://judge.example, api_key_env: K, prices: {request: 1}}"))
    with pytest.raises(ConfigError, match=r"^verifier\.kind=boxed_match: the run began with http"):
        check_same_numbers(before, config("boxed_match"))


def test_what_a_plug_in_says_has_no_effect_may_change_too_of_a_set_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "paced_judge.py").write_text(
        "from spot_async import PluginSettings\n\n\n"
        "class Judge:\n"
        "    class Settings(PluginSettings):\n"
        "        WITHOUT_EFFECT = frozenset({'pace'})\n"
        "        pace: int = 1\n"
        "        strictness: int = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "config.yaml").write_text(
        "policy: {kind: grpo}\nstudent: {model: a}\ntraining: {iterations: 4}\n"
        "data: {train: {path: c, verifier: {kind: 'paced_judge:Judge'}}}\n"
    )
    before = load_config(tmp_path / "config.yaml", [])
    check_same_numbers(before, load_config(tmp_path / "config.yaml", ["data.train.verifier.pace=2"]))
    with pytest.raises(ConfigError, match=r"^data\.train\.verifier\.strictness=2: the run began with 1"):
        check_same_numbers(before, load_config(tmp_path / "config.yaml", ["data.train.verifier.strictness=2"]))
