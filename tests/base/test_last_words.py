"""The line that says why a program ended is found behind what interpreters and libraries write after it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from spot_async.base.processes.last_words import headline, readable

ENDS = {  # what ends a program, and the line that is expected
    "raise RuntimeError('no memory')": "RuntimeError: no memory",
    "raise AssertionError": "AssertionError",
    "import subprocess; raise subprocess.TimeoutExpired('nvcc', 5)": (
        "subprocess.TimeoutExpired: Command 'nvcc' timed out after 5 seconds"
    ),
    "raise ValueError('one\\n  two\\n  three\\n  four\\n  five\\n  six\\n  seven')": "ValueError: one",
    "sys.exit('error: no such model')": "error: no such model",
    "sys.stderr.write('cannot listen: port taken\\n'); sys.exit(1)": "cannot listen: port taken",
}
AFTERWARDS = """
import atexit, sys, warnings
from multiprocessing import shared_memory

class Late:
    def __del__(self):
        raise OSError("of what is gone")

def last_warnings():
    for i in range(6):
        warnings.warn(f"the old interface {i} will go away", DeprecationWarning, stacklevel=2)
    print("INFO:     Shutting down", file=sys.stderr)

atexit.register(last_warnings)
late = Late()
leaked = shared_memory.SharedMemory(create=True, size=8)
leaked.close()
"""


@pytest.mark.parametrize(("end", "expected"), ENDS.items())
def test_the_reason_is_found_before_warnings_leaks_and_ignored_errors(end, expected):
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", f"{AFTERWARDS}\n{end}"], capture_output=True, text=True
    )
    lines = readable(done.stderr)
    assert any("leaked" in line for line in lines)
    assert any("Exception ignored in" in line for line in lines)
    assert headline(lines) == expected


def test_a_trace_with_a_prefix_is_read_too():
    lines = [
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "x.py", line 1, in <module>',
        "[rank0]: torch.OutOfMemoryError: CUDA out of memory.",
        "[rank0]:[W1125 15:00:00.1 ProcessGroupNCCL.cpp:1496] Warning: WARNING: the process group was not destroyed",
    ]
    assert headline(lines) == "[rank0]: torch.OutOfMemoryError: CUDA out of memory."


def test_without_a_reason_it_is_the_last_line():
    assert headline(["UserWarning: old"]) == "UserWarning: old"
    assert headline([]) == ""
