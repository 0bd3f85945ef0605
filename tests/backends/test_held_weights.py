"""Which versions an answer may be of, and when it is worth asking again."""

import pytest

from spot_async.backends.shared.held_weights import HeldWeights
from spot_async.errors import FailureClass, VersionMismatchError
from spot_async.types import WeightVersion

V0, V1, V2 = (WeightVersion(0, step) for step in range(3))


def test_an_answer_has_one_version_and_is_asked_for_again_where_an_update_came_between() -> None:
    held = HeldWeights("student")
    held.require([V0, V0], None)
    with pytest.raises(VersionMismatchError, match="the weights changed while it answered") as mixed:
        held.require([V0, V1], None)
    assert mixed.value.failure_class is FailureClass.TRANSIENT


def test_weights_that_were_asked_for_by_name_are_waited_for_only_while_they_are_on_their_way() -> None:
    held = HeldWeights("student")
    held.require([V0, V0], V0)
    asked = r"holds weights 0\.0, not the 0\.1 asked for"
    with held.updating(V1), pytest.raises(VersionMismatchError, match=asked) as coming:
        held.require([V0], V1)
    with pytest.raises(VersionMismatchError) as gone:
        held.require([V1], V0)
    with pytest.raises(VersionMismatchError) as unknown:
        held.require([V1], V2)
    classes = [each.value.failure_class for each in (coming, gone, unknown)]
    assert classes == [FailureClass.TRANSIENT, FailureClass.PERMANENT, FailureClass.PERMANENT]
