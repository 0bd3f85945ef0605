"""Which failures start a trainer again, and how often."""

from __future__ import annotations

import pytest

from spot_async.errors import ProcessDiedError, StorageError, TrainerError, TrainerLostError
from spot_async.running.run_trainer import Restarts, loss_of_trainer

LOSS = TrainerLostError("trainer (pid 7) was killed by SIGKILL")
AGAIN = TrainerLostError("trainer (pid 8) was killed by SIGKILL")


def test_a_lost_trainer_is_started_again_as_often_as_is_allowed_and_then_the_loss_says_so():
    restarts = Restarts(2)
    restarts.after(LOSS, 3)
    restarts.after(LOSS, 5)
    with pytest.raises(TrainerLostError, match=r"by SIGKILL; it was restarted 2 times \(training\.restarts\)$"):
        restarts.after(AGAIN, 9)
    assert restarts.count == 2


def test_without_restarts_the_loss_is_raised_as_it_is():
    with pytest.raises(TrainerLostError) as raised:
        Restarts(0).after(LOSS, 3)
    assert raised.value is LOSS


def test_a_trainer_that_is_lost_twice_at_the_same_step_is_not_started_again():
    restarts = Restarts(5)
    restarts.after(LOSS, 3)
    with pytest.raises(TrainerLostError, match="before its last restart, also after iteration 3"):
        restarts.after(AGAIN, 3)


def test_one_that_is_lost_while_it_starts_counts_by_the_step_that_it_goes_back_to():
    restarts = Restarts(5)
    restarts.after(LOSS, 7)
    restarts.after(AGAIN, 4)
    with pytest.raises(TrainerLostError, match="after iteration 4"):
        restarts.after(AGAIN, 4)


def group(*errors):
    return ExceptionGroup("tasks", list(errors))


def test_all_that_notice_a_loss_at_once_are_one_loss():
    assert loss_of_trainer(group(group(LOSS), AGAIN)) is LOSS
    assert loss_of_trainer(LOSS) is LOSS


@pytest.mark.parametrize(
    "other",
    [
        TrainerError("iteration 3, mini-batch 1 of 2: non-finite policy loss in sample 'problem-4'"),
        StorageError("cannot write metrics.jsonl: No space left on device"),
        ProcessDiedError("teacher was killed once too often"),
        RuntimeError("a bug"),
    ],
)
def test_what_would_happen_again_is_no_loss_also_beside_one(other):
    assert loss_of_trainer(group(other)) is None
    assert loss_of_trainer(group(LOSS, group(other))) is None
