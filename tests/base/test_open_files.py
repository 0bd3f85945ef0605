"""The limit of open files that our long-running processes give themselves."""

from __future__ import annotations

import json
import subprocess
import sys

CHILD = """
import json, resource
from spot_async.base.processes.open_files import ENOUGH, raise_open_file_limit

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
raise_open_file_limit()
found = [resource.getrlimit(resource.RLIMIT_NOFILE)[0]]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 300))
raise_open_file_limit()
found.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
print(json.dumps([found, [ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard), 300]]))
"""


def test_a_process_may_open_as_many_files_as_it_is_let() -> None:
    """1,070 connections of another user once ended a run whose ranks might have 1,024 files open."""
    said = subprocess.run([sys.executable, "-c", CHILD], check=True, capture_output=True, text=True).stdout
    found, wanted = json.loads(said)
    assert found == wanted
