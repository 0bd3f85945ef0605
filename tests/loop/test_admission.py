"""The admission book against a plain list of prompts, under orders that a run could produce."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spot_async.loop.admission import AdmissionBook, PromptState, QueueSettings

LIVE = ("running", "queued", "batched")
FREE = 1 << 30


def book(batch_size=2, max_staleness=0, capacity_prompts=100, capacity_bytes=FREE, iterations=100, refill=None):
    settings = QueueSettings(
        batch_size=batch_size,
        iterations=iterations,
        max_staleness=max_staleness,
        capacity_prompts=capacity_prompts,
        capacity_bytes=capacity_bytes,
        refill_at_most=refill,
    )
    return AdmissionBook(settings)


def group(*, has_trained=True):
    """The samples of a prompt."""
    return [SimpleNamespace(supervision=None), SimpleNamespace(supervision="it" if has_trained else None)]


@given(st.integers(0, 3), st.integers(1, 5), st.integers(0, 6), st.integers(7, 12))
def test_admission_bounds_staleness_and_ends_with_the_last_iteration(max_staleness, batch_size, served, iterations):
    """A prompt admitted at `served` is trained in iteration ordinal // batch: at most max_staleness later."""
    written = book(batch_size, max_staleness, iterations=iterations)
    ordinal = 0
    for _ in range(served):
        for _ in range(batch_size):
            written.admit(ordinal, 0)
            written.finish(ordinal, group(), 0)
            ordinal += 1
        written.trained(written.take_batch())
    while written.may_admit(0, served=served):
        written.admit(ordinal, 0)
        ordinal += 1
    assert ordinal == min(served + max_staleness + 1, iterations) * batch_size


def test_a_prompt_is_admitted_finished_and_trained_once():
    written = book(batch_size=1)
    written.admit(0, 0)
    with pytest.raises(ValueError, match="prompt 0 is running: it cannot become running"):
        written.admit(0, 0)
    written.finish(0, group(), 0)
    with pytest.raises(ValueError, match="prompt 0 is queued: it cannot become queued"):
        written.finish(0, group(), 0)
    with pytest.raises(ValueError, match="prompt 0 is queued: it cannot become trained"):
        written.trained([(0, group())])
    batch = written.take_batch()
    written.trained(batch)
    with pytest.raises(ValueError, match="prompt 0 is trained: it cannot become trained"):
        written.trained(batch)
    with pytest.raises(ValueError, match="prompt 1 is not admitted: it cannot become dead"):
        written.give_up(1, PromptState.DEAD)


class AnyRun(RuleBasedStateMachine):
    """Prompts start, end and are trained in any order. The model is a list of prompts, each with a state and bytes."""

    def __init__(self):
        super().__init__()
        self.prompts = {}  # [state, bytes, samples] by ordinal, in admission order
        self.batches = []  # taken and not yet trained
        self.trained = self.served = 0  # steps

    @initialize(
        batch_size=st.integers(1, 4),
        iterations=st.integers(1, 5),
        staleness=st.integers(0, 2),
        more=st.integers(0, 6),
        size=st.integers(0, 120),
        refill=st.none() | st.integers(1, 2),
    )
    def open_the_book(self, batch_size, iterations, staleness, more, size, refill):
        self.batch_size, self.staleness, self.capacity, self.most_bytes = batch_size, staleness, batch_size + more, size
        self.iterations, self.refill = iterations, refill
        self.book = book(batch_size, staleness, self.capacity, size, iterations, refill)

    def of(self, *states):
        return [ordinal for ordinal, (state, *_) in self.prompts.items() if state in states]

    def is_in_vain(self, ordinal):
        samples = self.prompts[ordinal][2]
        return self.refill is not None and samples is not None and not samples[1].supervision

    def placed(self):
        return [ordinal for ordinal in self.of(*LIVE) if not self.is_in_vain(ordinal)]

    def held_bytes(self):
        """Also of those that fill no place: their records wait for the batch all the same."""
        return sum(self.prompts[ordinal][1] for ordinal in self.of(*LIVE))

    def before_the_first_that_runs(self):
        return itertools.takewhile(lambda ordinal: self.prompts[ordinal][0] != "running", self.prompts)

    def next_ones(self):
        """Return the next batch: finished prompts up to the one that makes it full. None if none does."""
        found = [ordinal for ordinal in self.before_the_first_that_runs() if self.prompts[ordinal][0] == "queued"]
        full = [end for end, ordinal in enumerate(found, start=1) if not self.is_in_vain(ordinal)]
        return found[: full[self.batch_size - 1]] if len(full) >= self.batch_size else None

    @rule(size=st.integers(0, 60), gap=st.integers(1, 3))
    def admit(self, size, gap):
        has_bytes = self.held_bytes() + size <= self.most_bytes
        held = len(self.placed())
        has_room = held < self.capacity and (has_bytes or held < self.batch_size)
        batches = min(self.staleness + self.served + 1, self.iterations)
        is_fresh = held + len(self.of("trained", "left_out")) < batches * self.batch_size
        if self.refill is not None:  # nor may it be far ahead of a slow one
            unsettled = len(self.prompts) - len([*self.before_the_first_that_runs()])
            is_fresh &= unsettled < (self.staleness + 1 + self.refill) * self.batch_size
        ordinal = max(self.prompts, default=-1) + gap
        assert self.book.may_admit(size, served=self.served) == (has_room and is_fresh)
        if has_room and is_fresh:
            self.book.admit(ordinal, size)
            self.prompts[ordinal] = ["running", size, None]
        elif not has_room:
            with pytest.raises(ValueError, match="no room"):
                self.book.admit(ordinal, size)

    @precondition(lambda self: self.of("running"))
    @rule(data=st.data(), size=st.integers(0, 90), has_trained=st.booleans())
    def finish(self, data, size, has_trained):
        ordinal, samples = data.draw(st.sampled_from(self.of("running"))), group(has_trained=has_trained)
        self.book.finish(ordinal, samples, size)
        self.prompts[ordinal] = ["queued", size, samples]

    @precondition(lambda self: self.of("running"))
    @rule(data=st.data(), is_paid=st.booleans())
    def give_up(self, data, is_paid):
        ordinal = data.draw(st.sampled_from(self.of("running")))
        self.book.give_up(ordinal, PromptState.DEAD if is_paid else PromptState.UNPAID)
        self.prompts[ordinal] = ["dead" if is_paid else "unpaid", 0, None]

    @rule()
    def take_batch(self):
        ordinals = self.next_ones()
        batch = self.book.take_batch()
        if ordinals is None:
            assert batch is None
            return
        assert batch == [(ordinal, self.prompts[ordinal][2]) for ordinal in ordinals]
        self.batches.append(batch)
        for ordinal in ordinals:
            self.prompts[ordinal][0] = "batched"

    @precondition(lambda self: self.served < self.trained)
    @rule()
    def serve(self):
        self.served = self.trained

    @precondition(lambda self: self.batches)
    @rule()
    def train(self):
        batch = self.batches.pop(0)
        self.book.trained(batch)
        self.trained += 1
        for ordinal, samples in batch:
            in_vain = "left_out" if self.refill is None else "in_vain"
            self.prompts[ordinal][0] = "trained" if samples[1].supervision else in_vain

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def what_cannot_be_is_refused_and_changes_nothing(self, data):
        ordinal = data.draw(st.sampled_from(list(self.prompts)))
        state = self.prompts[ordinal][0]
        moves = {
            "admit": lambda: self.book.admit(ordinal, 0),
            "finish": lambda: self.book.finish(ordinal, group(), 0),
            "give up": lambda: self.book.give_up(ordinal, PromptState.DEAD),
            "leave unpaid": lambda: self.book.give_up(ordinal, PromptState.UNPAID),
            "train": lambda: self.book.trained([(ordinal, group())]),
        }
        allowed = {"running": ("finish", "give up", "leave unpaid"), "batched": ("train",)}.get(state, ())
        for name in moves.keys() - set(allowed):
            with pytest.raises(ValueError, match=f"prompt {ordinal} "):
                moves[name]()

    @invariant()
    def each_prompt_is_in_one_state(self):
        for state in PromptState:
            assert self.book.ordinals(state) == self.of(state.value)
            assert self.book.count(state) == self.book.counts[state] == len(self.of(state.value))
        assert self.book.waiting == len(self.of("queued"))
        assert self.book.finished == len(self.prompts) - len(self.of("running", "unpaid"))

    @invariant()
    def places_are_those_of_prompts_that_run_wait_or_are_trained_on(self):
        assert (self.book.held_prompts, self.book.held_bytes) == (len(self.placed()), self.held_bytes())
        assert self.book.held_prompts <= self.capacity

    @invariant()
    def a_run_never_waits_for_itself(self):
        """With nothing under way there is a batch, or a prompt may start, however large those in the queue are."""
        is_idle = not self.of("running", "batched") and self.next_ones() is None
        if is_idle and self.served == self.trained < self.iterations:
            assert self.book.may_admit(FREE, served=self.served)

    def teardown(self):
        self.book.leave_over()
        assert self.book.ordinals(PromptState.LEFT_OVER) == self.of("queued")
        assert self.book.held_prompts == len([each for each in self.placed() if each not in self.of("queued")])
        assert self.book.waiting == 0
        assert self.book.take_batch() is None


TestAnyRun = AnyRun.TestCase
