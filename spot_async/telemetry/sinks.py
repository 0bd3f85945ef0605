"""Sends an iteration's metrics to TensorBoard, Weights & Biases and Prometheus (`prometheus.py`).

All are off by default. They get the metrics of `metrics.jsonl` under the same names (docs/metrics.md), and the
evaluations before and after training. Packages are imported only when their sink is asked for. None of them can end a
run (`side_sink.py`).

A run that goes back to a checkpoint makes some iterations once more. Its sinks then continue from the rows that are
left, so that each iteration is there once. Row 0 among them is the evaluation before training.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from spot_async.base.files import read_bounded
from spot_async.base.secrets import SECRETS
from spot_async.base.text import first_line
from spot_async.config import Config, TelemetryConfig, WandbConfig
from spot_async.errors import ConfigError
from spot_async.run_directory.reading import EVALUATION, EVALUATION_ITERATION, evaluated_iteration, has_evaluation
from spot_async.stages.stage import Stage
from spot_async.telemetry.side_sink import MetricSink, SideSink, Warn, split_row

ID_FILE = "id"  # of the run at W&B, which a resumed run continues
ID_BYTES, MAX_ID_BYTES = 6, 128
# Curves that people look at first, by title: regular expressions of metrics' names.
OVERVIEW = {
    "accuracy of rollouts": ("rollout/accuracy",),
    "held out": ("evaluation/avg_[0-9]+", "evaluation/pass_[0-9]+"),
    "reward": ("rollout/reward", "rollout/reward_spread"),
    "length of rollouts": ("rollout/.*tokens",),
    "entropy": ("rollout/entropy_nats", "teacher/entropy_nats"),
    "does the teacher point to right answers?": ("teacher/outcome_slope", "teacher/opd_gain"),
    "loss": ("train/loss.*",),
    "gradient": ("train/grad_norm",),
    "time of an iteration": ("time/.*_s",),
    "tokens a second": ("throughput/generated_tokens_per_s",),
}


def check_packages(config: TelemetryConfig) -> None:
    """Raise ConfigError, which says what to install, if a sink is asked for whose package is missing."""
    wanted = {"tensorboard": ("tensorboardX", config.tensorboard), "wandb": ("wandb", config.wandb is not None)}
    for sink, (package, is_wanted) in wanted.items():
        if is_wanted and importlib.util.find_spec(package) is None:
            raise ConfigError(f"telemetry.{sink}: the package {package} is not installed: pip install {package}")


@contextmanager
def open_sinks(
    config: Config,
    directory: Path,
    iterations: int = 0,
    stages: Callable[[], Sequence[Stage[Any]]] = tuple,
    warn: Warn = lambda line: None,
    report: Sequence[str] = (),
) -> Iterator[list[MetricSink]]:
    """Open the sinks that a run asks for, and close them on leaving. Raises ConfigError if W&B refuses the key.

    The run plans so many `iterations`. `stages` returns the stages that there are now: none until the servers have
    answered. `warn` is told of sinks that are lost. `report` is the program that writes the report of a run.
    """
    telemetry = config.telemetry
    sinks: list[SideSink] = []
    if (port := telemetry.prometheus_port) is not None:
        from spot_async.telemetry.prometheus import prometheus_endpoint

        name = f"telemetry.prometheus_port={port}"
        served = prometheus_endpoint(telemetry.prometheus_host, port, directory, iterations, stages, report)
        sinks.append(SideSink(name, served, warn))
    if telemetry.tensorboard:
        sinks.append(SideSink("telemetry.tensorboard", tensorboard_files(directory / "tensorboard"), warn))
    if telemetry.wandb is not None:
        opened = wandb_run(telemetry.wandb, directory, config.model_dump(mode="json"))
        sinks.append(SideSink("telemetry.wandb", opened, warn, abandon=abandon_wandb))
    with ExitStack() as stack:
        yield [stack.enter_context(sink) for sink in sinks]


@contextmanager
def tensorboard_files(directory: Path) -> Iterator[MetricSink]:
    """Write TensorBoard's event files: a scalar for each metric, with the iteration that it is of as its step.

    Its tab "custom scalars" has the overview.

    tensorboardX's `SummaryWriter` would write on a thread of its own, whose failures nobody hears of.
    """
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.summary import custom_scalars, scalar, text

    class Sink:
        def write(self, iteration: int, metrics: Mapping[str, float], texts: Mapping[str, str] = {}) -> None:
            evaluated = evaluated_iteration(iteration, metrics)
            for name, value in metrics.items():
                step = evaluated if name.startswith(EVALUATION) else iteration
                writer.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
            for name, words in texts.items():
                writer.write_event(Event(wall_time=time.time(), step=evaluated, summary=text(name, words)))
            writer.flush()

        def go_back(self, rows: Sequence[Mapping[str, float]]) -> None:
            """Mark where readers drop what they have read. It is the mark of `purge_step`, within one writer."""
            mark = SessionLog(status=SessionLog.START)
            newest = int(rows[-1]["iteration"]) if rows else 0
            writer.write_event(Event(wall_time=time.time(), step=newest + 1, session_log=mark))
            writer.flush()

        def conclude(self, iteration: int, figures: Mapping[str, float], texts: Mapping[str, str] = {}) -> None:
            self.write(iteration, figures, texts)

    directory.mkdir(exist_ok=True)
    suffix = f".{time.time_ns()}"  # tensorboardX names files by the second, and overwrites one of the same name
    with closing(EventsWriter(str(directory / "events"), suffix)) as writer:
        overview = {title: ["Multiline", list(tags)] for title, tags in OVERVIEW.items()}
        writer.write_event(Event(wall_time=time.time(), summary=custom_scalars({"overview": overview})))
        yield Sink()


@contextmanager
def wandb_run(config: WandbConfig, directory: Path, run_config: dict[str, Any]) -> Iterator[MetricSink]:
    """Open a run of Weights & Biases with the resolved configuration. Raises ConfigError if its key is refused.

    W&B takes each step once, and none before another that it has. So a run that goes back sends only what W&B has not
    got. An offline run knows nothing of its earlier parts, so it sends everything once more. Held-out figures are drawn
    over `evaluation/iteration`, since those of an asynchronous run come in the step of a later iteration.
    """
    import wandb

    SECRETS.learn(os.environ.get("WANDB_API_KEY", ""))
    id_file = directory / "wandb" / ID_FILE
    if not id_file.exists():
        id_file.parent.mkdir(exist_ok=True)
        id_file.write_text(secrets.token_hex(ID_BYTES), encoding="utf-8")
    try:
        os.environ["WANDB_DISABLE_GIT"] = "true"  # git would get the keys, and W&B the repository's address
        settings = wandb.Settings(silent=True, console="off")  # only our own console writes to the screen
        with SECRETS.hidden(keep=["WANDB_API_KEY"]):  # from its helper; no longer, as others read them meanwhile
            wandb.setup(settings)
        run = wandb.init(
            project=config.project,
            name=os.environ.get("WANDB_NAME") or directory.name,
            id=read_bounded(id_file, MAX_ID_BYTES).decode(),
            resume="allow",
            dir=str(directory),
            config=run_config,
            settings=settings,
        )
    except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
        raise ConfigError(f"telemetry.wandb: {first_line(error)} (or set WANDB_MODE=offline)") from None
    except ValidationError as error:  # of W&B's own variables
        wrong = error.errors()[0]
        raise ConfigError(f"telemetry.wandb: WANDB_{str(wrong['loc'][0]).upper()}: {wrong['msg']}") from None

    run.define_metric(EVALUATION_ITERATION)
    run.define_metric(f"{EVALUATION}*", step_metric=EVALUATION_ITERATION)

    def tables(texts: Mapping[str, str]) -> dict[str, Any]:
        return {f"{EVALUATION}samples": wandb.Table(["name", "text"], list(map(list, texts.items())))} if texts else {}

    next_iteration = run.step  # a resumed run's is the one after the last that W&B has
    is_open = False  # whether the step before that is this process's, and has no held-out figures yet

    class Sink:
        def write(self, iteration: int, metrics: Mapping[str, float], texts: Mapping[str, str] = {}) -> None:
            nonlocal next_iteration, is_open
            if iteration < next_iteration:  # W&B would ignore it with a complaint on the screen
                return
            rest, evaluated = {**metrics, **tables(texts)}, evaluated_iteration(iteration, metrics)
            if has_evaluation(metrics):
                figures = {name: rest.pop(name) for name in metrics if name.startswith(EVALUATION)}
                figures[EVALUATION_ITERATION] = evaluated
                if evaluated < iteration and is_open:  # its own step stays open for the evaluation after training
                    run.log(figures, step=next_iteration - 1)
                else:
                    rest |= figures
            for title, (name, *_) in OVERVIEW.items():  # W&B has its sections in the order of the alphabet
                rest |= {f"0 overview/{title}": metrics[name]} if name in metrics else {}
            run.log(rest, step=iteration)
            next_iteration, is_open = iteration + 1, not has_evaluation(rest)

        def conclude(self, iteration: int, figures: Mapping[str, float], texts: Mapping[str, str] = {}) -> None:
            """Add the figures to the last step, or to one after it if that has others, or is not this process's."""
            step = next_iteration - 1 if is_open else next_iteration
            run.log({**figures, **tables(texts), EVALUATION_ITERATION: iteration}, step=step)
            run.summary.update(dict(figures))

        def go_back(self, rows: Sequence[Mapping[str, float]]) -> None:
            for row in rows:
                self.write(*split_row(row))

    try:
        yield Sink()
    except BaseException:  # W&B's own `__exit__` would print the trace, where our command prints one line
        run.finish(exit_code=1)
        raise
    run.finish()


def abandon_wandb() -> None:
    """Give W&B's helper process up, for which this process would otherwise wait when it exits."""
    import wandb

    wandb.teardown()
