"""How a run answers signals. No process is involved."""

from __future__ import annotations

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
