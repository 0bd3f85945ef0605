"""The commands that make a run, `train` and `eval`: plan it, show it with `--dry-run`, run it, and show the outcome."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.text import Text

from spot_async.base.addresses import own_address_towards
from spot_async.base.processes.nursery import NURSERY
from spot_async.base.text import counted, rough_time
from spot_async.cli.arguments import Brief, DryRun, EvaluationOverrides, OptionalConfigPath, Overrides
from spot_async.cli.ending import (
    downloaded,
    ending_at_once,
    exit_code,
    fail,
    hung,
    remark,
    run_until_stopped,
    saved,
    screen,
)
from spot_async.config import ROLES, Config
from spot_async.config.loading import doubled_backslashes, dump_yaml, evaluation_from, load_config, read_tree
from spot_async.errors import ConfigError, DataError, StorageError
from spot_async.loop.resuming import StopRequest
from spot_async.run_directory.layout import RunDirectory, name_of, name_of_run

if TYPE_CHECKING:  # these import transformers, and --help must not wait for that
    from spot_async.evaluation.benchmarks import Benchmark
    from spot_async.models.files import ModelFiles
    from spot_async.running.resuming import ResumedRun
    from spot_async.running.summary import TrainOutcome
    from spot_async.trainer.nodes.topology import Topology


def train(
    config: OptionalConfigPath = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    brief: Brief = False,
    earlier: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="a run whose responses' lengths estimates assume")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="RUN|auto",
            help="continue a run that ended early, from its newest checkpoint; auto: that of CONFIG's run.directory, "
            "which is begun if there is none",
        ),
    ] = None,
) -> None:
    """Train a student from a teacher, and evaluate it before and after.

    Writes a run directory with the trained student as a Hugging Face directory (student/), metrics.jsonl,
    samples.jsonl (what the policy saw), the resolved configuration and all logs. A run that was killed is continued by
    --resume RUN, which needs no CONFIG.

    On several machines give the same command on each (docs/distributed.md).

    SIGTERM and SIGUSR1 end it with a checkpoint of the step under way, and exit code 75: continue it with --resume RUN.
    Other exit codes: 0 done, 1 failed, 2 could not start, 3 stalled, 4 budget spent, 128 and the signal's number for
    other signals (Ctrl-C is 130), and where no checkpoint was made yet.
    """
    from spot_async.checks.machine import Machine, check_room, without_gpu, without_weights
    from spot_async.checks.plan import plan_training  # imports transformers: not for --help
    from spot_async.tools.check import check_command
    from spot_async.tools.check.view import show_endpoints, show_memory, show_warnings

    check_brief(brief, dry_run)
    if resume not in (None, "auto"):
        config, overrides = None, _all_overrides(resume, config, overrides or ())
    node = _node_of(resume, config, overrides or ())
    if node is not None and node[0].node_rank > 0 and not dry_run:
        _join(*node)
    begun = None
    if resume is not None:
        with ending_at_once():  # it may have to download its models again
            begun = _run_to_resume(resume, config, overrides or (), weights=() if dry_run else ROLES)
    if begun is not None:
        settings, plan, path = begun.config, begun.plan, begun.directory.path
    else:
        if config is None:
            raise ConfigError("CONFIG: give a configuration file, or a run to continue: --resume RUN")
        settings = load_config(config, overrides or ())
        path = RunDirectory.choose_path(settings, name_of(config))
        RunDirectory.check_usable(path)
        settings = downloaded(settings, weights=() if dry_run else ROLES)
        plan = plan_training(settings, starts=not dry_run)
    if not dry_run and (refusal := without_gpu(settings.training, plan.served, Machine.found(os.environ))):
        raise ConfigError(refusal)
    if not dry_run and (unloadable := next(without_weights(plan.served, trained="student"), None)) is not None:
        raise DataError(unloadable)
    check_room(path, settings, plan)
    nodes = 1 if node is None else node[0].nodes
    found = check_command.check_files(settings, plan, path, earlier, nodes=nodes)
    if dry_run:
        if not brief:
            check_command.show_configuration(screen, settings)
        check_command.show_run(screen, settings, plan, path, found)
        if node is not None:
            screen.print(Text(f"nodes     {node[0].words}"), soft_wrap=True)
        return
    from spot_async.running.training import Start  # late: who is stopped in these seconds leaves no directory
    from spot_async.running.training import train as run_training

    directory = RunDirectory.create(path, settings) if begun is None else begun.directory

    if begun is not None:
        step = begun.checkpoint.manifest.step
        screen.print(f"continuing after iteration {step} of {plan.schedule.iterations}: {path}", soft_wrap=True)
    for key, each in plan.sets.items():
        if len(plan.sets) > 1 or len(each.counts) > 2:  # more than read and problems
            screen.print(f"{key}: {words_of(each.counts)}", highlight=False, soft_wrap=True)
    if plan.filtered:
        screen.print(f"{plan.filtered} of {len(plan.problems)} problems are longer than the prompt limit and left out")
    show_endpoints(screen, found.needed)
    show_memory(screen, found.needed.memory)
    show_warnings(screen, [*found.needed.warnings, *found.lacking])
    checkpoint = None if begun is None else begun.checkpoint
    stop = StopRequest()
    training = run_training(
        settings,
        plan,
        directory,
        screen,
        Start(
            checkpoint=checkpoint,
            stop=stop,
            topology=None if node is None else node[0],
            exit_process=hung(directory),
            report=(sys.executable, "-P", "-m", "spot_async", "report"),
        ),
    )
    outcome = run_until_stopped(training, directory, stop, prompts=settings.queue_capacity_prompts)
    show_outcome(outcome, path)
    if outcome.spent is not None:
        fail(outcome.spent, code=exit_code(outcome.spent), note=saved(directory))


def _node_of(resume: str | None, config: Path | None, overrides: Sequence[str]) -> tuple[Topology, Config] | None:
    """Return which node of a run on several machines this is, and its configuration; None for a run on one."""
    from spot_async.run_directory.manifest import committed
    from spot_async.trainer.nodes.authentication import cluster_secret
    from spot_async.trainer.nodes.topology import check_ranks, topology

    if resume is None or resume == "auto":
        if config is None:
            return None  # refused below
        settings = load_config(config, overrides)
        path = settings.run.directory
        if resume == "auto" and path is not None and committed(Path(path)):
            # Node 0 continues with the configuration that the run began with, whatever CONFIG says by now.
            RunDirectory.open_own(Path(path))
            begun = load_config(Path(path) / "config.yaml", overrides)
            settings = begun.model_copy(update={"cluster": settings.cluster})
    else:
        if RunDirectory.open_own(Path(resume)).purpose == "eval":
            return None
        settings = load_config(Path(resume) / "config.yaml", overrides)
    found = topology(os.environ, settings.cluster)
    if found is None:
        return None
    check_ranks(found, settings.training.ranks)
    found = replace(found, secret=cluster_secret(os.environ, settings.cluster))
    if settings.cluster.kind == "ray":
        head = found.address
        try:
            found = replace(found, address=own_address_towards(head))
        except OSError as error:
            raise ConfigError(f"cluster.address: this machine finds no way to Ray's head at {head}: {error}") from None
    return found, settings


def _join(topology: Topology, config: Config) -> NoReturn:
    """Take part in the run of node 0, and exit when it is over."""
    from spot_async.trainer.nodes.joining import run_agent

    config = downloaded(config, weights=("student",))  # what else is served is served by node 0
    code = run_agent(topology, config, lambda line: screen.print(Text(line), soft_wrap=True))
    raise typer.Exit(code)


def _run_to_resume(
    resume: str, config: Path | None, overrides: Sequence[str], *, weights: Collection[str]
) -> ResumedRun | None:
    """Return the run that `--resume` names; None where `auto` finds none, which is then begun."""
    from spot_async.run_directory.manifest import committed
    from spot_async.running.resuming import open_run

    if resume != "auto":
        return open_run(Path(resume), overrides, remark, weights=weights)
    if config is None:
        raise ConfigError("--resume auto: give CONFIG, whose run.directory is looked at")
    path = load_config(config, overrides).run.directory
    if path is None:
        raise ConfigError("--resume auto: run.directory must be set, or nobody could find the run")
    return open_run(Path(path), overrides, remark, weights=weights) if committed(Path(path)) else None


def _all_overrides(resume: str | None, config: Path | None, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of `--resume RUN`, the first of which stands in CONFIG's place. Raise for a CONFIG."""
    if config is None:
        return list(overrides)
    if "=" not in str(config):
        raise ConfigError(
            f"{config}: --resume continues {resume}/config.yaml: take CONFIG away (what may change is given as "
            "section.key=value), or give --resume auto, which continues the run in CONFIG's run.directory"
        )
    return [str(config), *overrides]


def show_outcome(outcome: TrainOutcome, path: Path) -> None:
    """Print what `train` prints at its end; `path` is the run directory."""
    from spot_async.run_directory.reading import RunFiles
    from spot_async.spending.run_spending import spending_words
    from spot_async.telemetry.outcome_slope import outcome_words
    from spot_async.tools.inspect.held_out import figures_of, held_out, result_table
    from spot_async.tools.inspect.troubles import missing_signal

    files = RunFiles(path)
    rows, config = files.metrics(), files.config()
    last = figures_of(files, "after") or figures_of(files, "before")
    if results := result_table(files.summary(), config, last):
        screen.print(results.for_terminal(), Text(results.note), sep="\n", soft_wrap=True)
    if evaluated := held_out(files, rows):
        screen.print(
            f"best: {evaluated.best_words}. It was picked by these same problems, so this figure is "
            "optimistic: measure it on others before comparing",
            soft_wrap=True,
            highlight=False,
        )
    if note := missing_signal(rows):
        screen.print(Text(note, style="yellow"))
    if note := outcome_words(rows):
        screen.print(Text(note[0].upper() + note[1:]), soft_wrap=True)
    states = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in outcome.prompts.items())
    took = rough_time(sum(row.get("time/iteration_s", 0.0) for row in rows))
    screen.print(f"{counted(outcome.iterations, 'iteration')} in {took}; prompts: {states or 'none'}", highlight=False)
    if outcome.trainer_restarts:
        screen.print(f"trainer restarts: {outcome.trainer_restarts}", highlight=False)
    for role, spent in outcome.spending.get("spending", {}).items():
        screen.print(Text(f"{role} spent: {spending_words(spent)}"), soft_wrap=True)
    screen.print(Text(f"run directory: {path}"))
    if outcome.iterations:
        screen.print(Text(f"trained student: {path / 'student'}"))
    if outcome.best is not None:
        screen.print(Text(f"best student: {path / 'best'}"))
    screen.print(Text(f"next: spot-async report {path}"))


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
    source = RunDirectory.open_own(found.path.parent)  # its configuration is read whole, and may name code
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
    from spot_async.checks.machine import not_installed, without_weights
    from spot_async.checks.plan import plan_evaluation
    from spot_async.checks.plan_inputs import check_weights
    from spot_async.evaluation.metrics import read_figures
    from spot_async.evaluation.response_log import count_kept
    from spot_async.models.files import read_model
    from spot_async.running.measuring import is_complete
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
        served = {"student": settings.student}
        lacking = [*not_installed(served), *without_weights(served)]
        if dry_run:
            show_evaluation_plan(settings, path, benchmarks, student, brief=brief)
            show_warnings(screen, lacking)
            return
        if lacking:
            raise DataError(lacking[0])
        from spot_async.running.measuring import evaluate_student  # late, for the same reason as in `train`

        if not any(each.runs_here for each in settings.student.backend.servers()):
            NURSERY.end()  # for nothing that this evaluation starts
        directory = evaluation_directory(settings, path, is_new=resume is None)
        try:
            stack.enter_context(directory.locked())
        except StorageError as error:  # the file system may have no locks, as on some clusters
            warning = f"warning: {error}; nothing keeps other processes from evaluating into it"
            screen.print(Text(warning, style="yellow"), soft_wrap=True)
        complete = resume is not None and is_complete(directory, settings, benchmarks, student.directory)

        for benchmark in benchmarks:
            if len(benchmark.counts) > 2:  # more than read and problems
                screen.print(f"{benchmark.key}: {words_of(benchmark.counts)}", highlight=False, soft_wrap=True)
        if complete:
            screen.print("this evaluation is complete; for another pass_k or verifier judge it again: --judge RUN")
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


def check_brief(brief: bool, dry_run: bool) -> None:
    if brief and not dry_run:
        raise ConfigError("--brief: only --dry-run shows the configuration; add that, or take --brief away")


def show_evaluation_plan(
    config: Config, path: Path, benchmarks: Sequence[Benchmark], student: ModelFiles, *, brief: bool
) -> None:
    """Print what `eval --dry-run` shows."""
    from spot_async.checks.machine import Machine, without_devices
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
    show_warnings(screen, [*doubled_backslashes(config), *evaluation_warnings(benchmarks, student.vocabulary)])
    show_warnings(screen, [*without_devices("student", config.student, Machine.found(os.environ))])
    lines = ["the student's server, and evaluate", *asked, evaluation_estimate(config, benchmarks), f"into {path}"]
    screen.print(Text("\n".join(lines)), soft_wrap=True)


def words_of(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
