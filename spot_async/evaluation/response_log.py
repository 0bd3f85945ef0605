"""Keeps an evaluation's judged responses on disk, so that a killed evaluation can be continued.

During the evaluation it appends them to `evaluation.jsonl.partial` in the order in which they were judged. The
first line there says what they belong to. A killed evaluation leaves this file, perhaps with a torn last line; whoever
continues it asks only for what is missing.

A complete evaluation has them in `evaluation.jsonl`, in the order of benchmarks, problems and samples. So its bytes do
not depend on interruptions. What identifies an evaluation is computed here too; its figures are computed elsewhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from spot_async.base.files import decode_json, lines_of, reading, whole_lines, write_whole, writing
from spot_async.config import Config
from spot_async.errors import DataError
from spot_async.evaluation.benchmarks import Benchmark
from spot_async.run_directory.layout import RunDirectory
from spot_async.types import FinishReason, Verdict

T = TypeVar("T")

# The key in `Identity.settings` of a digest of what a benchmark asks. The configuration has no such key.
PROMPTS = "prompts"
LOG_FORMAT = 1  # raised when this program can no longer continue older files
SYNC_EVERY = 64  # so many responses a power failure may cost; a killed process loses only those in flight


class JudgedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One response of an evaluation, which is one line of its JSONL file."""

    benchmark: str = "problems"
    problem_id: str
    sample: int
    verdict: Verdict | None  # None where nothing is judged
    tokens: int
    finish_reason: FinishReason
    response: str
    problem: str = ""  # the whole question in the benchmark's format, as people read it
    gold: str = ""
    choices: tuple[str, ...] = ()
    tier: str | None = None
    extracted: str | None = None  # what the last box holds; None without one, and where the verifier reads no box
    seed: int | None = None  # of the request
    turns: int | msgspec.UnsetType = msgspec.UNSET  # beside an environment; the response is the last of them
    math_verify: Verdict | msgspec.UnsetType = msgspec.UNSET  # Math-Verify's own verdict, where it is another
    template: str | None = None  # in the file's first line: the chat template that rendered the prompts

    @property
    def key(self) -> ResponseKey:
        return ResponseKey(self.benchmark, self.problem_id, self.sample)


class ResponseKey(NamedTuple):
    """Names one response of an evaluation."""

    benchmark: str
    problem_id: str
    sample: int


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What the responses of a file belong to: its first line. Responses of other identities are never added to it."""

    format: int = LOG_FORMAT
    model: str  # fingerprint of the model's files
    backend: str  # its kind, since servers round differently, and draw different tokens from equal seeds
    settings: dict[str, Any]  # by configuration key


class PartialFile(NamedTuple):
    """What `read_partial` found."""

    identity: Identity | None  # None if not even the first line is whole, and so nothing was judged
    responses: list[JudgedResponse]
    whole_bytes: int  # the length of the whole lines


def read_partial(path: Path) -> PartialFile:
    """Return the whole lines of a partial file. A kill may have torn what follows the last line break.

    Raises DataError, which names the line, for a whole line that is no response.
    """
    identity, responses, whole_bytes = None, [], 0
    again = "remove the line, and that response is asked for again"
    for number, line in enumerate(whole_lines(path), start=1):
        if identity is None:
            identity = _decode(line, Identity, f"{path}:{number}", "evaluate into another run.directory")
        else:
            responses.append(_decode(line, JudgedResponse, f"{path}:{number}", again))
        whole_bytes += len(line)
    return PartialFile(identity, responses, whole_bytes)


def _decode(line: bytes, kind: type[T], where: str, remedy: str) -> T:
    try:
        return decode_json(line, kind, f"{where}: cannot continue this evaluation")
    except DataError as error:
        raise DataError(f"{error}: {remedy}") from None


def check_same(found: Identity, wanted: Identity, name: str) -> None:
    """Raise DataError unless the identities are equal; it names the first difference, as it was and as it is now."""
    differences: list[tuple[str, Any, Any]] = [
        ("format of the file", found.format, wanted.format),
        ("student.model", found.model, wanted.model),
        ("student.backend.kind", found.backend, wanted.backend),
    ]
    keys = dict.fromkeys([*found.settings, *wanted.settings])
    differences += [(key, found.settings.get(key), wanted.settings.get(key)) for key in keys]
    for key, was, now in differences:
        if was != now:
            raise DataError(
                f"{name}: cannot be continued, {_difference(key, was, now, found, wanted)}: set it back, or evaluate "
                "into another run.directory"
            )


def _difference(key: str, was: Any, now: Any, found: Identity, wanted: Identity) -> str:
    """Return a difference in words. Digests are not shown, and a benchmark may have settings on one side only."""
    owner, _, last = key.rpartition(".")
    if key == "student.model":
        return "the files of student.model are not those it was begun with"
    for here, there, words in (
        (wanted, found, "was not part of it"),
        (found, wanted, "was part of it, and is not in the configuration"),
    ):
        if key in here.settings and not any(each.startswith(f"{owner}.") for each in there.settings):
            return f"{owner} {words}"
    if last == PROMPTS:
        return f"{owner} has other problems, answers or prompts (its files, prompt.* or the student's template changed)"
    return f"{key} was {_shown(was)} and is {_shown(now)} now"


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)


def read_responses(directory: RunDirectory, name: str) -> dict[ResponseKey, JudgedResponse]:
    """Return the responses of a complete file. Raises DataError if it is gone, or naming a damaged line."""
    path = directory.path / name
    with reading(path):
        lines = enumerate(lines_of(path), start=1)
        responses = [_decode(line, JudgedResponse, f"{path}:{number}", "evaluate again") for number, line in lines]
    return {response.key: response for response in responses}


class ResponseLog:
    """The responses of one evaluation in a run directory."""

    def __init__(self, directory: RunDirectory, name: str, identity: Identity) -> None:
        """`name` is the complete file's, such as `evaluation.jsonl`."""
        self._directory = directory
        self._name, self._partial = name, f"{name}.partial"
        self._path = directory.path / self._partial
        self.identity = identity
        self._unsynced = 0

    def open(self) -> dict[ResponseKey, JudgedResponse]:
        """Begin the file, or continue the one that is there; return the responses that it holds already.

        Raises DataError if they belong to another model or other settings.
        """
        found = self.check()
        if found.identity is None:
            self.discard_partial()
            self._directory.append(self._partial, [self.identity])
        else:
            os.truncate(self._path, found.whole_bytes)
        # Reversed, so that the first of two responses with the same key counts.
        return {response.key: response for response in reversed(found.responses)}

    def check(self) -> PartialFile:
        """Return what the file holds. Raises DataError if it is damaged, or of another model or other settings.

        `open` would raise the same, but only after servers have started.
        """
        found = read_partial(self._path)
        if found.identity is not None:
            check_same(found.identity, self.identity, str(self._path))
        return found

    async def append(self, response: JudgedResponse) -> None:
        """Write one more response. It outlives a kill at once, and a power failure after the next SYNC_EVERY."""
        self._directory.append(self._partial, [response])
        self._unsynced += 1
        if self._unsynced >= SYNC_EVERY:
            self._unsynced = 0
            await asyncio.to_thread(self._sync)  # a disk may take long, and must not block the loop

    def complete(self, responses: Iterable[JudgedResponse], template: str | None = None) -> None:
        """Write the complete file, in the order given, to the disk: the weights may be deleted next."""
        rows = list(responses)
        rows[:1] = [msgspec.structs.replace(each, template=template) for each in rows[:1]]
        write_whole(self._directory.path / self._name, b"".join(msgspec.json.encode(each) + b"\n" for each in rows))

    def discard_partial(self) -> None:
        """Delete the partial file. Called once everything that follows from the responses is written."""
        self._path.unlink(missing_ok=True)

    def _sync(self) -> None:
        with writing(self._path), self._path.open("rb") as file:
            os.fsync(file.fileno())


def count_kept(path: Path) -> int:
    """Return the number of responses in the file `path`, or in its partial file while it is not complete."""
    partial = path.with_name(f"{path.name}.partial")
    return sum(1 for _ in whole_lines(path)) or max(0, sum(1 for _ in whole_lines(partial)) - 1)


BLOCK_BYTES = 1 << 16
BLOCKS = 64  # how many blocks of a file are hashed: few suffice, since training changes all of a model's weights


def identity_of(config: Config, benchmarks: Sequence[Benchmark], model: Path) -> Identity:
    """Return the identity of an evaluation of the weights in `model`."""
    return Identity(
        model=model_fingerprint(model),
        backend=config.student.backend.kind,
        settings=settings_of(config, benchmarks),
    )


def settings_of(config: Config, benchmarks: Sequence[Benchmark]) -> dict[str, Any]:
    """Return all settings that decide the figures, by key. How the model is served is not among them."""
    evaluation = config.evaluation
    assert evaluation is not None
    settings: dict[str, Any] = {
        f"evaluation.{name}": getattr(evaluation, name) for name in ("preset", "seed", "temperature", "top_p")
    }
    later = dict(evaluation.further) | {"stop": evaluation.stop, "thinking_tokens": evaluation.thinking_tokens}
    settings |= {f"evaluation.{name}": value for name, value in later.items() if value}  # as old files have none
    for each in benchmarks:
        settings |= {
            f"{each.key}.samples": each.samples,
            f"{each.key}.max_response_tokens": each.max_response_tokens,
            f"{each.key}.verifier": None if each.verifier is None else each.verifier.that_decide(),
            f"{each.key}.{PROMPTS}": prompts_fingerprint(each),
        }
        if each.vocab_limit is not None:
            settings[f"{each.key}.vocab_limit"] = each.vocab_limit
        own = evaluation.sets()[each.name].environment
        if (played := own or config.environment) is not None:
            key = "environment" if own is None else f"{each.key}.environment"
            settings |= {f"{key}.{name}": value for name, value in played.that_decide().items()}
    return settings


def settings_fingerprint(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def prompts_fingerprint(benchmark: Benchmark) -> str:
    """Return a digest of all prompts and answers of a benchmark, in order."""
    digest = hashlib.sha256()
    for source in benchmark.sources:
        problem = source.problem
        digest.update(json.dumps([problem.id, problem.answer, problem.choices]).encode())
        digest.update(source.token_ids.tobytes())
    return digest.hexdigest()[:16]


def model_fingerprint(directory: Path) -> str:
    """Return a digest of a model directory: names, sizes and evenly spread blocks of its files. Raises DataError."""
    digest = hashlib.sha256()
    with reading(directory):
        for path in sorted(each for each in directory.iterdir() if each.is_file() and not each.name.startswith(".")):
            size = path.stat().st_size
            digest.update(os.fsencode(path.name) + f"\t{size}\n".encode())
            step = max(BLOCK_BYTES, size // BLOCKS)
            with path.open("rb") as file:
                for offset in range(0, size, step):
                    file.seek(offset)
                    digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]
