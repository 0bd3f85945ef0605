"""Shows a run to people while it runs.

A terminal has a live panel, and above it a line for each of at most `LINES` iterations. Elsewhere, and on a dumb
terminal, there is one line per iteration, and one now and then during evaluations, so that a log stays readable. In an
asynchronous run an evaluation is made beside training, and both are shown.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spot_async.base.events import Event
from spot_async.base.text import counted, rough_time, visible
from spot_async.errors import RequestError
from spot_async.evaluation.metrics import over_all
from spot_async.loop.admission import is_trained
from spot_async.loop.events import (
    WAITS_FOR,
    Evaluated,
    IterationFinished,
    Phase,
    PhaseBegan,
    PromptEnded,
    Pump,
    ResponseJudged,
    ServersStarting,
    StepBegan,
    TrainingView,
)
from spot_async.stages.events import busiest
from spot_async.telemetry.bottleneck import percent
from spot_async.telemetry.outcome_slope import areas, outcome_metrics
from spot_async.telemetry.screen import Screen
from spot_async.telemetry.totals import masked_share, of_each, performance_words

REFRESH_PER_S = 4
RATE_WINDOW_S = 5.0
PROGRESS_EVERY_S = 30.0  # between two lines of progress, without a terminal
REASONS_SHOWN = 3
LINES = 100  # about iterations, above the panel
RUNNING = 20  # iterations whose accuracies are averaged


class RunConsole:
    """The listener that shows where a run is, and the results of each iteration."""

    def __init__(self, console: Console, iterations: int) -> None:
        self.console = console
        self._replicas: Callable[[], Sequence[str]] = tuple  # returns a line about each replica
        self._iterations = iterations
        self._step = "starting"
        self._phases: dict[Pump, Phase] = {"train": "wait for batch", "publish": "wait for weights"}  # while it trains
        self._judged = ""  # how far an evaluation beside training is
        self._lag = self._performance = ""  # of the newest iteration
        self._progress: tuple[int, int] | None = None
        self._pace = Pace(time.monotonic())  # of the present step
        self._training_pace = self._pace  # of training, including evaluations in between
        self._paced: TrainingView | None = None  # the one whose training that is
        self._left = ""
        self._training: TrainingView | None = None
        self._accuracy = accuracy_words({})
        self._accuracies: deque[float] = deque(maxlen=RUNNING)
        self._held_out = ""  # the newest figures
        self._evaluation: Evaluated | None = None  # the newest one, until an iteration's line has said it
        self._rate = TokenRate()
        self._started_s = self._said_s = time.monotonic()

    @contextmanager
    def live(self) -> Iterator[None]:
        """Keep the panel on screen while inside."""
        with (
            self.console.unhurried() if isinstance(self.console, Screen) else nullcontext(),
            Live(
                get_renderable=self._render,
                console=self.console,
                refresh_per_second=REFRESH_PER_S,
                transient=True,
                auto_refresh=self.console.is_interactive,
            ),
        ):
            yield

    def on(self, event: Event) -> None:
        match event:
            case ServersStarting():
                self._replicas = event.replicas
            case StepBegan():
                self._show_step(event.name, event.training)
            case PhaseBegan():
                self._phases[event.pump] = event.name
            case ResponseJudged():
                self._show_progress(event.finished, event.total)
            case Evaluated():
                self._evaluation = event
                self._held_out = evaluation_words(event)
            case IterationFinished():
                self._show_iteration(event)
            case PromptEnded(error=RequestError()):
                line = f"prompt {event.prompt.ordinal} ({event.prompt.problem.id}) given up: {event.error}"
                self.console.print(Text(visible(line), style="yellow"))

    def _show_step(self, name: str, training: TrainingView | None) -> None:
        self._step, self._training = name, training
        self._progress = None if training is None else (training.state.iteration, self._iterations)
        self._left, self._judged, self._pace = "", "", Pace(time.monotonic())
        if training is not None:
            if training is not self._paced:
                self._paced, self._training_pace = training, self._pace
            self._pace = self._training_pace
        if not self.console.is_interactive:
            self.say(name)

    def _show_progress(self, finished: int, total: int) -> None:
        responses = f"{finished:,} of {total:,} responses"
        if self._training is None:
            self._see_progress(finished, total)
        else:  # the bar is that of training, which continues
            self._judged = responses
        if not self.console.is_interactive and time.monotonic() - self._said_s >= PROGRESS_EVERY_S:
            line = f"{self._step}: {responses}"
            self.say(f"{line} · {self._left}" if self._left and self._training is None else line)

    def _show_iteration(self, result: IterationFinished) -> None:
        means = result.means
        of_teacher = slope_words(outcome_metrics(result.samples))
        masked = f"masked {percent(share, 1)}" if (share := masked_share([means])) else ""
        self._accuracy = " · ".join(filter(None, [accuracy_words(means), domain_words(means), of_teacher, masked]))
        self._accuracies += [means["rollout/accuracy"]] if "rollout/accuracy" in means else []
        self._see_progress(result.iteration, self._iterations)
        evaluation, self._evaluation = self._evaluation, None
        if not is_trained(result.samples):
            self.warn(no_step_words(result))
        train = result.report.metrics
        self._lag = f"lag {train['lag_mean']:.2f} mean, {train['lag_max']:.0f} max" if "lag_mean" in train else ""
        words = performance_words(result.report.performance)
        self._performance = f"trainer: {words}" if words else ""
        if self.console.is_interactive and result.iteration % (self._iterations // LINES + 1):
            return
        parts = [
            f"iteration {result.iteration}/{self._iterations}",
            self._accuracy,
            f"loss {train['loss']:.4f}" if "loss" in train else "",
            f"kept {means['spot/retained']:.2f} of {means['spot/selected']:.2f}" if "spot/retained" in means else "",
            f"wait {result.times_s.wait_for_batch:.1f} s, train {result.times_s.train:.1f} s",
            self._performance,
            self._lag,
            "" if evaluation is None else evaluation_words(evaluation, result.iteration),
            self._left,
        ]
        self.say(" · ".join(part for part in parts if part))

    def _see_progress(self, finished: int, total: int) -> None:
        self._progress = (finished, total)
        self._left = self._pace.left(time.monotonic(), finished, total)

    def warn(self, line: str) -> None:
        self.console.print(Text(visible(f"warning: {line}"), style="yellow"), soft_wrap=True)

    def say(self, line: str) -> None:
        """Print one line with the time since the start, or where there is no terminal with that of the day."""
        self._said_s = time.monotonic()
        when = self._elapsed() if self.console.is_interactive else time.strftime("%H:%M:%S")
        self.console.print(f"[{when}] {line}", highlight=False, markup=False, soft_wrap=True)

    def _elapsed(self) -> str:
        seconds = int(time.monotonic() - self._started_s)
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"

    def _render(self) -> RenderableType:
        step = f"{self._step}: {self._judged}" if self._judged else self._step
        head = Text.assemble((f"{self._elapsed()}  ", "dim"), (step, "bold"))
        rows: list[RenderableType] = [head]
        if self._progress is not None:
            finished, total = self._progress
            bar = Table.grid(padding=(0, 1))
            words = f"{finished}/{total} · {self._left}" if self._left else f"{finished}/{total}"
            bar.add_row(ProgressBar(total=total, completed=finished, width=40), words)
            rows.append(bar)
        if self._training is not None:
            rows += [self._status(self._training)]
            rows += [Text(self._held_out)] if self._held_out else []
            rows += [Text(self._performance)] if self._performance else []
            rows += [stage_table(self._training)]
        rows += [Text(line, style="dim") for line in self._replicas()]
        return Group(*rows)

    def _status(self, training: TrainingView) -> Text:
        rate = self._rate.update(time.monotonic(), training.stages.tokens_generated)
        phase = self._phases["train"]  # in a wait for a batch, for the stage that most prompts are at
        stage = busiest(training.stages.all) if phase == "wait for batch" else ""
        waits_for = f"{WAITS_FOR[phase]}: {stage}" if stage else WAITS_FOR[phase]
        accuracy = self._accuracy
        if (count := len(self._accuracies)) > 1:
            accuracy += f" · mean of {count} iterations {percent(sum(self._accuracies) / count, 1)}"
        if training.is_strict:
            return Text(" · ".join([accuracy, f"{rate:,.0f} tokens/s", f"waiting for {waits_for}"]))
        trained, served = training.trained.step, training.served.step
        weights = [f"weights: {trained} trained, {served} served", *([self._lag] if self._lag else [])]
        publishing = WAITS_FOR[self._phases["publish"]]
        waits = [f"the trainer waits for {waits_for}", f"publishing waits for {publishing}"]
        return Text("\n".join(" · ".join(line) for line in ([accuracy, f"{rate:,.0f} tokens/s", *weights], waits)))


def domain_words(means: Mapping[str, float]) -> str:
    """Return the accuracy in each domain, and each of several teachers' entropy and pull; empty without either."""
    domains = of_each([means], "rollout", "accuracy")
    said = [f"{domain} {percent(means[name], 1)}" for domain, name in domains.items() if domain != "rollout"]
    for teacher, name in of_each([means], "teacher", "pull_nats").items():
        entropy = means.get(f"teacher/{teacher}/entropy_nats")  # none where it has no rows
        said.append(f"{teacher}: {'' if entropy is None else f'entropy {entropy:.2f}, '}pull {means[name]:+.2f}")
    return ", ".join(said)


def slope_words(outcomes: Mapping[str, float]) -> str:
    """Return an iteration's outcome slope of each teacher; empty where none has any."""
    said = []
    for area in areas([outcomes]):
        slope, error = (outcomes.get(f"{area}/outcome_slope{name}") for name in ("", "_standard_error"))
        if slope is not None and error is not None:
            said.append(f"{area.replace('/', ' ')} to right answers {slope:+.2f} ± {error:.2f}")
    return ", ".join(said)


def no_step_words(result: IterationFinished) -> str:
    """Return why an iteration changed no weights, with the policy's reasons for leaving its samples out."""
    if not result.samples:
        return f"iteration {result.iteration} made no step: its prompts gave no samples; the weights stay as they are"
    reasons = Counter(str(each.record.get("left_out", "no reason given")) for each in result.samples)
    said = ", ".join(f"{count} x {reason}" for reason, count in reasons.most_common(REASONS_SHOWN))
    return (
        f"iteration {result.iteration} made no step: none of its {counted(len(result.samples), 'sample')} could be "
        f"trained on ({said}); the weights stay as they are"
    )


class Pace:
    """Estimates how long a step will still take, from its speed so far."""

    def __init__(self, now_s: float) -> None:
        self._started_s = now_s
        self._before: int | None = None  # how many were finished when the step began

    def left(self, now_s: float, finished: int, total: int) -> str:
        """Return the time that is left in words; empty if nothing is left."""
        if self._before is None:
            self._before = finished - 1
        if finished >= total:
            return ""
        each_s = (now_s - self._started_s) / (finished - self._before)
        return f"about {rough_time(each_s * (total - finished))} left"


class TokenRate:
    """Computes tokens per second over the last few seconds, from a growing total."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def update(self, now_s: float, total: int) -> float:
        self._points.append((now_s, total))
        while now_s - self._points[0][0] > RATE_WINDOW_S:
            self._points.popleft()
        first_s, first = self._points[0]
        return (total - first) / (now_s - first_s) if now_s > first_s else 0.0


def stage_table(training: TrainingView) -> Table:
    """Return what the stages do that have had a request."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("stage", "queue", "in flight", "limit", "done", "retried"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for stage in training.stages.all:
        numbers = (stage.waiting, stage.in_flight, stage.concurrency, stage.counters.completed, stage.counters.retried)
        if any((stage.waiting, stage.in_flight, stage.counters.completed, stage.counters.retried)):
            table.add_row(stage.name, *(f"{number:,}" for number in numbers))
    table.add_row("supervision", "", f"{training.book.waiting:,}", "", "", "")
    return table


def accuracy_words(means: Mapping[str, float]) -> str:
    """Return whose responses are trained on (the student's or, in KD, the teacher's), and how many are correct."""
    if written := of_each([means], "teacher", "accuracy"):
        return ", ".join(f"{teacher} accuracy {percent(means[name], 1)}" for teacher, name in written.items())
    return f"accuracy {percent(means.get('rollout/accuracy'), 1)}"


def evaluation_words(evaluation: Evaluated, iteration: int | None = None) -> str:
    """Return Avg@k and Pass@k over everything, and of which iteration, if it is not this one.

    Empty if nothing was judged.
    """
    figures = over_all(evaluation.result.rows)
    if figures is None or figures.avg is None:
        return ""
    n = figures.samples
    after = "" if evaluation.iteration == iteration else f" after iteration {evaluation.iteration}"
    return f"held out{after}: Avg@{n} {percent(figures.avg.value, 1)}, Pass@{n} {percent(figures.pass_at[n].value, 1)}"
