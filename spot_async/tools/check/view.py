"""Shows what `check` found of a run's files: its problems, and what it takes. Servers are shown by `servers.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spot_async.base.processes.resources import is_in_memory
from spot_async.base.text import counted, shortened, shown_size, visible
from spot_async.checks.plan import TrainPlan
from spot_async.config import Config
from spot_async.data.keys import about, setting
from spot_async.data.problem_set import ProblemSet, find_overlaps, too_short
from spot_async.models.footprint import ASLEEP_GIB, CONTEXT_GIB, MachineMemory, TrainerMemory, named
from spot_async.telemetry.screen import number_table, shown
from spot_async.tools.check.problems import GoldCheck, JudgedSet, count_by
from spot_async.tools.check.requirements import Requirements, RoleEstimate, Sizes, Tokens
from spot_async.types import Problem

UNKNOWN = "unknown"
SAMPLES = 2
SHOWN_IDS = 10
SHOWN_CHARS = 400


def show_requirements(screen: Console, config: Config, found: Requirements) -> None:
    """Print all that a run takes."""
    if found.memory is not None:
        screen.print(rank_table(found.memory.rank(), config.training.ranks))
        show_memory(screen, found.memory)
    screen.print(sizes_table(config, found))
    screen.print(tokens_table(found.expected_tokens, found.most_tokens))
    show_endpoints(screen, found)
    for line in notes(config, found):
        screen.print(Text(line), soft_wrap=True)
    show_warnings(screen, found.warnings)


def show_memory(screen: Console, memory: MachineMemory | None) -> None:
    """Print what is kept on each device; nothing if that is not known."""
    if memory is None or not memory.servers:
        return
    table = number_table("GiB of a device", "while sampling", "while training", "of")
    for each in memory.devices:
        table.add_row(f"device {each.device}", f"{each.sampling:.1f}", f"{each.training:.1f}", f"{each.size:.0f}")
    screen.print(table)
    alike: dict[tuple[str, float, float, bool], list[int]] = {}
    for server in memory.servers:
        sleeps = server.sleeps or server.shares_time
        alike.setdefault((server.role, server.gib, server.cache_gib, sleeps), []).append(server.device)
    for (role, gib, cache_gib, sleeps), devices in alike.items():
        asleep = f"; asleep {ASLEEP_GIB:.1f} (CUDA context and graphs)" if sleeps else ""
        screen.print(
            Text(
                f"{role} on {named(devices)}, GiB: weights and workspace {gib - cache_gib:.1f}, keys and values "
                f"{cache_gib:.1f}{asleep}"
            ),
            soft_wrap=True,
        )
    fitting = ", ".join(
        f"{card:.0f} GiB {tokens:,} tokens" if tokens else f"{card:.0f} GiB none"
        for card, tokens in memory.longest_responses.items()
    )
    for line in (
        *memory.order,
        f"the longest response that fits servers and trainer, by the memory of a device: {fitting}",
        f"assumes devices of {memory.servers[0].device_gib:.0f} GiB (cluster.device_gib)",
    ):
        screen.print(Text(line), soft_wrap=True)


def show_endpoints(screen: Console, found: Requirements) -> None:
    """Print what endpoints with prices or limits are asked, and what that takes for granted."""
    for each in found.endpoints:
        screen.print(endpoint_table(each))
        line = f"assumes {found.response_words}; nothing cached; no retries, and no single positions asked for again"
        screen.print(Text(line), soft_wrap=True)
        show_warnings(screen, each.early_ends)


def rank_table(rank: TrainerMemory, ranks: int) -> Table:
    table = number_table(f"GiB of each of {ranks} ranks" if ranks > 1 else "GiB of the rank", "")
    for name, value in (
        ("weights", rank.weights),
        ("gradients", rank.gradients),
        ("optimiser", rank.optimiser),
        ("CUDA context", CONTEXT_GIB),
        ("at rest", rank.resting),
        ("copies to compute with", rank.copies),
        ("activations", rank.activations),
        ("logits", rank.logits),
        ("while it trains", rank.training),
        ("in the CPU's memory (training.offload)", rank.on_cpu),
    ):
        if value or name != "in the CPU's memory (training.offload)":
            table.add_row(name, f"{value:.2f}")
    return table


def sizes_table(config: Config, found: Requirements) -> Table:
    both = (found.expected, found.at_most)
    training = config.training
    every = (
        f", iteration {training.keep_checkpoints.every} and its multiples" if training.keep_checkpoints.every else ""
    )
    table = number_table("what is sent and kept", "expected", "at most")
    rows: list[tuple[str, Callable[[Sizes], int | None]]] = [
        ("a batch's supervision, to the trainer", lambda sizes: sizes.batch_bytes),
        ("a publish, to the student's servers", lambda sizes: sizes.publish_bytes),
        ("a checkpoint", lambda sizes: sizes.checkpoint_bytes),
        (
            f"disk: checkpoints, the last {training.keep_checkpoints.last}{every}",
            lambda sizes: sizes.checkpoints_kept_bytes,
        ),
        ("disk: published students", lambda sizes: sizes.published_kept_bytes),
        ("disk: samples.jsonl", lambda sizes: sizes.samples_bytes),
        ("disk: all of these", lambda sizes: sizes.disk_bytes),
    ]
    if (directory := training.weights_directory) is not None:
        where = "memory" if is_in_memory(Path(directory)) else "disk"
        rows.insert(4, (f"{where}: published in {directory}", lambda sizes: sizes.published_elsewhere_bytes))
    if found.parameters is not None and found.parameters.adapter:
        rows.insert(2, ("of that the adapter", lambda sizes: sizes.adapter_bytes))
    for name, size in rows:
        table.add_row(name, *(_bytes(size(each)) for each in both))
    table.add_row("disk: free", "", _bytes(found.free_disk_bytes))
    return table


def tokens_table(expected: Tokens, at_most: Tokens) -> Table:
    table = number_table("million tokens of the run", "expected", "at most")
    rows: list[tuple[str, Callable[[Tokens], float]]] = [
        ("rollouts", lambda tokens: tokens.rollouts),
        ("probes", lambda tokens: tokens.probes),
        ("the teacher's responses", lambda tokens: tokens.teacher_written),
        ("scored, prompts included", lambda tokens: tokens.scored),
        ("trained, prompts included", lambda tokens: tokens.trained),
        ("evaluations", lambda tokens: tokens.evaluations),
    ]
    for name, of in rows:
        if of(at_most):
            table.add_row(name, *(f"{of(each) / 1e6:,.1f}" for each in (expected, at_most)))
    return table


def endpoint_table(each: RoleEstimate) -> Table:
    account = each.account
    table = number_table(f"{account.role}: asked in the run", "expected", "at most")
    both = (each.expected, each.at_most)
    table.add_row("requests", *(f"{one.requests:,}" for one in both))
    table.add_row("prompt tokens", *(f"{one.used.prompt_tokens:,}" for one in both))
    table.add_row("generated tokens", *(f"{one.used.completion_tokens:,}" for one in both))
    if account.prices is not None:
        table.add_row(f"{account.currency}", *(f"{one.money:,.4g}" for one in both))
        table.add_row(f"{account.currency}, the start before it", *(f"{one.money:,.4g}" for one in each.start))
    if each.expected.minutes is not None:
        table.add_row("minutes, at its limits", *(f"{one.minutes:,.3g}" for one in both))
    return table


def notes(config: Config, found: Requirements) -> list[str]:
    """Return what the tables take for granted, and what they leave out."""
    lines = [f"sizes and tokens assume {found.response_words}"]
    if found.parameters is None:
        lines.append("the student's size is unknown: its weights are not here, or not in safetensors")
    else:
        adapters = f", {found.parameters.adapter:,} of them in adapters" if found.parameters.adapter else ""
        lines.append(f"the student has {found.parameters.model + found.parameters.adapter:,} parameters{adapters}")
    training, checkpoint = config.training, found.at_most.checkpoint_bytes
    if checkpoint and training.checkpoint_every and training.device != "cpu" and training.offload == "none":
        lines.append(
            f"from GPUs a checkpoint goes through the first node's host memory: {_bytes(checkpoint)} there until it is "
            "written"
        )
    if found.memory is None:
        lines.append("the memory of a rank is unknown: the estimate does not know the student's architecture")
    elif not found.memory.servers:
        lines.append(
            "a rank is estimated as on a GPU; what servers take is not known, as none starts on a numbered GPU. On "
            "a CPU a run takes 0.4 GB, 0.1 GB more for each of our servers and ranks, and what they compute with"
        )
    return [*lines, "None of it is measured. `simulate` estimates the time of an iteration"]


def show_problems(
    screen: Console, found: ProblemSet, tokens: Sequence[int] | None, max_prompt_tokens: int | None
) -> None:
    """Print what a set of training problems holds. `tokens` are the lengths of its prompts, where there is a model."""
    screen.print(shown(f"layout: {found.layout}"))
    table = _words("rows", "", "rows")
    for name, rows in found.counts.items():
        table.add_row(shown(name), str(rows))
    if tokens is not None and max_prompt_tokens is not None:
        long = sum(length > max_prompt_tokens for length in tokens)
        table.add_row(f"prompts longer than {max_prompt_tokens} tokens, filtered by a run", str(long))
    screen.print(table)
    screen.print(_problems_table(found.problems, tokens))
    for problem in found.problems[:: max(1, len(found.problems) // SAMPLES)][:SAMPLES]:
        screen.rule(shown(f"problem {problem.id}"), align="left")
        screen.print(shown(shortened(problem.shown, SHOWN_CHARS)))
        for letter, choice in zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ", problem.choices, strict=False):
            screen.print(shown(f"({letter}) {shortened(choice, SHOWN_CHARS)}"))
        screen.print(shown(f"answer: {problem.answer or '(none)'}"))


def _problems_table(problems: Sequence[Problem], tokens: Sequence[int] | None) -> Table:
    table = _words("problems", "", "")
    lengths: dict[str, Sequence[int]] = {"characters of a problem": [len(problem.text) for problem in problems]}
    if tokens is not None:
        lengths["tokens of a prompt"] = tokens
    for name, each in lengths.items():
        median, p95 = np.quantile(each, (0.5, 0.95), method="inverted_cdf")  # lengths that there are
        table.add_row(name, f"median {median}, 95 % {p95}, longest {max(each)}")
    for name, counts in (
        ("tiers", count_by([problem.tier for problem in problems])),
        ("categories", count_by([problem.category for problem in problems])),
    ):
        if counts:
            table.add_row(name, shown(", ".join(f"{value}: {count}" for value, count in counts.items())))
    return table


def show_sets(screen: Console, config: Config, plan: TrainPlan) -> None:
    """Print what each of several training sets gives a run."""
    columns = ("set", "usable", "category", "judged by", "share", "prompts", "times each")
    table = _words("training sets: problems that are not too long, and prompts of the whole run", *columns)
    usable = Counter(source.problem.set_key for source in plan.schedule.sources)
    prompts = islice(plan.schedule, plan.schedule.iterations * config.training.batch_size)
    drawn = Counter(prompt.problem.set_key for prompt in prompts)
    for key, settings in config.data.sets.items():
        share = f"{drawn[key] / drawn.total():.1%}" if settings.share is None else f"{settings.share:g}"
        judge, times = config.verifiers[key].kind, f"{drawn[key] / usable[key]:.3g}"
        category = settings.category or f"of {settings.fields.get('category') or 'the row'}"
        cells = (key, str(usable[key]), category, judge, share, str(drawn[key]), times)
        table.add_row(*map(shown, cells))
    screen.print(table)


def show_golds(screen: Console, judged: JudgedSet, golds: GoldCheck) -> None:
    """Print whether the answers of a set are right by their own verifier."""
    kind = "" if judged.verifier is None else judged.verifier.kind
    column = setting(judged.key, "fields.answer")
    by = "the letters of their choices" if golds.tried == golds.have_choices > 0 else kind
    screen.rule(shown(f"{about(judged.key)}answers against themselves, by {by}"), align="left")
    if golds.tried or not golds.prose:
        screen.print(f"{golds.tried} tried, {len(golds.unverifiable)} unverifiable", highlight=False)
    for problem, verdict in golds.unverifiable[:SHOWN_IDS]:
        screen.print(shown(f"  {problem.id}: {shortened(problem.answer, SHOWN_CHARS)!r} is {verdict}"))
    for problems, words, remedy in (
        (
            golds.prose,
            "in prose, which a response would have to repeat word for word",
            f"; name the column of short answers in {column}",
        ),
        (golds.spelling_only, "that Math-Verify takes for right only as spelled here", "; respell them as LaTeX"),
        (golds.misread, "read as something else, right with another digit", ""),
    ):
        if problems:
            ids = _ids([problem.id for problem in problems])
            show_warnings(screen, [f"{counted(len(problems), 'answer')} {words}: {ids}{remedy}"])
    if golds.unclear_choices:
        ids = _ids([problem.id for problem in golds.unclear_choices])
        screen.print(shown(f"{len(golds.unclear_choices)} with an empty choice, or two that are the same: {ids}"))


def show_overlaps(screen: Console, training: Sequence[Problem], held_out: Sequence[JudgedSet]) -> None:
    columns = ("problems", "iden-\ntical", "con-\ntained", "equal\nanswers", "too\nshort")
    table = _words("overlap: identical problems, and others by 13 words", "evaluation set", *columns)
    lines = []
    for each in held_out:
        overlaps = find_overlaps(training, each.problems)
        identical = sum(overlap.is_identical for overlap in overlaps)
        equal = sum(overlap.has_equal_answer for overlap in overlaps)
        figures = (len(each.problems), identical, len(overlaps), equal, too_short(each.problems))
        table.add_row(shown(each.name), *map(str, figures))
        if overlaps:
            pairs = _ids([f"{overlap.evaluation.id} in {overlap.training.id}" for overlap in overlaps])
            lines.append(f"{each.name}: {pairs}")
    screen.print(table)
    for line in lines:
        screen.print(shown(line), soft_wrap=True)


def show_warnings(screen: Console, lines: Sequence[str]) -> None:
    for line in lines:
        screen.print(Text(visible(f"warning: {line}"), style="yellow"), soft_wrap=True)


def _words(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _ids(ids: Sequence[str]) -> str:
    more = f", and {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
    return ", ".join(ids[:SHOWN_IDS]) + more


def _bytes(number: int | None) -> str:
    return UNKNOWN if number is None else shown_size(number)
