"""Whatever befalls a run's servers, trainer and verifier, its invariants hold; and a run that breaks one is noticed."""

from __future__ import annotations

import asyncio
import dataclasses
import re

import pytest
from faults.run import faulty_run
from faults.stateful_trainer import StatefulTrainer
from joined_policy import TakesTurns
from simulated_runs import FAULTS, TURNS

from spot_async import terms
from spot_async.loop import orchestrator
from spot_async.loop.admission import AdmissionBook
from spot_async.loop.publishing import LiveEvaluation, WeightPublisher
from spot_async.replicas.weights import Weights
from spot_async.stages.prompt_episodes import PromptEpisodes
from spot_async.stages.stage import Stage, StageCounters
from spot_async.types import Supervision

SEEDS = range(300)


@pytest.mark.parametrize(
    "shard",
    [
        0,
        *(pytest.param(each, marks=pytest.mark.long) for each in (1, 2, 5, 6, 7)),
        *(pytest.param(each, marks=pytest.mark.nightly) for each in (3, 4, 8, 9)),
    ],
)
def test_the_invariants_hold_for_every_method_and_staleness_whatever_befalls_the_run(shard):
    """A failure is shown with the faults that it needs, and as the line that replays it."""
    assert [how for seed in SEEDS[shard::10] if (how := FAULTS.explained(seed))] == []


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_the_invariants_hold_for_responses_that_two_models_wrote_in_turns(max_staleness):
    runs = [faulty_run(seed, TakesTurns(), max_staleness=max_staleness).run for seed in range(8)]
    spans = [span for run in runs for each in run.trained for span in each.version_spans]
    assert {span.version is None for span in spans} == {False, True}


def test_the_invariants_hold_over_turns_with_an_environment_that_dies_hangs_or_answers_twice():
    """Each seed runs twice, and is the same. `make fault-soak` has 2,000 of them."""
    assert [how for seed in range(45) if (how := TURNS.explained(seed))] == []


# Each of these breaks the code on purpose.


def admit_early(monkeypatch):
    may_admit = AdmissionBook.may_admit
    monkeypatch.setattr(
        AdmissionBook, "may_admit", lambda book, size, *, served: may_admit(book, size, served=served + 1)
    )


def admit_what_no_iteration_is_left_for(monkeypatch):
    make = AdmissionBook.__init__
    monkeypatch.setattr(
        AdmissionBook,
        "__init__",
        lambda book, settings: make(book, dataclasses.replace(settings, iterations=settings.iterations + 1)),
    )


def serve_before_servers_confirm(monkeypatch):
    offer = WeightPublisher.offer

    def serve(publisher, iteration, report, written):
        offer(publisher, iteration, report, written)
        publisher.served = publisher.confirmed = report.snapshot.version

    monkeypatch.setattr(WeightPublisher, "offer", serve)


def skip_an_evaluation(monkeypatch):
    offer = WeightPublisher.offer

    def newest_wins(publisher, *publication):
        publisher._waiting.clear()
        offer(publisher, *publication)

    monkeypatch.setattr(WeightPublisher, "offer", newest_wins)


def evaluate_with_the_gate_open(monkeypatch):
    make = WeightPublisher.__init__

    def made(publisher, student, *arguments, **more):
        async def served_at_once(iteration):
            publisher.served = publisher.confirmed
            return await student.evaluation.measure(iteration)

        opened = LiveEvaluation(student.evaluation.is_due, served_at_once)
        make(publisher, dataclasses.replace(student, evaluation=opened), *arguments, **more)

    monkeypatch.setattr(WeightPublisher, "__init__", made)


def start_an_update_twice(monkeypatch):
    update = WeightPublisher._update

    async def twice(*arguments):
        await asyncio.gather(update(*arguments), update(*arguments))

    monkeypatch.setattr(WeightPublisher, "_update", twice)


def take_batches_as_prompts_finish(monkeypatch):
    finish = AdmissionBook.finish

    def ready_at_once(book, ordinal, *more):
        finish(book, ordinal, *more)
        book._ready.clear()
        book._ready.extend(book._waiting)

    monkeypatch.setattr(AdmissionBook, "finish", ready_at_once)


def train_a_batch_twice(monkeypatch):
    take = AdmissionBook.take_batch

    def again(book):
        return getattr(book, "last", None) or (setattr(book, "last", take(book)) or book.last)

    monkeypatch.setattr(AdmissionBook, "take_batch", again)


def keep_places(monkeypatch):
    monkeypatch.setattr(AdmissionBook, "_free_place", lambda book, ordinal: None)


def forget_which_weights_sampled_which_tokens(monkeypatch):
    monkeypatch.setattr(terms, "Supervision", lambda *, version_spans, **more: Supervision(**more))


def take_a_returning_server_as_up_to_date(monkeypatch):
    async def nothing_is_sent(weights, replica):
        replica.life.version = weights._scheduler.version

    monkeypatch.setattr(Weights, "catch_up", nothing_is_sent)


def prune_weights_that_are_served(monkeypatch):
    make = StatefulTrainer.__init__
    monkeypatch.setattr(
        StatefulTrainer, "__init__", lambda trainer, *args, keep, **more: make(trainer, *args, keep=1, **more)
    )


def forget_to_close_requests(monkeypatch):
    monkeypatch.setattr(Stage, "_close", lambda stage, pending: stage.open.pop(pending))


def tell_an_environment_of_a_step_twice(monkeypatch):
    act = PromptEpisodes._act
    monkeypatch.setattr(
        PromptEpisodes, "_act", lambda episodes, steps, action: act(episodes, steps[:1] + steps, action)
    )


def teach_what_was_read(monkeypatch):
    monkeypatch.setattr(terms, "sampled_tokens", lambda response: terms.counted_tokens(response) | True)
    monkeypatch.setattr(orchestrator, "check_feed", lambda *arguments, **more: None)


def count_no_failures(monkeypatch):
    monkeypatch.setattr(StageCounters, "count_failure", lambda counters, failed: None)


SHOWN_BY = {skip_an_evaluation: 29, forget_which_weights_sampled_which_tokens: 35}  # few others show these


@pytest.mark.parametrize(
    ("noticed", "mutate"),
    [
        ("I6", admit_early),
        ("I6", admit_what_no_iteration_is_left_for),
        ("I9", serve_before_servers_confirm),
        ("I7", skip_an_evaluation),
        ("I9", evaluate_with_the_gate_open),
        ("I5", start_an_update_twice),
        ("I4", take_batches_as_prompts_finish),
        ("supervision of p0 .* is wrong", train_a_batch_twice),
        ("I3", keep_places),
        ("I2", forget_which_weights_sampled_which_tokens),
        ("supervision of .* too old", take_a_returning_server_as_up_to_date),
        ("I7", prune_weights_that_are_served),
        ("I8: .* or see that each request ends", forget_to_close_requests),
        ("I16: .* is told", tell_an_environment_of_a_step_twice),
        ("I16: .* are taught", teach_what_was_read),
        ("I16: .* are counted", count_no_failures),
    ],
)
def test_a_run_that_breaks_an_invariant_is_noticed(noticed, mutate, monkeypatch):
    mutate(monkeypatch)
    kind = TURNS if noticed.startswith("I16") else FAULTS
    seeds = [SHOWN_BY.get(mutate, 0), *range(1, 100)]  # the first one is enough, while seeds mean the same
    found = next(error for seed in seeds if (error := kind.failure(seed)) is not None)
    assert re.match(noticed, str(found)), found
