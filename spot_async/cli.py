"""The `spot-async` command: reads arguments, prints outcomes, and turns failures into one line and a code.

Exit codes: 0 done, 1 the run failed, 2 it could not start (configuration or data), 3 it stalled, 4 its budget is
spent, 130 and 143 stopped by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from spot_async.concurrency import root_cause
from spot_async.config import Config
from spot_async.config_loading import dump_yaml, load_config
from spot_async.errors import BudgetSpentError, ConfigError, DataError, SpotError, StalledError
from spot_async.inspection.terminal import counted
from spot_async.memory import tune_gc
from spot_async.run_directory import RunDirectory

T = TypeVar("T")

EXIT_CODES: dict[type[SpotError], int] = {ConfigError: 2, DataError: 2, StalledError: 3, BudgetSpentError: 4}

app = typer.Typer(
    name="spot-async",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(no_args_is_help=True, help="Look at problem files.")
app.add_typer(data_app, name="data")
screen = Console()
stderr = Console(stderr=True, soft_wrap=True, highlight=False)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; see configs/quickstart.yaml")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="override any key, e.g. training.learning_rate=1e-4"),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="a run directory")]
PagePath = Annotated[Path | None, typer.Option("--html", metavar="PATH", help="where the page goes")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="show configuration, a prompt and what would start; start nothing")
]


def show_version(wanted: bool) -> None:
    if wanted:
        screen.print(f"spot-async {importlib.metadata.version('spot-async')}", highlight=False)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None:
    """On-policy distillation of small reasoning models, with sparse probing and outcome calibration."""


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    earlier: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="a run whose responses' lengths estimates assume")
    ] = None,
) -> None:
    """Train a student from a teacher, and evaluate it before and after.

    Writes a run directory with the trained student as a Hugging Face directory (student/), metrics.jsonl,
    samples.jsonl (what the policy saw), the resolved configuration and all logs.
    """
    from spot_async.preflight import plan_training  # imports transformers: not for --help
    from spot_async.spending.estimate import estimate_run, show_estimates
    from spot_async.spending.machine import estimate_machine, show_machine

    try:
        settings = load_config(config, overrides or ())
        path = RunDirectory.choose_path(settings, config.stem)
        RunDirectory.check_unused(path)
        plan = plan_training(settings)
        estimates = estimate_run(settings, plan, earlier)
        machine = estimate_machine(settings, plan, earlier)
        if dry_run:
            show_plan(settings, path, plan)
            show_estimates(screen, estimates)
            show_machine(screen, machine)
            return
        directory = RunDirectory.create(path, settings)
    except (ConfigError, DataError) as error:
        fail(error, code=2)

    from spot_async.runtime import train as run_training
    from spot_async.spending.records import spending_words
    from spot_async.telemetry.console import evaluation_table, unverified_note

    if len(plan.rows) > 2:  # more than read and problems
        screen.print(f"data.train: {words_of(plan.rows)}", highlight=False, soft_wrap=True)
    if plan.filtered:
        screen.print(f"{plan.filtered} of {plan.problems} problems are longer than the prompt limit and left out")
    show_estimates(screen, estimates)
    show_machine(screen, machine)
    training = run_training(settings, plan, directory, screen, exit_process=hung(directory))
    outcome = run_until_stopped(training, directory)
    if outcome.after is not None:
        screen.print(evaluation_table(outcome.before, outcome.after, outcome.best))
        if note := unverified_note(outcome.after):
            screen.print(note)
    states = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in outcome.prompts.items())
    screen.print(f"{counted(outcome.iterations, 'iteration')}; prompts: {states}", highlight=False)
    for role, spent in outcome.spending.get("spending", {}).items():
        screen.print(Text(f"{role} spent: {spending_words(spent)}"), soft_wrap=True)
    screen.print(Text(f"run directory: {path}"))
    screen.print(Text(f"trained student: {path / 'student'}"))
    if outcome.best is not None:
        screen.print(Text(f"best student: {path / 'best'}"))
    if outcome.spent is not None:
        fail(outcome.spent, code=exit_code(outcome.spent), note=saved(directory))


@app.command("eval")
def evaluate(
    config: ConfigPath,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="RUN", help="go on with an evaluation that was stopped, in its directory"),
    ] = None,
) -> None:
    """Evaluate `student.model` on the held-out problems of the `evaluation` section.

    To evaluate a trained student: spot-async eval CONFIG student.model=RUN/student

    Writes evaluation.json (the figures; what `compare` reads) and evaluation.jsonl (every judged response).
    """
    from spot_async.evaluation.figures import read_figures
    from spot_async.evaluation.measuring import is_complete
    from spot_async.model_files import read_model
    from spot_async.preflight import plan_evaluation
    from spot_async.telemetry.figures_table import figures_table

    try:
        settings = load_config(config, overrides or ())
        path = resume or RunDirectory.choose_path(settings, f"{config.stem}-eval")
        student = read_model("student", settings.student.model)
        benchmarks = plan_evaluation(settings, student)
        if dry_run:
            show_evaluation_plan(settings, path, benchmarks, student)
            return
        directory = RunDirectory.create(path, settings) if resume is None else RunDirectory.open(path)
        complete = resume is not None and is_complete(directory, settings, benchmarks, student.directory)
    except (ConfigError, DataError) as error:
        fail(error, code=2)

    from spot_async.runtime import evaluate_student

    if complete:
        screen.print("this evaluation is complete")
    else:
        run = evaluate_student(settings, student, benchmarks, directory, screen, exit_process=hung(directory))
        run_until_stopped(run, directory)
    screen.print(figures_table(read_figures(directory.path / "evaluation.json")))
    screen.print(Text(f"run directory: {path}"))


def show_evaluation_plan(config: Config, path: Path, benchmarks: Any, student: Any) -> None:
    """What `eval --dry-run` prints."""
    screen.print(Text(dump_yaml(config)))
    for benchmark in benchmarks:
        first = benchmark.sources[0]
        screen.rule(f"{benchmark.name}: first prompt ({len(first.token_ids)} tokens)", align="left")
        screen.print(Text(student.vocabulary.tokenizer.decode(first.token_ids.tolist())))
    screen.rule("would start", align="left")
    asked = [
        f"{benchmark.name}: {counted(len(benchmark.sources), 'problem')} x {counted(benchmark.samples, 'response')}"
        for benchmark in benchmarks
    ]
    lines = ["the student's server, and evaluate", *asked, f"into {path}"]
    screen.print(Text("\n".join(lines)))


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    options_metavar="MODEL_DIR [--uds PATH | --port N] [OPTIONS]",
)
def serve(context: typer.Context) -> None:
    """Serve a model directory: generation, scoring, weight updates. See serve --help."""
    from spot_async.serving.__main__ import main as serve_model

    serve_model(context.args, program="spot-async serve")


@app.command()
def doctor(
    config: ConfigPath,
    overrides: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="print what was found as JSON")] = False,
    directory: Annotated[Path | None, typer.Option(help="where the servers' logs go; default: temporary")] = None,
) -> None:
    """Start or attach a run's servers, ask them everything that a run depends on, and say what is unsafe.

    Nothing is trained. `train` makes the same checks before it begins. Exit code 1 when the run would be unsafe or a
    server fails, 2 when the configuration is wrong.
    """
    from spot_async.preflight import plan_training

    try:
        settings = load_config(config, overrides or ())
        plan = plan_training(settings)
    except (ConfigError, DataError) as error:
        fail(error, code=2)

    from spot_async.doctor import examine_and_show
    from spot_async.scratch import working_directory

    try:
        with working_directory(directory) as path:
            is_safe = examine_and_show(screen, settings, plan, path, json=json)
    except (SpotError, BaseExceptionGroup) as error:
        fail(root_cause(error), code=1)
    if not is_safe:
        raise typer.Exit(1)


@app.command()
def tune(
    config: ConfigPath,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="default: CONFIG.tuned.yaml beside CONFIG")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="longest time the ramp of one server may take")] = 20.0,
    limit_requests: Annotated[int | None, typer.Option(min=1, help="sent to one server at most")] = None,
    paid: Annotated[
        bool, typer.Option("--paid", help="also ramp endpoints whose settings name prices or rate limits")
    ] = False,
    directory: Annotated[Path | None, typer.Option(help="where the servers' logs go; default: temporary")] = None,
) -> None:
    """Find how many requests in flight each of a run's servers pays for, and write the limits that follow.

    Asks for a few prompts as the run would, then sends those requests again, more and more of them at a time, to one
    server after the other. The file that is written is a configuration to train with: it has CONFIG as its base.
    """
    from spot_async.preflight import plan_training
    from spot_async.tuning.results import check_output
    from spot_async.tuning.running import TuneOptions, check_options, without_files

    output = output or config.with_name(f"{config.stem}.tuned.yaml")
    options = TuneOptions(seconds, limit_requests, paid)
    try:
        settings = without_files(load_config(config, overrides or ()))
        check_output(config, output)
        check_options(settings, options)
        plan = plan_training(settings)
    except (ConfigError, DataError) as error:
        fail(error, code=2)

    from spot_async.scratch import working_directory
    from spot_async.tuning import command

    try:
        with working_directory(directory) as path:
            command.run(screen, settings, plan, path, options, source=config, output=output, overrides=overrides or ())
    except (SpotError, BaseExceptionGroup) as error:
        cause = root_cause(error)
        fail(cause, code=exit_code(cause))


@app.command()
def conformance(
    backend: Annotated[str, typer.Option(metavar="KIND", help="an installed backend, or `module:Class`")],
    model: Annotated[str, typer.Option(metavar="DIR", help="the model it serves, which is also loaded here")],
    url: Annotated[str | None, typer.Option(help="of a server that runs already")] = None,
    launch_python: Annotated[
        str | None, typer.Option(metavar="PYTHON", help="start a server with this interpreter")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="the backend's own settings, e.g. slots=8")
    ] = None,
    role: Annotated[Literal["student", "teacher"], typer.Option(help="whose part the backend plays")] = "student",
    tolerance: Annotated[float, typer.Option(help="nats between served and exact log-probabilities")] = 2e-5,
    device: Annotated[str, typer.Option(help="torch device of the model that is loaded here")] = "cpu",
    directory: Annotated[
        Path | None,
        typer.Option(help="for logs and weights to update to; the server must be able to read it; default: temporary"),
    ] = None,
) -> None:
    """Check that a backend keeps its contract, against the same model in torch (float32).

    Tokens, log-probabilities, entropies, seeds, deadlines, refusals and weight updates. A server's weights are replaced
    while it is checked, and put back. Exit code 1 when a check fails.
    """
    from spot_async.conformance import command

    try:
        config = command.read_settings(backend, model, url, launch_python, settings or ())
    except ConfigError as error:
        fail(error, code=2)
    try:
        failed = command.run(screen, config, directory, role=role, tolerance_nats=tolerance, device=device)
    except (SpotError, BaseExceptionGroup) as error:
        cause = root_cause(error)
        fail(cause, code=exit_code(cause))
    if failed:
        raise typer.Exit(1)


@data_app.command("check")
def check_data(
    target: Annotated[
        str, typer.Argument(metavar="FILE|CONFIG", help="a problem file, a hub id, or a run's YAML file")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="of the problem set, e.g. fields.answer=gold; of CONFIG, overrides of it"
        ),
    ] = None,
    layout: Annotated[str | None, typer.Option(help="short for layout=NAME; see docs/data.md")] = None,
    against: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="an evaluation set to look for; may be given again")
    ] = None,
    verifier: Annotated[str | None, typer.Option(metavar="KIND", help="default: boxed_match, or CONFIG's")] = None,
    model: Annotated[str | None, typer.Option(metavar="DIR", help="whose tokenizer renders prompts of a FILE")] = None,
) -> None:
    """Read problems as a run would: what is kept, dropped and mended, what answers cannot be verified, what overlaps.

    Exit code 1 when an answer is not right by its own verifier, 2 when something cannot be read.
    """
    from spot_async.data import command

    try:
        if command.is_config(target):
            if layout or model:
                raise ConfigError("--layout and --model are for files; CONFIG names both")
            check = command.check_of_config(Path(target), settings or (), against or (), verifier)
        else:
            chosen = [*(settings or ()), *([f"layout={layout}"] if layout else ())]
            check = command.check_of_file(target, chosen, against or (), verifier, model)
        is_verifiable = command.run(screen, check)
    except (ConfigError, DataError) as error:
        fail(error, code=2)
    if not is_verifiable:
        raise typer.Exit(1)


@app.command("inspect")
def inspect_run(
    run: RunPath,
    sample: Annotated[
        str | None, typer.Argument(metavar="[SAMPLE]", help="a sample's number, or a problem's id for its latest one")
    ] = None,
    html: PagePath = None,
    iteration: Annotated[int | None, typer.Option(help="list this one; default: the last")] = None,
    verdict: Annotated[str | None, typer.Option(help="list only samples with this verdict")] = None,
) -> None:
    """List what a run sampled, or show one sample: scores, probed positions, probes, targets.

    A sample is also written as a page, to RUN/inspect-NUMBER.html unless --html says otherwise.
    """
    from spot_async.inspection import commands

    try:
        if sample is None and html is not None:
            raise ConfigError("--html: name a sample; a list has no page")
        if sample is not None and (iteration is not None or verdict is not None):
            raise ConfigError("--iteration and --verdict choose what is listed; leave them out to see one sample")
        if sample is None:
            commands.list_samples(screen, run, iteration, verdict)
        else:
            commands.show_sample(screen, run, sample, html)
    except (ConfigError, DataError) as error:
        fail(error, code=2)


@app.command()
def report(
    run: RunPath,
    html: PagePath = None,
    tuning: Annotated[Path | None, typer.Option(metavar="FILE", help="also show this .json file of `tune`")] = None,
) -> None:
    """Write one page about a run: curves, what was probed, where the time went and what to change about it.

    It goes to RUN/report.html unless --html says otherwise.
    """
    from spot_async.inspection import commands

    try:
        commands.write_report(screen, run, html, tuning)
    except DataError as error:
        fail(error, code=2)


@app.command("compare")
def compare_runs(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="[NAME=]RUN...", help="directories of `eval` or `train`, or their evaluation*.json"),
    ],
    baseline: Annotated[str | None, typer.Option(help="NAME that differences are from; default: the first")] = None,
    benchmark: Annotated[
        list[str] | None, typer.Option(help="compare only this one; repeat it for several; default: all of the mean")
    ] = None,
    pass_k: Annotated[int | None, typer.Option(help="the k of Pass@k; default: the number of responses")] = None,
    draws: Annotated[int, typer.Option(min=100, help="of the bootstrap")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="of the bootstrap")] = 0,
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999, help="of the intervals")] = 0.95,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="also write Markdown, LaTeX, CSV and curves")
    ] = None,
) -> None:
    """Compare evaluations of the same problems: a table, paired differences, Pass@k curves, compute.

    Nothing is asked of any server. Exit code 2 when the evaluations cannot be paired.
    """
    from spot_async.comparison import command

    options = command.CompareOptions(baseline, benchmark or (), pass_k, draws, seed, confidence, output)
    try:
        command.run(screen, runs, options)
    except DataError as error:
        fail(error, code=2)


def show_plan(config: Config, path: Path, plan: Any) -> None:
    """What `train --dry-run` prints."""
    from spot_async.diagnosis import plan_warnings

    first = next(iter(plan.schedule))
    screen.rule("configuration, defaults included", align="left")
    screen.print(Text(dump_yaml(config)))
    screen.rule(f"first prompt ({len(first.token_ids)} tokens)", align="left")
    screen.print(Text(plan.renderer.text(first.problem)))
    screen.rule("would start", align="left")
    for warning in plan_warnings(plan):
        screen.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    training = config.training
    lines = [
        f"student   {config.student.backend.kind} backend serving {config.student.model}",
        *(
            f"{role:<9} {model.backend.kind} backend serving {model.model}"
            for role, model in (
                ("teacher", config.teacher if plan.policy.needs.teacher else None),
                ("reference", plan.reference),
            )
            if model is not None
        ),
        f"trainer   {training.ranks} rank(s) under torch.distributed, {training.threads} thread(s) each",
        f"run       {counted(plan.schedule.iterations, 'iteration')} of {counted(training.batch_size, 'prompt')} "
        f"in mini-batches of {training.mini_batch_size}, from "
        f"{counted(plan.problems - plan.filtered, 'problem')} ({plan.filtered} too long)",
        f"rows      {words_of(plan.rows)}",
        f"evaluate  {evaluations(config, sum(len(each.sources) for each in plan.evaluation))}",
        f"write     {path}",
    ]
    screen.print(Text("\n".join(lines)))


def words_of(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def evaluations(config: Config, problems: int) -> str:
    """When `problems` held-out problems are evaluated."""
    if config.evaluation is None:
        return "nothing"
    every = f", and every {counted(config.evaluation.eval_every, 'iteration')}" if config.evaluation.eval_every else ""
    return f"{counted(problems, 'problem')} before and after{every}"


def run_until_stopped(run: Coroutine[Any, Any, T], directory: RunDirectory) -> T:
    """Run to the end; on a failure or a signal say in one line why, and what is saved, and exit."""
    received: list[signal.Signals] = []

    async def stoppable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: signal.Signals) -> None:
            if received:
                os.kill(os.getpid(), signal.SIGKILL)  # the kernel ends the children with us
            received.append(number)
            screen.print(f"{number.name}: stopping; once more to stop at once", highlight=False)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        return await run

    tune_gc()
    try:
        return asyncio.run(stoppable())
    except asyncio.CancelledError:
        stderr.print(Text(f"stopped by {received[0].name}; {saved(directory)}"))
        raise typer.Exit(128 + received[0]) from None
    except (SpotError, BaseExceptionGroup) as error:
        cause = root_cause(error)
        fail(cause, code=exit_code(cause), note=saved(directory))


def hung(directory: RunDirectory) -> Callable[[str], None]:
    """How a stalled run ends whose event loop does not: past all locks and buffers, another thread may hold them."""

    def exit_process(message: str) -> None:
        show_cursor = "\x1b[?25h" if screen.is_terminal else ""
        with suppress(OSError):
            os.write(2, f"{show_cursor}error: {message}\n{saved(directory)}\n".encode())
        os._exit(EXIT_CODES[StalledError])  # the kernel ends the children with us

    return exit_process


def exit_code(error: SpotError) -> int:
    """What the process ends with after a failure; docs/watchdog.md lists them all."""
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)


def saved(directory: RunDirectory) -> str:
    """What a run that ended early leaves behind."""
    student = directory.path / "student"
    if not student.is_symlink():
        return f"nothing was trained yet; logs are in {directory.path}"
    return f"saved: {student.resolve().name} as {student}, metrics and samples beside it"


def fail(error: SpotError, *, code: int, note: str | None = None) -> NoReturn:
    """Print the failure, below it what it carries as notes (the end of a server's log), and leave."""
    for line in str(error).splitlines():
        stderr.print(Text(f"error: {line}", style="red"))
    for detail in getattr(error, "__notes__", ()):
        stderr.print(Text(detail))
    if note is not None:
        stderr.print(Text(note))
    raise typer.Exit(code)


def main() -> None:
    """Entry point of the `spot-async` command."""
    app()
