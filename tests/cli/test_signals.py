"""How a run answers signals, and that it hears them."""

from __future__ import annotations

import subprocess
import sys
from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1

import pytest

from spot_async.cli.ending import Answer, answer_to


@pytest.mark.parametrize(
    ("number", "earlier", "can_save", "answer"),
    [
        (SIGTERM, [], True, Answer.SAVE),
        (SIGUSR1, [], True, Answer.SAVE),
        (SIGTERM, [], False, Answer.CANCEL),
        (SIGUSR1, [], False, Answer.CANCEL),
        (SIGINT, [], True, Answer.CANCEL),
        (SIGHUP, [], True, Answer.CANCEL),
        (SIGTERM, [SIGTERM], True, Answer.LEAVE),
        (SIGINT, [SIGTERM], True, Answer.LEAVE),
        (SIGTERM, [SIGUSR1], True, Answer.IGNORE),
        (SIGUSR1, [SIGTERM], True, Answer.IGNORE),
        (SIGTERM, [SIGUSR1, SIGTERM], True, Answer.LEAVE),
        (SIGHUP, [SIGTERM], True, Answer.IGNORE),
        (SIGTERM, [SIGINT], True, Answer.LEAVE),
        (SIGTERM, [SIGUSR1], False, Answer.LEAVE),
    ],
)
def test_the_first_signal_of_a_scheduler_saves_and_a_second_of_its_kind_ends_at_once(number, earlier, can_save, answer):
    saves = can_save and bool(earlier) and earlier[0] in (SIGTERM, SIGUSR1)
    assert answer_to(number, earlier, can_save=can_save, saves=saves) is answer


HEARD_ELSEWHERE = """
import asyncio, signal, sys, threading
from pathlib import Path
from spot_async.cli.ending import run_until_stopped
from spot_async.run_directory.layout import RunDirectory

async def main():
    threading.Timer(0.3, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT)).start()
    await asyncio.sleep(600)

run_until_stopped(main(), RunDirectory(Path(sys.argv[1])))
"""


def test_a_signal_that_comes_to_another_thread_wakes_the_run(tmp_path):
    """The system gives it to any thread, or to the loop's just before it begins to wait."""
    words = [sys.executable, "-c", HEARD_ELSEWHERE, str(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert "stopped by SIGINT" in ended.stderr
