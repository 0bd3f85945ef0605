"""The commands that read the files of runs and start nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from spot_async.cli.arguments import ConfigPath, Overrides, PagePath, RunPath
from spot_async.cli.ending import screen
from spot_async.config.loading import load_config
from spot_async.errors import ConfigError


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

    A sample is also written as a page, to RUN/inspect-NUMBER.html unless --html says otherwise. With --html and
    no SAMPLE, PATH is a page of all samples, to search and sort, and beside it are the pages of those that are listed.
    """
    from spot_async.tools.inspect import inspect_command

    if sample is not None and (iteration is not None or verdict is not None):
        raise ConfigError("--iteration and --verdict choose what is listed; leave them out to see one sample")
    if sample is None:
        inspect_command.list_samples(screen, run, iteration, verdict, html)
    else:
        inspect_command.show_sample(screen, run, sample, html)


def verify_run(run: RunPath) -> None:
    """Say from a run's files alone what became of every prompt: trained once, twice, lost, dead or pending.

    Exit code 1 when a prompt was trained twice or lost, or a checkpoint is damaged; 2 when the files cannot be read.
    """
    from spot_async.tools import verify_run as tool

    found = tool.verify(run)
    tool.show(screen, run, found)
    if found.faults:
        raise typer.Exit(1)


def report(
    run: RunPath,
    html: PagePath = None,
    tuning: Annotated[Path | None, typer.Option(metavar="FILE", help="also show this .json file of `tune`")] = None,
    watch: Annotated[
        float | None,
        typer.Option(min=1, max=86_400, metavar="SECONDS", help="write it again as often, until the run ends"),
    ] = None,
) -> None:
    """Write one page about a run: curves, what was probed, where the time went and what to change about it.

    It goes to RUN/report.html unless --html says otherwise. With --watch the page also loads itself again.
    """
    from spot_async.tools.inspect import inspect_command
    from spot_async.tools.simulate.measured import read_tuning
    from spot_async.tools.tune.results import tuning_section

    more = [] if tuning is None else [tuning_section(read_tuning(tuning))]
    inspect_command.write_report(screen, run, html, more, watch)


def simulate(
    config: ConfigPath,
    overrides: Overrides = None,
    run: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="take rates and lengths from this run's files")
    ] = None,
    tuning: Annotated[
        Path | None, typer.Option(metavar="FILE", help="take servers from this .json file of `tune`; default: CONFIG's")
    ] = None,
    rates: Annotated[Path | None, typer.Option(metavar="FILE", help="a YAML file of stated rates")] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="state a rate, e.g. teacher.tokens_per_s=8000; may be given again"),
    ] = None,
    max_staleness: Annotated[int, typer.Option(min=0, max=16, help="simulate 0 to this many")] = 2,
    iterations: Annotated[int, typer.Option(min=1, help="of each simulation that count")] = 6,
    json: Annotated[bool, typer.Option("--json", help="print what was found as JSON")] = False,
) -> None:
    """Say how long an iteration of CONFIG would take with max_staleness 0, 1 and 2, and what binds it then.

    The run's own program is run on virtual time, over servers and a trainer that work at the rates of a run, of `tune`,
    or at those that you state. Nothing is started.
    """
    from spot_async.tools.simulate import simulate_command

    options = simulate_command.SimulateOptions(run, tuning, rates, rate or (), max_staleness, iterations, json)
    simulate_command.run(screen, config, load_config(config, overrides or ()), options)


def push(
    run: RunPath,
    repository: Annotated[str, typer.Argument(metavar="REPO", help="on the Hugging Face hub, e.g. me/my-student")],
    best: Annotated[
        bool, typer.Option("--best", help="the best student of the run's evaluations, not the last")
    ] = False,
    public: Annotated[bool, typer.Option("--public", help="a repository that everybody may read")] = False,
    update: Annotated[bool, typer.Option("--update", help="a further commit to a repository that is there")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the files and the model card; send nothing")] = False,
) -> None:
    """Upload the student of a finished run to the Hugging Face hub, with a model card that the run fills in.

    The repository is new, and private. The token is read from HF_TOKEN. The card states no licence: that is yours to
    choose.
    """
    from spot_async.tools.push import prepare, send, show

    upload = prepare(run, repository, is_best=best)
    if dry_run:
        show(screen, upload, repository)
        return
    address = send(
        upload,
        repository,
        f"{'best' if best else 'trained'} student of spot-async",
        is_public=public,
        is_update=update,
    )
    screen.print(Text(f"{address}\nIts card states no licence: add yours there"), soft_wrap=True)


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
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="also write Markdown, LaTeX and CSV")
    ] = None,
    html: PagePath = None,
) -> None:
    """Compare evaluations of the same problems: a table, paired differences, Pass@k curves, compute.

    Nothing is asked of any server. Exit code 2 when the evaluations cannot be paired.
    """
    from spot_async.tools.compare import compare_command

    options = compare_command.CompareOptions(baseline, benchmark or (), pass_k, draws, seed, confidence, output, html)
    compare_command.run(screen, runs, options)
