"""A tool that runs a model's Python: `environment: {object: "spot_async.environments.python_tool:PythonTool"}`.

Standard library only, so that another interpreter can import this file.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

# Its random numbers are the same each time, and its errors are told without a trace.
RUN = "import random, sys; random.seed(0); exec(compile(sys.stdin.read(), 'code', 'exec'), {'__name__': '__main__'})"


class PythonTool:
    """Runs each program in a process of its own, so that none of them touches the episode that asked for it."""

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints, and the last line of its error if it fails.

        Args:
            code: The program. Only what it prints is seen, and nothing but files is kept for the next one.
        """
        done = subprocess.run(
            [sys.executable, "-c", RUN],
            input=code.encode(errors="replace"),
            capture_output=True,
            cwd=tempfile.gettempdir(),
            check=False,
        )
        printed, errors = (each.decode(errors="replace") for each in (done.stdout, done.stderr))
        why = errors.strip().rpartition("\n")[2] or f"ended with status {done.returncode}"
        return printed + (why if done.returncode else "")
