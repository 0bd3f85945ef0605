"""A process that may open nothing more says so in one line."""

from __future__ import annotations

import os
import resource

import pytest

from spot_async.base.tasks import root_cause
from spot_async.errors import PermanentError, SpotError


def test_a_file_that_cannot_be_opened_for_want_of_descriptors_is_one_line_and_the_cause_of_others() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files") as refused:
            os.pipe()
        cause = root_cause(ExceptionGroup("", [PermanentError("a consequence"), refused.value]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert isinstance(cause, SpotError)
    assert str(cause).startswith("too many files and connections are open to open another: this process may have 0 at")
    with pytest.raises(FileNotFoundError):
        root_cause(FileNotFoundError("a bug"))
