"""Limits how many requests a replica has at a time, by additive increase and multiplicative decrease. Pure.

The limit starts at the maximum (`serving.max_in_flight`), where only the stages' own limits matter. It comes down when
the server says or shows that it has too much:

* The server refuses a request (429, 503), or does not answer one in time. This counts at once. A
  time-out says nothing of the load if the server had only that request, or if its reply was lost: the server answered
  others of its kind meanwhile, at a pace at which its longest answer would have come in time.
* Latency grows more than the load explains. Requests differ in length, so seconds per unit of work are compared (the
  unit is a token for requests that generate or score). They are compared for each `LeaseRequest.kind` separately: a
  window of many requests against a baseline that follows slowly. On a server that batches, latency may grow in
  proportion to the requests that it has. That is a queue and costs no throughput, so it is no reason to lower the limit
  (`tune` finds the best place on that curve). Growth beyond that costs throughput: memory no longer holds what is in
  flight, or others use the server too.

Latency is only a sign, so it counts only where it means something:

* A short request takes as long as whatever is served beside it. So a window counts only if its kind was a large part of
  what the replica had to do.
* One bad window may be a pause. Two in a row count, if the requests of the second were sent after the first.
* Requests that were in flight while the server got new weights do not count, and neither do their windows.

Neither latency nor a time-out takes the limit below the number of slots that the server is known to have. A lower limit
would leave slots empty, and a request that outlasts its deadline is often the last one in flight. A refusal may take it
lower, since the server knows better.

Two rules are TCP's:

* The limit falls at most once per round trip, since requests sent before the last decrease say nothing of the load
  after it.
* It falls from what was in flight, since a limit that was not reached says nothing. For a refusal that is what was in
  flight then. For a time-out and for latency it is the most in flight over the last windows: the number at the quiet
  end of a burst would be too low for the next one.

`Occupancy` counts what the limit is compared with.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

DECREASE = 0.7  # factor
WINDOW_REQUESTS = 16  # smallest window: fewer requests tell more about themselves than about the server
GROWTH = 2.0  # a window is bad from this many times the latency that the load explains
MAIN_SHARE = 1 / 3  # a kind counts if it has this share of what is in flight; so at most three kinds count
BASELINE_SHARE = 0.1  # weight of the newest window in the baseline, which thus remembers about ten windows


class Decrease(NamedTuple):
    """One time that a limit was lowered, and why."""

    before: int
    after: int
    in_flight: int  # that was too much
    reason: str
    by_latency: bool = False  # by our own measurement, which may be wrong, and not by the server's word


@dataclass(slots=True)
class _Window:
    """Requests of one kind, sent since the window was opened."""

    opened: Moment
    requests: int = 0
    seconds: float = 0.0
    work: float = 0.0
    # The replica's request-seconds while it had each of them, summed. Divided by `seconds`: the mean load they saw.
    busy_s: float = 0.0
    most_in_flight: int = 0


@dataclass(slots=True)
class _Baseline:
    """What the windows of one kind have shown so far."""

    seconds_per_work: float
    load: float  # mean in flight
    most_in_flight: float  # over the last windows; older ones fade
    suspect: tuple[float, float] | None = None  # (seconds per work, load) of the last window if that was bad

    def follow(self, seconds_per_work: float, load: float) -> None:
        self.seconds_per_work += BASELINE_SHARE * (seconds_per_work - self.seconds_per_work)
        self.load += BASELINE_SHARE * (load - self.load)


class ConcurrencyLimit:
    """The limit of one replica. `slots`: those that its server is known to have."""

    def __init__(self, maximum: int, slots: int = 1) -> None:
        self.slots = slots
        self.decreases = 0
        self.value = maximum  # the limit now, at least 1
        self._maximum = maximum
        self._limit = float(maximum)
        self._decreased_s = float("-inf")
        self._interrupted_s = float("-inf")
        self._windows: dict[str, _Window] = {}
        self._baselines: dict[str, _Baseline] = {}

    def succeeded(self, kind: str, *, sent: Moment, now: Moment, work: int, in_flight: int) -> Decrease | None:
        """Note that a request of `kind` was answered; return the decrease that this leads to, if any.

        `work` is what the request amounted to, in tokens. `in_flight` includes the request itself.
        """
        if sent.s < self._decreased_s:
            return None
        # Below the limit, a good answer says nothing about whether more would go well too.
        if self._limit < self._maximum and in_flight >= self.value:
            self._limit = min(self._maximum, self._limit + 1.0 / self._limit)
            self.value = int(self._limit)
        if sent.s < self._interrupted_s:
            return None
        window = self._windows.get(kind)
        if window is None:
            window = self._windows[kind] = _Window(sent)
        if sent.s < window.opened.s:
            return None
        window.requests += 1
        window.seconds += now.s - sent.s
        window.work += max(1, work)
        window.busy_s += now.busy_s - sent.busy_s
        window.most_in_flight = max(window.most_in_flight, in_flight)
        if window.requests < max(WINDOW_REQUESTS, in_flight):  # a window is a round trip of all that is in flight
            return None
        self._windows[kind] = _Window(now)
        share_s = MAIN_SHARE * (now.busy_s - window.opened.busy_s)
        if not window.seconds or now.kind_busy_s - window.opened.kind_busy_s < share_s:
            return None
        return self._judge(kind, window, now.s)

    def interrupted(self, now_s: float) -> None:
        """Note that the server stood still until now, with requests in flight."""
        self._interrupted_s = now_s
        self._windows.clear()

    def refused(self, reason: str, *, sent_s: float, now_s: float, in_flight: int) -> Decrease | None:
        """Note that the server refused a request for now; return the decrease that this leads to, if any."""
        return None if sent_s < self._decreased_s else self._decrease(1, now_s, in_flight, reason)

    def timed_out(
        self, kind: str, reason: str, *, sent: Moment, now: Moment, work: int, in_flight: int
    ) -> Decrease | None:
        """Note that a request of `kind` was not answered in time; return the decrease that this leads to, if any.

        `work` is the most that its answer may amount to, in tokens. `in_flight` includes the request itself.
        """
        elapsed_s, answered = now.s - sent.s, now.kind_work - sent.kind_work
        most = max(in_flight, round((now.busy_s - sent.busy_s) / elapsed_s) if elapsed_s else 0)
        others_s = now.kind_busy_s - sent.kind_busy_s - elapsed_s
        is_lost = answered > 0 and max(1, work) * others_s <= answered * elapsed_s
        if is_lost or most == 1 or sent.s < self._decreased_s:
            return None
        if kind in self._baselines:
            most = max(most, round(self._baselines[kind].most_in_flight))
        return self._decrease(self._known_slots, now.s, most, reason)

    @property
    def _known_slots(self) -> int:
        return min(self.slots, self._maximum)

    def _judge(self, kind: str, window: _Window, now_s: float) -> Decrease | None:
        seconds_per_work, load = window.seconds / window.work, max(1.0, window.busy_s / window.seconds)
        baseline = self._baselines.get(kind)
        if baseline is None:
            self._baselines[kind] = _Baseline(seconds_per_work, load, window.most_in_flight)
            return None
        explained = baseline.seconds_per_work * max(1.0, load / baseline.load)
        baseline.most_in_flight = max(window.most_in_flight, (1.0 - BASELINE_SHARE) * baseline.most_in_flight)
        is_bad, suspect = seconds_per_work > GROWTH * explained, baseline.suspect
        if is_bad and suspect is None:  # perhaps only a pause: the next window decides
            baseline.suspect = (seconds_per_work, load)
            return None
        baseline.suspect = None
        if suspect is not None:
            baseline.follow(*suspect)
        # Bad windows count for the baseline too: pauses that keep coming are normal for this server.
        baseline.follow(seconds_per_work, load)
        if not is_bad:
            return None
        reason = (
            f"{kind} requests took {1e3 * seconds_per_work:.3g} ms a token, "
            f"{seconds_per_work / explained:.1f} times as long as the {load:.0f} in flight explain"
        )
        return self._decrease(self._known_slots, now_s, round(baseline.most_in_flight), reason, by_latency=True)

    def _decrease(
        self, least: int, now_s: float, in_flight: int, reason: str, *, by_latency: bool = False
    ) -> Decrease | None:
        """Lower the limit from what was in flight, not from the limit itself, which may be far above that."""
        before, too_much = self.value, min(self.value, in_flight)
        self._limit = min(self._limit, max(float(least), too_much * DECREASE))
        self.value = int(self._limit)
        self._decreased_s = now_s
        self._windows.clear()
        for baseline in self._baselines.values():
            baseline.suspect = None
        if self.value == before:
            return None
        self.decreases += 1
        return Decrease(before, self.value, too_much, reason, by_latency)


class Moment(NamedTuple):
    """A replica's totals at one time. The mean in flight between two moments is the growth of `busy_s` per second."""

    s: float
    busy_s: float  # seconds in flight until then, summed over all requests
    kind_busy_s: float  # the same, summed over the requests of one `LeaseRequest.kind`
    kind_work: int = 0  # tokens that the answers to these amounted to


@dataclass(slots=True)
class _Count:
    requests: int = 0
    # The times at which requests ended, less the times at which all began: open ones need no list.
    offset_s: float = 0.0
    work: int = 0

    def busy_s(self, now_s: float) -> float:
        return self.requests * now_s + self.offset_s


class Occupancy:
    """How many requests one replica has."""

    def __init__(self) -> None:
        self._all = _Count()
        self._kinds: defaultdict[str, _Count] = defaultdict(_Count)

    @property
    def requests(self) -> int:
        """Requests in flight now."""
        return self._all.requests

    def busy_s(self, now_s: float) -> float:
        """Return the seconds that all requests took together, including those in flight.

        Its growth over some time, divided by that time, is the mean number in flight.
        """
        return self._all.busy_s(now_s)

    def began(self, kind: str, now_s: float) -> None:
        for count in (self._all, self._kinds[kind]):
            count.requests += 1
            count.offset_s -= now_s

    def ended(self, kind: str, now_s: float) -> None:
        for count in (self._all, self._kinds[kind]):
            count.requests -= 1
            count.offset_s += now_s

    def answered(self, kind: str, work: int) -> None:
        self._kinds[kind].work += max(1, work)

    def at(self, kind: str, now_s: float) -> Moment:
        of_kind = self._kinds[kind]
        return Moment(now_s, self._all.busy_s(now_s), of_kind.busy_s(now_s), of_kind.work)
