"""Reads rates and lengths from what a run left: metrics, which know the trainer, and a trace of the requests."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from spot_async.base.files import lines_of, reading
from spot_async.config import Config, model_sections
from spot_async.errors import DataError
from spot_async.models.hub import is_same_model
from spot_async.run_directory.reading import RunFiles
from spot_async.stages.services import stage_kind, stage_server
from spot_async.telemetry.totals import Rows, environments_of, total
from spot_async.telemetry.trace import PUBLISHING
from spot_async.tools.simulate.fit import Speed, Timed, speed
from spot_async.tools.simulate.lengths import RecordedLengths, RecordedPrompt
from spot_async.tools.simulate.rates import Tree, by_section

RESPONSES = ("rollout", "teacher_response")  # stages whose answers are the responses of samples
SCORES = ("score", "reference")  # stages whose requests have a response's tokens and those of its prompt
LOADING = (*RESPONSES, "probe", *SCORES)  # stages whose requests take the longer, the more tokens they have


class Slice(msgspec.Struct):
    """What rates need of a line of `trace.json`. Times are in microseconds."""

    name: str = ""
    tid: int = 0
    ts: int = 0
    dur: int = 0
    args: dict[str, Any] = {}


@dataclass(frozen=True)
class Recorded:
    """What a run says of its cluster and of its responses."""

    rates: Tree
    lengths: RecordedLengths | None


def read_run(path: Path, config: Config) -> Recorded:
    """Return what a run has measured. Raises DataError where it is none of this student's, or has no trace."""
    files = RunFiles(path)
    if files.is_evaluation:
        raise DataError(f"--from {path}: is an evaluation; give a training run")
    trained = files.config()
    student = str((trained.get("student") or {}).get("model", ""))
    if not is_same_model(student, config.student.model):
        raise DataError(
            f"--from {path}: that run trained {student}, and its rates and lengths say nothing of "
            f"{config.student.model}: give a run of this student, or state them (--rate)"
        )
    rows = files.metrics()
    if not rows:
        raise DataError(f"--from {path}: no iteration has finished, so nothing was measured")
    slices = counted = _slices(files.path / "trace.json")
    if len(rows) > 2:  # in the first iteration, servers and trainer warm up
        rows = rows[1:]
        ends = (number for number, each in enumerate(slices, 1) if each.name.startswith("iteration "))
        counted = slices[next(ends, 0) :]
    requests = _requests(counted)
    brief: Counter[str] = Counter()  # requests of no time that have no slice
    for each in counted:
        brief.update(each.args.get("brief", {}))
    played = _environment(rows, trained, requests)
    prompts = _traced_prompts(slices, played.get("turns", 1.0), played.get("answer_tokens", 0.0))
    rates = _trainer(rows) | _stage_seconds(requests, brief) | ({"environment": played} if played else {})
    servers: Tree = {}
    for role in ("student", *config.teachers_by_role, "reference"):
        if role != "student" and not _same_role(trained, config, role):
            continue
        backend = model_sections(trained).get(role, {}).get("backend") or {}
        found = _of_requests(requests, role, backend.get("slots"))
        if found is not None:
            servers[role] = {key: value for key, value in found._asdict().items() if value is not None}
    return Recorded(rates | by_section(servers), RecordedLengths(prompts) if prompts else None)


def tune_beside(config: Path) -> Path | None:
    """Return the file that `spot-async tune` wrote for a configuration by default, if it is there."""
    name = config.stem if config.stem.endswith(".tuned") else f"{config.stem}.tuned"
    path = config.with_name(f"{name}.json")
    return path if path.exists() else None


def _trainer(rows: Rows) -> Tree:
    steps = [row for row in rows if row.get("train/train_s") and row.get("train/tokens")]
    if not steps:
        return {}
    train_s = total(steps, "train/train_s")
    # The trainer of an asynchronous run need not wait for an update, so there publishing says how long it takes.
    updates_s = [row.get("publish/update_weights_s", row.get("time/update_weights_s", 0.0)) for row in steps]
    return {
        "trainer": {
            "tokens_per_s": total(steps, "train/tokens") / train_s,
            "fixed_s": max(0.0, (total(steps, "time/train_s") - total(steps, "time/look_s") - train_s) / len(steps)),
        },
        "update_s": sum(updates_s) / len(steps),
    }


def _environment(rows: Rows, trained: Mapping[str, Any], requests: Mapping[str, Sequence[Timed]]) -> Tree:
    """Return the rates of a run's environments, as if they were one; empty where nothing was played."""
    rows = [row for row in rows if "environment/turns" in row]
    asked, turns = (
        [each._replace(server=stage) for stage in requests if stage_kind(stage) in kinds for each in requests[stage]]
        for kinds in (["environment"], [*RESPONSES, "probe"])
    )
    if not rows or not turns:
        return {}
    mean, share, calls = (total(rows, f"environment/{name}") / len(rows) for name in ("turns", "read_share", "calls"))
    workers = next((each.get("workers") for each in environments_of(trained).values()), None)
    one = speed([each._replace(tokens=1.0) for each in asked], workers)
    asked_s = 0.0 if one is None else len(asked) * (one.request_s + 1 / one.tokens_per_s_each)
    tokens, answer_tokens = total(rows, "train/tokens") / max(1.0, total(rows, "train/trajectories")), 0.0
    if mean > 1:  # of the responses that got an answer, the share is larger
        answer_tokens = tokens * share / (calls - share) * calls / (mean - 1)
    return {"answer_s": asked_s / len(turns), "answer_tokens": answer_tokens, "turns": mean}


def _requests(slices: Sequence[Slice]) -> dict[str, list[Timed]]:
    """Return the requests of each stage. Of those that were sent at the same time, the oldest prompt's is first.

    Where a trace does not name their tokens, they have none.
    """
    requests: dict[str, list[Timed]] = defaultdict(list)
    times_s, stood_s = [0.0], [0.0]  # how long the student's servers had stood still, to load weights
    for each in slices:
        if (each.name, each.tid) == ("update weights", PUBLISHING):
            times_s += [each.ts / 1e6, (each.ts + each.dur) / 1e6]
            stood_s += [stood_s[-1], stood_s[-1] + each.dur / 1e6]
    done = [each for each in slices if stage_server(each.name) is not None and "outcome" not in each.args]
    for each in sorted(done, key=lambda each: (each.ts, each.args["prompt"], each.args.get("part", []))):
        start_s, end_s = each.ts / 1e6, (each.ts + each.dur) / 1e6
        if stage_server(each.name) == "student" and each.name != "candidates":  # whose mean has what they waited for
            start_s, end_s = (at_s - float(np.interp(at_s, times_s, stood_s)) for at_s in (start_s, end_s))
        tokens = float(each.args.get("tokens", 0))
        requests[each.name].append(Timed(str(each.args.get("server", "")), start_s, end_s, tokens))
    return requests


def _traced_prompts(slices: Iterable[Slice], turns: float, answer_tokens: float) -> list[RecordedPrompt]:
    """Return the prompts that were finished, with the tokens of their requests.

    Which of a prompt's responses a turn is of is not traced: all have as many. Probes are as of so many turns.
    """
    tokens: dict[tuple[int, str], list[tuple[list[int], int]]] = defaultdict(list)  # and parts, by prompt and stage
    finished: list[int] = []
    for each in slices:
        prompt = each.args.get("prompt")
        if prompt is None:
            continue
        if each.name == "prompt" and each.args.get("outcome") == "queued":
            finished.append(prompt)
        elif "outcome" not in each.args and "tokens" in each.args:
            tokens[prompt, each.name].append((each.args.get("part", []), each.args["tokens"]))

    def in_order(prompt: int, *stages: str) -> list[int]:
        return [count for stage in stages for _, count in sorted(tokens[prompt, stage])]

    names = {stage for _, stage in tokens}
    written, scores = (sorted(name for name in names if stage_kind(name) in kinds) for kinds in (RESPONSES, SCORES))
    prompts = []
    asked = {prompt: own for prompt in finished if (own := in_order(prompt, *written))}
    together = max(1, round(sum(map(len, asked.values())) / turns / max(1, len(asked))))  # responses of a prompt
    for prompt, responses in asked.items():
        if turns > 1:
            responses = [sum(responses[nth::together]) for nth in range(min(together, len(responses)))]
        scored = next((own for stage in scores if len(own := in_order(prompt, stage)) == len(responses)), responses)
        own_tokens = max(0.0, (sum(scored) - sum(responses)) / len(responses) - (turns - 1) * answer_tokens)
        prompts.append(RecordedPrompt(responses, [turns * each for each in in_order(prompt, "probe")], own_tokens))
    return prompts


def _slices(path: Path) -> list[Slice]:
    """Return the spans of a trace, of one that was cut short too, as long as it has those of every request."""
    found: list[Slice] = []
    if not path.exists():
        raise DataError(f"--from {path.parent}: has no trace.json (run.trace=false), which says what servers did")
    decoder = msgspec.json.Decoder(Slice)
    with reading(path):
        for line in lines_of(path):
            if line.startswith(b'{"ph":"X"'):
                try:
                    each = decoder.decode(line.rstrip(b",\n"))
                except (msgspec.MsgspecError, RecursionError):
                    break
                if each.name.startswith("iteration ") and "requests" in each.args:
                    break
                found.append(each)
    return found


def _stage_seconds(requests: Mapping[str, Sequence[Timed]], brief: Mapping[str, int]) -> Tree:
    """Return the mean seconds of requests that are not counted in tokens."""
    names = {"candidates": "candidates_s", "verify": "verdict_s"}
    return {
        names[stage]: sum(each.ended_s - each.started_s for each in requests[stage])
        / (len(requests[stage]) + brief.get(stage, 0))
        for stage in names
        if requests.get(stage)
    }


def _of_requests(requests: Mapping[str, Sequence[Timed]], role: str, slots: int | None) -> Speed | None:
    """Return the speed that a role's requests show. Only those that generate need one of the configured `slots`."""
    own = [stage for stage in requests if stage_server(stage) == role]
    stages = [stage for kind in LOADING for stage in own if stage_kind(stage) == kind]
    generates = not {stage_kind(stage) for stage in stages} <= set(SCORES)
    return speed([each for stage in stages for each in requests[stage]], slots if generates else None)


def _same_role(trained: Mapping[str, Any], config: Config, role: str) -> bool:
    """Whether a role has the same model in both. A reference without a section is the student."""
    ours, theirs = config.models.get(role), model_sections(trained).get(role)
    if ours is None or theirs is None:
        return ours is None and theirs is None and role == "reference"
    return is_same_model(str(theirs.get("model", "")), ours.model)
