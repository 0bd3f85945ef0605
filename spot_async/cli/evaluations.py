"""The command `eval`: plans an evaluation, shows it with `--dry-run`, makes it or judges it again, shows figures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from spot_async.base.text import counted
from spot_async.cli.arguments import Brief, DryRun, EvaluationOverrides, OptionalConfigPath
from spot_async.cli.ending import downloaded, hung, run_until_stopped, screen
from spot_async.cli.runs import check_brief, words_of
from spot_async.config import Config
from spot_async.config.loading import dump_yaml, evaluation_from, read_tree
from spot_async.errors import ConfigError, DataError, StorageError
from spot_async.run_directory.layout import RunDirectory, name_of, name_of_run

if TYPE_CHECKING:  # these import transformers, and --help must not wait for that
    from spot_async.evaluation.benchmarks import Benchmark
    from spot_async.models.files import ModelFiles


def evaluate(
    config: OptionalConfigPath = None,
    overrides: EvaluationOverrides = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="PATH", help="without CONFIG: a model directory, or a hub id")
    ] = None,
    benchmark: Annotated[
        list[str] | None,
        typer.Option("--benchmark", metavar="[NAME=]FILE", help="with --model: held-out problems; may be given again"),
    ] = None,
    dry_run: DryRun = False,
    brief: Brief = False,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="RUN", help="continue an evaluation that was stopped, in its directory"),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option("--judge", metavar="RUN", help="judge the responses of a complete evaluation again; ask no model"),
    ] = None,
    verifier: Annotated[
        str | None, typer.Option("--verifier", metavar="KIND", help="as evaluation.verifier=KIND, which may be {...}")
    ] = None,
) -> None:
    """Evaluate a model on held-out problems.

    CONFIG needs sections student and evaluation alone. Without a CONFIG: spot-async eval --model PATH --benchmark FILE,
    with any key behind it. A trained student is evaluated by: spot-async eval CONFIG student.model=RUN/student

    Writes evaluation.json (the figures; what `compare` reads) and evaluation.jsonl (every judged response). With
    --judge RUN --verifier KIND the responses of RUN are judged again, into a new directory.
    """
    keys = [*(overrides or ()), *([] if verifier is None else [f"evaluation.verifier={verifier}"])]
    if config is not None and "=" in str(config) and not config.exists():  # a key in CONFIG's place
        config, keys = None, [str(config), *keys]
    if judge is not None:
        if config or model or benchmark or resume or dry_run:
            raise ConfigError("--judge RUN takes RUN's configuration: give it keys and --verifier alone")
        _judge_again(judge, keys)
        return
    if config is not None and not (model or benchmark):
        tree, name = read_tree(config), name_of(config)
    elif config is None and model and benchmark:
        sets = dict(map(_named, benchmark))
        if len(sets) < len(benchmark):
            raise ConfigError("--benchmark: two sets have the same name: give NAME=FILE")
        tree, name = {"student": {"model": model}, "evaluation": {"benchmarks": sets}}, Path(model).name
    else:
        raise ConfigError("give a CONFIG, or in its place both --model PATH and --benchmark FILE")
    _evaluate(evaluation_from(tree, keys), f"{name}-eval", dry_run=dry_run, brief=brief, resume=resume)


def _named(benchmark: str) -> tuple[str, str]:
    """Return the name and the path of `FILE` or `NAME=FILE`. Files are called as they are without their endings."""
    name, separator, path = benchmark.partition("=")
    is_named = separator and not Path(benchmark).exists()
    return (name, path) if is_named else (Path(benchmark).name.split(".")[0], benchmark)


def _judge_again(run: str, overrides: Sequence[str]) -> None:
    from spot_async.evaluation.metrics import read_figures
    from spot_async.running.measuring import earlier_evaluation, judge_again
    from spot_async.telemetry.evaluations import figures_table
    from spot_async.tools.compare.reading import read_evaluated

    found = read_evaluated(run)
    source = RunDirectory.open_own(found.path.parent)  # its configuration may name code
    tree = read_tree(source.path / "config.yaml")
    tree["run"] = {**tree.get("run", {}), "directory": None}
    settings = evaluation_from(tree, overrides)
    path = RunDirectory.choose_path(settings, f"{name_of_run(source.path)}-judged")
    RunDirectory.check_usable(path, "eval")
    benchmarks, occasion = earlier_evaluation(settings, found.figures, found.path, RunDirectory(path))
    RunDirectory.create(path, settings, "eval")
    run_until_stopped(judge_again(settings, benchmarks, occasion, screen), occasion.directory)
    screen.print(figures_table(read_figures(path / "evaluation.json")))
    screen.print(Text(f"run directory: {path}"))


def _evaluate(settings: Config, name: str, *, dry_run: bool, brief: bool, resume: Path | None) -> None:
    from spot_async.checks.machine import without_weights
    from spot_async.checks.plan import check_weights, plan_evaluation
    from spot_async.evaluation.metrics import read_figures
    from spot_async.evaluation.response_log import count_kept
    from spot_async.models.files import read_model
    from spot_async.running.measuring import add_pass_k, is_complete
    from spot_async.telemetry.evaluations import figures_table
    from spot_async.tools.check.requirements import evaluation_estimate
    from spot_async.tools.check.view import show_warnings

    with ExitStack() as stack:
        check_brief(brief, dry_run)
        path = resume or RunDirectory.choose_path(settings, name)
        if resume is None:
            RunDirectory.check_usable(path, "eval")
        elif settings.run.directory is not None and path.resolve() != Path(settings.run.directory).resolve():
            raise ConfigError(
                f"run.directory={settings.run.directory}: --resume continues in {path}; name one directory "
                "(run.directory=null takes that of the configuration away)"
            )
        settings = downloaded(settings, weights=() if dry_run else ("student",))
        student = read_model("student", settings.student.model)
        check_weights("student", settings.student, student.directory)
        benchmarks = plan_evaluation(settings, student)
        unloadable = list(without_weights({"student": settings.student}))
        if dry_run:
            show_evaluation_plan(settings, path, benchmarks, student, brief=brief)
            show_warnings(screen, unloadable)
            return
        if unloadable:
            raise DataError(unloadable[0])
        from spot_async.running.measuring import evaluate_student  # late, for the same reason as in `train`

        directory = evaluation_directory(settings, path, is_new=resume is None)
        try:
            stack.enter_context(directory.locked())
        except StorageError as error:  # the file system may have no locks, as on some clusters
            warning = f"warning: {error}; nothing keeps other processes from evaluating into it"
            screen.print(Text(warning, style="yellow"), soft_wrap=True)
        complete = resume is not None and is_complete(directory, settings, benchmarks, student.directory)
        if complete:
            add_pass_k(directory, settings, benchmarks, student.directory)

        for benchmark in benchmarks:
            if len(benchmark.counts) > 2:  # more than read and problems
                screen.print(f"{benchmark.key}: {words_of(benchmark.counts)}", highlight=False, soft_wrap=True)
        if complete:
            screen.print("this evaluation is complete")
        else:
            kept = count_kept(directory.path / "evaluation.jsonl")
            of_those = f"; {kept:,} of the responses are kept from before" if kept else ""
            screen.print(Text(f"{evaluation_estimate(settings, benchmarks)}{of_those}"), soft_wrap=True)
            run = evaluate_student(settings, student, benchmarks, directory, screen, exit_process=hung(directory))
            run_until_stopped(run, directory)
        screen.print(figures_table(read_figures(directory.path / "evaluation.json")))
        screen.print(Text(f"run directory: {path}"))


def evaluation_directory(config: Config, path: Path, *, is_new: bool) -> RunDirectory:
    """Return the directory of a new evaluation, or of one to continue.

    Raises ConfigError if a new one cannot be made, and DataError if there is none to continue.
    """
    if is_new:
        return RunDirectory.create(path, config, "eval")
    directory = RunDirectory.open_own(path)
    if directory.purpose == "train":
        raise DataError(
            f"--resume {path} is the directory of a training run: give that of an evaluation, or begin one with "
            f"student.model={path / 'student'} and without --resume"
        )
    return directory


def show_evaluation_plan(
    config: Config, path: Path, benchmarks: Sequence[Benchmark], student: ModelFiles, *, brief: bool
) -> None:
    """Print what `eval --dry-run` shows."""
    from spot_async.checks import machine
    from spot_async.checks.plan import evaluation_warnings
    from spot_async.tools.check.requirements import evaluation_estimate
    from spot_async.tools.check.view import show_warnings

    if not brief:
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
    show_warnings(screen, evaluation_warnings(benchmarks, student.vocabulary))
    show_warnings(screen, machine.evaluation_warnings(config.student, machine.Machine.found(os.environ)))
    lines = ["the student's server, and evaluate", *asked, evaluation_estimate(config, benchmarks), f"into {path}"]
    screen.print(Text("\n".join(lines)), soft_wrap=True)
