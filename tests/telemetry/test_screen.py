"""A screen that cannot show something, or takes nothing any more, ends no command."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from key_spellings import SPELLINGS
from rich.text import Text

from spot_async.base.secrets import SECRETS
from spot_async.telemetry.screen import Screen

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


@given(before=st.text(max_size=20), after=st.text(max_size=20), spelling=st.sampled_from([*SPELLINGS]))
def test_a_screen_shows_no_key_and_nothing_that_a_terminal_obeys(before, after, spelling):
    key = "a/Key-of-98+the.screen"
    SECRETS.learn(key)
    said = f"{before} {SPELLINGS[spelling](key)} {after}\x1b]52;c;AA==\x07\x9b2J\u202e\u2028\r\b\0[red]"
    file = io.StringIO()
    screen = Screen(file=file, width=1000)
    for each in (said, Text(said)):
        screen.print(each)
    shown = file.getvalue()
    assert "[red]" in shown
    assert SPELLINGS[spelling](key) not in shown
    assert all(each == "\n" or unicodedata.category(each) not in ("Cc", "Cs", "Zl", "Zp") for each in shown)
    assert "\u202e" not in shown


def test_a_screen_that_was_closed_falls_silent(tmp_path):
    from spot_async.telemetry.screen import Screen

    with (tmp_path / "screen").open("w") as file:
        screen = Screen(file=file)
        screen.print("shown")
    screen.print("not shown")
    assert (tmp_path / "screen").read_text() == "shown\n"


TAKES_NOTHING = """
from spot_async.telemetry.console import RunConsole
from spot_async.telemetry.screen import Screen
import spot_async.telemetry.screen as module
import sys
module.LAST_LINES_S = 0.5
screen = RunConsole(Screen(width=200), 9)
with screen.live():
    for line in range(3000):  # more than a pipe holds
        screen.say(f"line {line} " + 100 * "x")
    sys.stderr.write("the run continued\\n")
screen.say("the end")
sys.stderr.write("and ended\\n")
"""


def test_a_reader_that_takes_nothing_holds_up_neither_the_run_nor_its_end():
    unread, screen = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", TAKES_NOTHING], stdout=screen, stderr=subprocess.PIPE, text=True, timeout=60
        )
    finally:
        os.close(unread)
        os.close(screen)
    assert (done.returncode, done.stderr) == (0, "the run continued\nand ended\n")


def test_a_slow_reader_gets_every_line_in_order():
    shows = TAKES_NOTHING.replace("range(3000)", "range(500)").replace("0.5", "60")
    with subprocess.Popen([sys.executable, "-c", shows], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        time.sleep(0.2)
        lines = process.stdout.read().decode().splitlines()
    assert [line.split()[1:3] for line in lines] == [*(["line", str(i)] for i in range(500)), ["the", "end"]]


def test_a_reader_that_leaves_is_no_failure():
    shows = f"{TAKES_NOTHING}\nsys.exit(7)"
    with subprocess.Popen([sys.executable, "-c", shows], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b"the run continued\nand ended\n"
    assert process.returncode == 7
