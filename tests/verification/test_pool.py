"""Verification in worker processes: what comes back, and that nothing a worker does can hold or outlive the parent."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from spot_async.base.processes import worker_pool
from spot_async.base.processes.worker_pool import WorkerDiedError, WorkerPool
from spot_async.errors import DeadlineExceededError, ProcessDiedError
from spot_async.types import Problem
from spot_async.verification import MathVerify, Verdict
from spot_async.verification.math_verify import WORDS
from spot_async.verification.normalization import parse_number

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="real problem files are not here")
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
FAR = float("inf")
HOSTILE = r"\boxed{9^{9^{9^{9}}}}"

WORKER = r"""
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("{}", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "hold":  # one C call that never gives up the interpreter
        3 ** (10 ** 9)
    elif request["do"] == "die":
        sys.exit(3)
    elif request["do"] == "sleep":
        time.sleep(request["s"])
    elif request["do"] == "wait":
        while not os.path.exists(request["for"]):
            time.sleep(0.01)
    print(json.dumps({"pid": os.getpid(), "environment": list(os.environ)}), flush=True)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    return [sys.executable, "-I", str(script)]


def children() -> set[int]:
    """Processes whose parent this is, zombies included."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - another process's end is no asyncio event
            await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def ask(pool: WorkerPool, do: str, *, timeout_s: float = 30.0, deadline: float = FAR, **more: Any) -> Any:
    return await pool.ask({"do": do, **more}, timeout_s=timeout_s, deadline=deadline)


@needs_proc
async def test_workers_are_kept_limited_in_number_and_gone_afterwards(command: list[str]) -> None:
    before = children()
    async with WorkerPool(command, size=2, words=WORDS) as pool:
        started = children() - before
        assert len(started) == 1  # a second only when needed
        assert {(await ask(pool, "pid"))["pid"] for _ in range(3)} == started
        replies = await asyncio.gather(*(ask(pool, "sleep", s=0.05) for _ in range(6)))
        assert {reply["pid"] for reply in replies} == children() - before
        assert len(children() - before) == 2
    assert children() == before


@needs_proc
async def test_a_worker_past_its_time_is_killed_and_replaced(command: list[str]) -> None:
    before = children()
    async with WorkerPool(command, size=1, words=WORDS) as pool:
        (stuck,) = children() - before
        with pytest.raises(TimeoutError):
            await ask(pool, "hold", timeout_s=0.2)
        assert not is_running(stuck)
        assert (await ask(pool, "pid"))["pid"] != stuck


@needs_proc
async def test_cancelling_a_request_kills_its_worker_at_once(command: list[str]) -> None:
    before = children()
    async with WorkerPool(command, size=1, words=WORDS) as pool:
        (stuck,) = children() - before
        request = asyncio.create_task(ask(pool, "hold"))
        waiting = asyncio.create_task(ask(pool, "pid"))
        await asyncio.sleep(0.1)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert not is_running(stuck)
        assert (await waiting)["pid"] != stuck
    assert children() == before


@needs_proc
async def test_leaving_by_an_exception_leaves_no_process(command: list[str]) -> None:
    before = children()

    async def fail() -> None:
        await asyncio.sleep(0.2)
        raise ValueError("a bug elsewhere")

    async def run() -> None:
        async with WorkerPool(command, size=2, words=WORDS) as pool, asyncio.TaskGroup() as group:
            group.create_task(ask(pool, "hold"))
            group.create_task(ask(pool, "hold"))
            group.create_task(fail())

    with pytest.raises(ExceptionGroup):
        await run()
    assert children() == before


@needs_proc
async def test_a_worker_that_dies_fails_its_own_request_only(command: list[str]) -> None:
    before = children()
    async with WorkerPool(command, size=1, words=WORDS) as pool:
        with pytest.raises(WorkerDiedError, match="exited with code 3"):
            await ask(pool, "die")
        (pid,) = {(await ask(pool, "pid"))["pid"]}
        killed = asyncio.create_task(ask(pool, "hold"))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=f"{pid}.* was killed by SIGKILL"):
            await killed
        idle = (await ask(pool, "pid"))["pid"]
        os.kill(idle, signal.SIGKILL)
        await until(lambda: not any(worker.alive for worker in pool._workers))
        assert (await ask(pool, "pid"))["pid"] != idle  # found dead while idle: replaced, no error
    assert children() == before


async def test_waiting_for_a_worker_ends_at_the_deadline(command: list[str], tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    async with WorkerPool(command, size=1, words=WORDS) as pool:
        enough = tmp_path / "enough"
        busy = asyncio.create_task(ask(pool, "wait", **{"for": str(enough)}))
        await asyncio.sleep(0)  # it has the worker now
        with pytest.raises(DeadlineExceededError, match="add workers"):
            await ask(pool, "pid", deadline=loop.time() + 0.1)
        enough.touch()
        assert "pid" in await busy  # unharmed
        with pytest.raises(DeadlineExceededError):
            await ask(pool, "pid", deadline=loop.time() - 1)


def dying_at_start(tmp_path: Path, deaths: int, how: str) -> list[str]:
    """A worker's command whose first processes, as many as `deaths`, end by `how` before they are ready."""
    script = tmp_path / "dying.py"
    count = "starts = open(sys.argv[1], 'ab'); starts.write(b'.'); starts.flush()"
    script.write_text(f"import os, signal, sys\n{count}\nif starts.tell() <= {deaths}:\n    {how}\n{WORKER}")
    return [sys.executable, "-I", str(script), str(tmp_path / "starts")]


KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


async def test_a_worker_killed_while_it_starts_is_started_again(tmp_path: Path) -> None:
    async with WorkerPool(dying_at_start(tmp_path, 2, KILLED), size=1, words=WORDS) as pool:
        assert "pid" in await ask(pool, "pid")
        (tmp_path / "starts").write_bytes(b"")  # the next two die too, in the middle of a run
        with pytest.raises(WorkerDiedError):
            await ask(pool, "die")
        assert "pid" in await ask(pool, "pid")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (KILLED, r"3 in a row\), the last one: verification worker \(pid \d+\) was killed by SIGKILL; .*memory"),
        ("import no_such_package", "exited with code 1: ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)
async def test_workers_that_cannot_start_are_one_clear_line(tmp_path: Path, how: str, said: str) -> None:
    with pytest.raises(ProcessDiedError, match=said) as error:
        async with WorkerPool(dying_at_start(tmp_path, 3, how), size=1, words=WORDS):
            pass
    assert "\n" not in str(error.value)
    (tmp_path / "starts").unlink()
    working = dying_at_start(tmp_path, 0, how)
    async with WorkerPool(working, size=1, words=WORDS) as pool:
        with pytest.raises(WorkerDiedError):
            await ask(pool, "die")
        dying_at_start(tmp_path, 99, how)
        with pytest.raises(ProcessDiedError, match=said):  # not taken for a death at an answer
            await ask(pool, "pid")


async def test_a_start_slower_than_its_deadline_speaks_at_last(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    slow = dying_at_start(tmp_path, 0, KILLED)
    async with WorkerPool(slow, size=1, words=WORDS) as pool:
        with pytest.raises(WorkerDiedError):
            await ask(pool, "die")
        dying_at_start(tmp_path, 99, "import time; time.sleep(600)")
        for _ in range(2):
            with pytest.raises(DeadlineExceededError):
                await ask(pool, "pid", deadline=loop.time() + 0.1)
        with pytest.raises(ProcessDiedError, match=r"do not start .* not ready in time"):
            await ask(pool, "pid", deadline=loop.time() + 0.1)


async def test_workers_that_only_die_at_their_answers_end_the_pool(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "DEATHS_IN_A_ROW", 3)

    async def death(pool: WorkerPool) -> type[BaseException]:
        with pytest.raises(ProcessDiedError) as died:
            await ask(pool, "die")
        return died.type

    async with WorkerPool(command, size=1, words=WORDS) as pool:
        assert [await death(pool) for _ in range(2)] == [WorkerDiedError] * 2
        assert "pid" in await ask(pool, "pid")  # a reply begins a new row
        assert [await death(pool) for _ in range(3)] == [WorkerDiedError, WorkerDiedError, ProcessDiedError]


async def test_workers_do_not_see_keys(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    async with WorkerPool(command, size=1, words=WORDS) as pool:
        assert "OPENAI_API_KEY" not in (await ask(pool, "environment"))["environment"]


# Math-Verify itself


Judge = Callable[[str, str], Awaitable[Verdict]]


@asynccontextmanager
async def math_verify(**settings: Any) -> AsyncIterator[Judge]:
    async with MathVerify(MathVerify.Settings(**settings)) as verifier:

        async def judge(gold: str, text: str) -> Verdict:
            return await verifier.verify(Problem(id="p", text="", answer=gold), text, deadline=FAR)

        yield judge


CORRECT = [  # equal mathematics, then Math-Verify's leniencies, kept for comparable figures
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", r"\frac{2}{4}"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)"),
    (r"1 \le x \le 2", "[1,2]"),
    ("4.5e33", r"4.5 \times 10^{33} \text{ erg/s}"),
    ("2.88e-19", r"2.88 \times 10^{-19} \mathrm{~J}"),
    (r"3 \times 10^5", r"300000 \text{ J}"),
    ("50", r"50\%"),
    ("0.5", r"50\%"),
    (r"90^\circ", "90"),
    (r"6\text{ PM}", "6"),
    ("1,2", "(2,1)"),
    (r"\{1,2\}", "2, 1"),
    ("5", "y=5"),
    (r"\text{C}", "c"),
    (r"\$36", "36"),
    ("43_5", "43"),
    ("43_5", "43_7"),
    ("3", r"3\text{ millions}"),
    ("3", r"\neg 3"),
    ("(1,2)", r"\{1,2\}"),
    (r"40\text{ a}, 60\text{ b}", r"40\text{ a}, 50\text{ b}"),
]
WRONG = [
    (r"\frac{1}{3}", "0.333"),
    (r"\pi", "3.14159"),
    ("x=5", "y=5"),
    ("2.88e-19", "5.76e-19"),
    ("2.88e-19", r"5.76 \times 10^{-19} \mathrm{~J}"),  # Math-Verify rounds both to 0
    ("x=10^{-400}", r"x=2\cdot10^{-400}"),
    ("1.234", "1,234"),
    ("[1,2]", r"1 \le x \le 2"),  # not symmetric
    ("x", r"\frac{}"),
    ("5", "\x00\u200b\ud800"),
    ("5", r"\frac{1}{0}"),
    ("5", "not mathematics at all"),
    ("5", r"\text{The answer is $5$, not } 6"),
]


async def test_math_verify_judges_as_math_verify_does() -> None:
    async with math_verify(workers=1) as judge:
        for gold, answer in CORRECT:
            assert await judge(gold, rf"\boxed{{{answer}}}") is Verdict.CORRECT, (gold, answer)
        for gold, answer in WRONG:
            assert await judge(gold, rf"\boxed{{{answer}}}") is Verdict.WRONG, (gold, answer)
        # one box counts, the last; text outside boxes never does
        assert await judge("5", r"\boxed{3}, \boxed{5}") is Verdict.CORRECT
        assert await judge(r"\{3,5\}", r"\boxed{3}, \boxed{5}") is Verdict.WRONG
        assert await judge("5", r"We have $x=5$. The answer is \boxed{}.") is Verdict.NO_ANSWER
        assert await judge("5", "The final answer is $5$.") is Verdict.NO_ANSWER


async def test_a_relative_tolerance_is_kept_whatever_the_spelling() -> None:
    near = [("4.5e33", r"4.52 \times 10^{33} \text{ erg/s}"), ("4.5e33", "4.52e33"), (r"\frac{1}{3}", "0.333")]
    far = [
        ("4.5e33", r"4.6 \times 10^{33} \text{ erg/s}"),
        ("4.5e33", "4.6e33"),
        ("x", "y"),
        ("(1,2)", "(1,2.001)"),
        ("4.5", "x>4.501"),
    ]
    async with math_verify(workers=1, relative_tolerance=0.01, timeout_s=20.0) as judge:
        assert [await judge(gold, rf"\boxed{{{answer}}}") for gold, answer in near] == [Verdict.CORRECT] * 3
        assert [await judge(gold, rf"\boxed{{{answer}}}") for gold, answer in far] == [Verdict.WRONG] * 5


@pytest.mark.long
async def test_a_hostile_answer_times_out_while_the_loop_runs_on() -> None:
    async with math_verify(workers=1, timeout_s=2.0) as judge:
        judging, turns = asyncio.create_task(judge("5", HOSTILE)), 0
        while not judging.done():
            await asyncio.sleep(0.01)
            turns += 1
        assert await judging is Verdict.TIMEOUT
        assert turns > 10  # of 200; a loop that waits with the worker has one or two
    async with math_verify(workers=1, timeout_s=20.0) as judge:
        assert await judge("5", r"\boxed{\frac{10}{2}}") is Verdict.CORRECT


@pytest.mark.long
@needs_proc
async def test_hostile_answers_are_never_right_and_leave_nothing_behind(tmp_path: Path) -> None:
    code = f"__import__('pathlib').Path('{tmp_path}/hacked').touch()"
    nested = r"\frac{1}{1+" * 20 + "x" + "}" * 20
    before = children()
    async with math_verify(workers=1, timeout_s=3.0) as judge:
        for text in (
            code,
            nested,
            "9" * 100_000,
            "{" * 100_000,
            "5\x00",
            "\ud800 5",
            r"\left[x",
            r"\sum_{n=1}^{10^9} n^n",
        ):
            assert await judge("7", rf"\boxed{{{text}}}") is not Verdict.CORRECT, text[:40]
        assert await judge("7", r"\boxed{7.0}") is Verdict.CORRECT  # it still judges
    assert children() == before
    assert not os.listdir(tmp_path)  # noqa: PTH208 - an asynchronous function


@needs_proc
async def test_a_killed_worker_is_an_error_and_the_next_answer_is_judged() -> None:
    before = children()
    async with math_verify(workers=1, timeout_s=30.0) as judge:
        (pid,) = children() - before
        judging = asyncio.create_task(judge("5", HOSTILE))
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        assert await judging is Verdict.ERROR
        assert await judge("5", r"\boxed{\frac{10}{2}}") is Verdict.CORRECT
    assert children() == before


def address_space_limits(pid: int) -> list[str]:
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return next(line.split()[3:5] for line in lines if line.startswith("Max address space"))


@needs_proc
async def test_a_worker_has_a_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 256 << 20
    monkeypatch.setattr("spot_async.verification.math_verify.MEMORY_LIMIT_BYTES", limit)
    before = children()
    async with math_verify(workers=1, timeout_s=20.0) as judge:
        (pid,) = children() - before
        assert address_space_limits(pid) == [str(limit), str(limit)]
        # 125 MB a number and twice that to square it: out of memory, which is no verdict CORRECT and harms nobody else
        assert await judge("5", r"\boxed{2^{1000000000}}") in (Verdict.WRONG, Verdict.ERROR, Verdict.TIMEOUT)
        assert await judge("5", r"\boxed{\frac{10}{2}}") is Verdict.CORRECT


PARENT = r"""
import asyncio
from spot_async.types import Problem
from spot_async.verification import MathVerify

async def main():
    async with MathVerify(MathVerify.Settings(workers=1, timeout_s=600)) as verifier:
        (worker,) = verifier._pool._workers
        print(worker._process.pid, flush=True)
        await verifier.verify(Problem(id="p", text="", answer="5"), r"\boxed{9^{9^{9^{9}}}}", deadline=1e9)

asyncio.run(main())
"""


@needs_proc
async def test_a_busy_worker_dies_with_its_parent() -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    worker = int(await parent.stdout.readline())
    await asyncio.sleep(0.3)  # the hostile answer is on its way
    assert is_running(worker)
    parent.kill()
    await parent.wait()
    await until(lambda: not is_running(worker))


def sample(name: str, size: int) -> list[dict[str, Any]]:
    with gzip.open(DATA / name, "rt") as lines:
        found = [json.loads(line) for line in lines]
    return random.Random(0).sample(found, min(size, len(found)))


@pytest.mark.long
@needs_data
async def test_real_golds_equal_themselves_also_when_they_are_parsed() -> None:
    names = ["math500", "math_train", "minerva_math", "hmmt25"]
    golds = [row["answer"] for name in names for row in sample(f"canonical/{name}.jsonl.gz", 60)]
    golds = [gold for gold in golds if parse_number(gold) is None]  # numbers never reach a parser
    assert len(golds) > 70
    async with math_verify(workers=2) as judge:
        # quotation marks keep equal normal forms from deciding it before Math-Verify has parsed both
        verdicts = await asyncio.gather(*(judge(gold, rf'\boxed{{"{gold}"}}') for gold in golds))
    assert [gold for gold, verdict in zip(golds, verdicts, strict=True) if verdict is not Verdict.CORRECT] == []


@needs_data
async def test_real_labels_agree_also_where_no_graders_box_was_given() -> None:
    graded = [row for row in sample("graded/graded.jsonl.gz", 1000) if not row["label_kind"].startswith("HardVerify")]
    async with math_verify(workers=2) as judge:
        # GSM8K's responses end in `A: 80`: what the label's grader took out of them is put into a box
        texts = [row["response"] if "boxed" in row["response"] else rf"\boxed{{{row['pred']}}}" for row in graded]
        verdicts = await asyncio.gather(*(judge(row["gold"], text) for row, text in zip(graded, texts, strict=True)))
    differing = [
        row["label_kind"].partition(" ")[0]
        for row, verdict in zip(graded, verdicts, strict=True)
        if (verdict is Verdict.CORRECT) != row["label"]
    ]
    same = [
        (verdict is Verdict.CORRECT) == row["math_verify_090"] for row, verdict in zip(graded, verdicts, strict=True)
    ]
    assert len(graded) == 500
    assert sum(same) >= 499
    assert differing in ([], ["machine:"])  # at least 299 of 300, and all 200 of GSM8K
