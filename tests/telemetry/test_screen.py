"""A screen that cannot show something, or takes nothing any more, ends no command."""

from __future__ import annotations

import subprocess
import sys

import pytest

SHOWS = """
import sys
from spot_async.telemetry.screen import Screen, show_nearest_characters
show_nearest_characters()
Screen(width=60).print("loss 1.0 · 2.5 ±0.1 … 🍎 Ł", highlight=False)
print("plain · words", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("encoding", "shown", "aside"),
    [
        ("ascii", "loss 1.0 - 2.5 +-0.1 ... ? ?", "plain - words"),
        ("latin-1", "loss 1.0 · 2.5 ±0.1 ... ? ?", "plain · words"),
        ("cp1252", "loss 1.0 · 2.5 ±0.1 … ? ?", "plain · words"),
        ("cp437", "loss 1.0 · 2.5 ±0.1 ... ? ?", "plain · words"),
        ("utf-8", "loss 1.0 · 2.5 ±0.1 … 🍎 Ł", "plain · words"),
    ],
)
def test_what_an_encoding_lacks_is_shown_as_what_is_nearest(encoding, shown, aside):
    done = subprocess.run([sys.executable, "-c", SHOWS], capture_output=True, env={"PYTHONIOENCODING": encoding})
    assert (done.stdout.decode(encoding), done.stderr.decode(encoding)) == (f"{shown}\n", f"{aside}\n")


def test_a_screen_that_was_closed_falls_silent(tmp_path):
    from spot_async.telemetry.screen import Screen

    with (tmp_path / "screen").open("w") as file:
        screen = Screen(file=file)
        screen.print("shown")
    screen.print("not shown")
    assert (tmp_path / "screen").read_text() == "shown\n"
