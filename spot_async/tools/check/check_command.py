"""`spot-async check`: what is asked of a run's files, of a problem file and of servers, in which order it is shown."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from spot_async.base.processes.gpus import GpuSoftware
from spot_async.base.text import counted
from spot_async.checks.device_shares import on_named_devices
from spot_async.checks.diagnosis import Diagnosis
from spot_async.checks.machine import (
    Machine,
    not_installed,
    placement_words,
    training_warnings,
    trains_on_gpus,
    without_weights,
)
from spot_async.checks.plan import TrainPlan, plan_warnings
from spot_async.config import Config, ProblemSetConfig, PromptConfig
from spot_async.config.loading import apply_override, dump_yaml, validate_as
from spot_async.data.keys import setting
from spot_async.data.problem_set import load_problem_set
from spot_async.data.prompts import PromptRenderer, render_all
from spot_async.errors import ConfigError
from spot_async.models.files import no_directory
from spot_async.models.vocabulary import Vocabulary
from spot_async.running.rehearsal import rehearse
from spot_async.telemetry.failures import unplayed_words
from spot_async.tools.check.episodes import PlayedEpisodes
from spot_async.tools.check.problems import JudgedSet, check_sets, held_out_file, read_verifier
from spot_async.tools.check.requirements import Requirements, requirements
from spot_async.tools.check.servers import examine, show_servers
from spot_async.tools.check.slope import Slope, show_slope
from spot_async.tools.check.view import (
    show_golds,
    show_overlaps,
    show_problems,
    show_requirements,
    show_sets,
    show_warnings,
)
from spot_async.trainer.nodes.topology import left_alone
from spot_async.trainer.settings import expected_attention, schedule_words


@dataclass(frozen=True)
class FilesCheck:
    """What the files of a run and this machine say."""

    machine: Machine
    nodes: int  # how many machines the run is on
    lacking: Sequence[str]  # a line for each thing that this machine lacks
    needed: Requirements


def check_files(
    config: Config, plan: TrainPlan, path: Path, earlier: Path | None, *, nodes: int, rehearses: bool = False
) -> FilesCheck:
    """Return what a run takes that writes to `path`, and what is missing here. It starts nothing.

    A policy of spot-async's own is rehearsed too if it `rehearses`. Raises DataError if the run `earlier` cannot be
    read, and ConfigError for a policy that would end the run.
    """
    machine = Machine.found(os.environ)
    alone = left_alone(os.environ, config.cluster)
    lacking = [
        *not_installed(plan.served),
        *without_weights(plan.served, trained="student"),
        *([] if alone is None else [alone]),
        *training_warnings(config, plan.served, machine, nodes=nodes),
        *on_named_devices(plan.served),
        *rehearse(config, plan, shipped=rehearses),
    ]
    return FilesCheck(machine, nodes, lacking, requirements(config, plan, path, earlier, nodes=nodes))


def show_run(
    screen: Console, config: Config, plan: TrainPlan, path: Path, found: FilesCheck, against: Sequence[str] = ()
) -> None:
    """Print what the problems of a run hold, what it would start, and what it takes."""
    for key, found_in in plan.sets.items():
        if len(plan.sets) > 1:
            screen.rule(Text(f"{key}: {', '.join(config.data.sets[key].paths)}"), align="left")
        shown = [each for each in plan.problems if each.set_key == key]
        tokens = [len(each.token_ids) for each in render_all(shown, plan.renderer)]
        show_problems(screen, found_in, tokens, config.sampling.max_prompt_tokens)
    if len(plan.sets) > 1:
        show_sets(screen, config, plan)
    held_out = []
    for each in plan.evaluation:
        assert config.evaluation is not None
        key = config.evaluation.key_of(each.name)
        held_out.append(JudgedSet(key, key, each.problems, each.verifier))
    judged = [JudgedSet(key, key, plan.sets[key].problems, judge) for key, judge in config.verifiers.items()]
    if not _show_answers(screen, judged, [*held_out, *map(held_out_file, against)]):
        show_warnings(screen, ["no response to the problems with unverifiable answers will ever count as right"])
    first = next(iter(plan.schedule))
    screen.rule(f"first prompt ({len(first.token_ids)} tokens)", align="left")
    screen.print(Text(plan.renderer.text(first.problem)))
    for renderer in dict.fromkeys(plan.teacher_renderers.values()):
        if renderer is not plan.renderer:
            tokens_read = len(renderer.token_ids(first.problem))
            screen.rule(f"what the teacher reads in its place by {renderer.key} ({tokens_read} tokens)", align="left")
            screen.print(Text(renderer.text(first.problem)))
    screen.rule("would start", align="left")
    show_warnings(screen, plan_warnings(config, plan))
    screen.print(Text("\n".join(_run_lines(config, plan, path))))
    screen.print(Text("\n".join(_machine_lines(config, plan, found))), soft_wrap=True)
    show_requirements(screen, config, found.needed)
    show_warnings(screen, found.lacking)


def show_configuration(screen: Console, config: Config) -> None:
    screen.rule("configuration, defaults included", align="left")
    screen.print(Text(dump_yaml(config)))


def show_file(
    screen: Console, path: str, settings: Sequence[str], against: Sequence[str], verifier: str | None, model: str | None
) -> bool:
    """Print what a problem file holds, and return whether all of its answers are right by their own verifier.

    `settings` are a problem set's KEY=VALUE, such as `layout=math`; `model` is whose tokenizer renders prompts. Raises
    ConfigError or DataError for what cannot be read.
    """
    if model is not None and not Path(model).is_dir():
        raise ConfigError(f"--model: {no_directory(model)}")
    tree: dict[str, Any] = {"path": path}
    for each in settings:
        apply_override(tree, each)
    judge = read_verifier(verifier or "math")
    training = load_problem_set(validate_as(ProblemSetConfig, tree), "", needs_answers=False)
    held_out = [held_out_file(each) for each in against]
    renderer = PromptRenderer(Vocabulary.load(Path(model)), PromptConfig()) if model else None
    tokens = None
    if renderer is not None:
        tokens = [len(each.token_ids) for each in render_all(training.problems, renderer)]
    show_problems(screen, training, tokens, None)
    is_verifiable = _show_answers(screen, [JudgedSet("", path, training.problems, judge)], held_out)
    doubts = training.doubts("", judge)
    if training.unanswered:
        field = setting("", "fields.answer")
        doubts.append(
            f"no run that learns from outcomes, and no evaluation, takes those without an answer; see {field}"
        )
    show_warnings(screen, doubts)
    if renderer is not None:
        screen.rule("first prompt", align="left")
        screen.print(Text(renderer.text(training.problems[0])))
    return is_verifiable


def _show_answers(screen: Console, training: Sequence[JudgedSet], held_out: Sequence[JudgedSet]) -> bool:
    """Print what is wrong with answers and what sets share; return whether all are right by their own verifier."""
    are_verifiable = True
    for each, golds in asyncio.run(check_sets([*training, *held_out])):
        show_golds(screen, each, golds)
        are_verifiable &= not golds.unverifiable
    if held_out:
        show_overlaps(screen, [problem for each in training for problem in each.problems], held_out)
    return are_verifiable


def _run_lines(config: Config, plan: TrainPlan, path: Path) -> list[str]:
    training, left_over = config.training, plan.schedule.left_over_per_epoch
    left_words = f"; {left_over} left out of each epoch, whose batches are whole" if left_over else ""
    at_least = "at least " if training.refill else ""
    evaluated = "nothing"
    if config.evaluation is not None:
        every = config.evaluation.eval_every
        evaluated = f"{counted(sum(len(each.sources) for each in plan.evaluation), 'problem')} before and after"
        evaluated += f", and every {counted(every, 'iteration')}" if every else ""
    return [
        *(f"{role:<9} {model.backend.kind} backend serving {model.model}" for role, model in plan.served.items()),
        f"trainer   {training.ranks} rank(s) under torch.distributed, {training.threads} thread(s) each",
        f"run       {counted(plan.schedule.iterations, 'iteration')} of {at_least}"
        f"{counted(training.batch_size, 'prompt')} in mini-batches of {training.mini_batch_size}, from "
        f"{counted(len(plan.problems) - plan.filtered, 'problem')} ({plan.filtered} too long){left_words}",
        f"rate      {schedule_words(training, plan.schedule.iterations)}",
        *(f"tokens    {line}" for line in plan.common.words),
        *(f"tokens    {role}: {line}" for role, read in plan.texts_read.items() for line in read.words),
        f"evaluate  {evaluated}",
        f"write     {path}",
    ]


def _machine_lines(config: Config, plan: TrainPlan, found: FilesCheck) -> list[str]:
    software, on_gpus = GpuSoftware.found(), trains_on_gpus(config.training, found.machine)
    attention = expected_attention(config.training, on_gpus=on_gpus, has_varlen=software.has_varlen)
    return [
        f"devices   {placement_words(config.training, plan.served, found.machine, found.nodes)}",
        f"software  {software.words}",
        f"attention {attention}",
    ]


@dataclass
class ServersCheck:
    """What was found of a run's servers, as far as the check has come: a failure later loses nothing of it."""

    diagnosis: Diagnosis | None = None
    slope: Slope | None = None  # with `--slope`
    episodes: list[PlayedEpisodes] = field(default_factory=list)  # of each environment

    def run(
        self, screen: Console, config: Config, plan: TrainPlan, directory: Path, *, is_shown: bool, problems: int | None
    ) -> None:
        """Start or attach the servers, ask them, and show what they said. Logs go under `directory`.

        With `problems` also measure by so many whether the teacher is worth it. Unsafe servers are then refused
        (ConfigError).
        """
        status = screen.status("asking the services")

        def diagnosed(found: Diagnosis) -> None:
            self.diagnosis = found
            if is_shown:
                show_servers(screen, found)

        def played(found: PlayedEpisodes) -> None:
            self.episodes.append(found)
            if is_shown:
                screen.print(Text(found.words), soft_wrap=True)
                show_warnings(screen, [*filter(None, [unplayed_words(found.means)])])

        with status if is_shown else contextlib.nullcontext():
            self.slope = asyncio.run(examine(config, plan, directory, diagnosed, played, problems, status.update))
        if is_shown and self.slope is not None:
            show_slope(screen, self.slope)


def print_json(screen: Console, found: FilesCheck, of_servers: ServersCheck) -> None:
    """Print for programs what a run takes, what this machine lacks, and of servers their facts (null if unknown)."""
    tree: dict[str, Any] = {"requirements": found.needed.as_tree(), "lacking": found.lacking}
    if (diagnosis := of_servers.diagnosis) is not None:
        roles = {name: facts.as_tree() for name, facts in diagnosis.roles.items()}
        tree |= {"roles": roles, "refusals": diagnosis.refusals, "warnings": diagnosis.warnings}
    if of_servers.slope is not None:
        tree["slope"] = of_servers.slope
    if of_servers.episodes:
        tree["episodes"] = of_servers.episodes
    screen.print_json(msgspec.json.encode(tree).decode(), highlight=False)
