"""Makes the line of `dead_letters.jsonl` that a prompt leaves when it is given up. It says enough to see why."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from spot_async.base.files import decode_json, whole_lines, write_whole, writing
from spot_async.base.text import counted
from spot_async.errors import DataError, RequestError
from spot_async.run_directory.layout import row_bytes
from spot_async.types import Prompt

FILE_NAME = "dead_letters.jsonl"


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `dead_letters.jsonl`.

    Everything but the reason may be missing, since a prompt may fail before it sends a request.
    """

    ordinal: int = -1
    problem_id: str = ""
    stage: str | None = None
    failure: str = ""  # permanent, throttled, transient or poisoned
    error: str = ""  # the error's name in `errors.py`
    reason: str = ""
    attempts: int = 1  # how often the request was sent
    endpoint: str | None = None
    request: dict[str, Any] | None = None  # method, path, bytes and body, with long lists and texts cut
    reply: dict[str, Any] | None = None  # status and the beginning of the body


def dead_letter(prompt: Prompt, error: RequestError) -> DeadLetter:
    """Return the record of a prompt whose request failed for good."""
    exchange, asked, answered = error.exchange, None, None
    if exchange is not None:
        asked = {"method": exchange.method, "path": exchange.path, "bytes": exchange.sent_bytes, "body": exchange.sent}
        answered = None if exchange.status is None else {"status": exchange.status, "head": exchange.received}
    return DeadLetter(
        ordinal=prompt.ordinal,
        problem_id=prompt.problem.id,
        stage=error.stage,
        failure=error.failure_class,
        error=type(error).__name__,
        reason=str(error),
        attempts=error.attempts,
        endpoint=None if exchange is None else exchange.endpoint,
        request=asked,
        reply=answered,
    )


def settle_letters(run: Path, dead: Iterable[DeadLetter]) -> None:
    """Let the file have one letter of each dead prompt. Raises StorageError or DataError.

    `dead` has what a ledger knows of them, where a kill came before the letter was written. Letters of prompts that are
    asked once more go, and so does a line that a kill tore.
    """
    path, wanted = run / FILE_NAME, {each.ordinal: each for each in dead}
    lines = list(whole_lines(path))
    found: dict[int, bytes] = {}
    for line in lines:
        with contextlib.suppress(DataError):
            ordinal = decode_json(line, DeadLetter, FILE_NAME).ordinal
            if ordinal in wanted:
                found.setdefault(ordinal, line)
    settled = [*found.values(), *(row_bytes(each) + b"\n" for number, each in wanted.items() if number not in found)]
    if settled and (settled != lines or path.stat().st_size > sum(map(len, lines))):
        write_whole(path, b"".join(settled))
    elif not settled:
        with writing(path):
            path.unlink(missing_ok=True)


def described(letters: Sequence[DeadLetter]) -> str:
    """Return one line for people: how many prompts were given up, why, and where to read on."""
    kinds = Counter(f"{each.failure} failures at {each.stage}" if each.stage else each.failure for each in letters)
    said = ", ".join(f"{count} over {kind}" for kind, count in kinds.most_common() if kind)
    return f"{counted(len(letters), 'prompt')} given up{f' ({said})' if said else ''}: {FILE_NAME}"
