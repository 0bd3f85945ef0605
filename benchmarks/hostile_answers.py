r"""Attacks the evaluation verifier with 190 answers that were written to hold it up, fill its memory or break it.

Each goes through `MathMatch.verify` as a model's response would, several at a time. The benchmark fails if a call
raises or ends after its deadline, if a worker process is left, or if one was larger than its limit. `timeout` and
`error` are missing evidence, never a reward.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from report import show

from spot_async.types import Problem, Verdict
from spot_async.verification import MathMatch
from spot_async.verification.math_verify import MEMORY_LIMIT_BYTES


class HostileAnswer(NamedTuple):
    kind: str
    gold: str
    response: str


def hostile_answers() -> list[HostileAnswer]:
    """Return 19 kinds of answers, ten of each, the same in every process."""
    return [
        HostileAnswer(kind, gold, text if "boxed" in text else rf"The answer is \boxed{{{text}}}.")
        for kind, gold, texts in _kinds()
        for text in texts
    ]


def _nested(opening: str, inner: str, closing: str, depth: int) -> str:
    return opening * depth + inner + closing * depth


def _kinds() -> Iterator[tuple[str, str, list[str]]]:
    ten = range(1, 11)
    yield "towers of powers", "5", [_nested("9^{", "9", "}", n + 1) for n in ten]
    yield "towers against a tower", "9^{9^{9}}", [_nested(f"{n + 1}^{{", "8", "}", 3) for n in ten]
    yield "huge powers", "5", [f"{n + 1}^{{{10**n}}}+1" for n in ten]
    yield "factorials", "5", [_nested("(", f"{n + 5}", ")!", 1 + n % 4) for n in ten]
    yield "huge digits", "5", ["9" * 4**n for n in ten]
    yield "functions of huge numbers", "5", [rf"\sin(10^{{10^{n}}})+\log(7^{{7^{n}}})" for n in ten]
    yield "nested fractions", r"\frac{1}{2}", [_nested(r"\frac{1}{1+", "x", "}", 4 * n) for n in ten]
    yield "nested roots", r"\sqrt{2}", [_nested(r"\sqrt{2+", "2", "}", 4 * n) for n in ten]
    yield "deep brackets", "5", [_nested("(", "5", ")", 4**n) for n in ten]
    yield "boxes that never close", "5", [r"\boxed{" * 4**n for n in ten]
    yield "megabytes of braces", "5", [_nested("{", r"\boxed{5", "}", 1 << 2 * n) for n in ten]
    yield "NULs and control characters", "5", [f"5{chr(n - 1)}" * n for n in ten]
    yield "lone surrogates", "5", [chr(0xD7FF + n * 200) + "5" * n for n in ten]
    yield "other scripts", "5", ["５", "½", "٥", "5\u200b", "\u202e5", "Ⅴ", "五", "5\u0301" * 50, "𝟓", "\ufeff5"]
    yield "unbalanced", "x", [
        r"\left(x", r"x\right)", r"\frac{x", r"\frac", r"x^", "_", r"\left[\left(x\right]", "$x", "}{",
        r"\begin{pmatrix} x",
    ]  # fmt: skip
    yield "code", "5", [
        '__import__("os").system("touch hacked")', "exec('x=1')", "lambda: 5", "(lambda f: f(f))(lambda f: f(f))",
        "5 if True else 6", "[x for x in range(10**9)]", "{{5}}", "${5}", "%s%n%x", "'; DROP TABLE answers; --",
    ]  # fmt: skip
    yield (
        "sums and integrals",
        "5",
        [
            *(rf"\sum_{{n=1}}^{{10^{n}}} \frac{{1}}{{n^n}}" for n in range(1, 6)),
            *(rf"\int_0^{{\infty}} \sin(x^{n}) e^{{-x^{n}}} \, dx" for n in range(1, 6)),
        ],
    )
    yield (
        "long expressions",
        "(x+1)^{2}",
        [
            *("+".join(f"x^{{{k}}}y" for k in range(n * 9)) for n in range(1, 6)),
            *(f"(x+y+z+1)^{{{10**n}}}" for n in range(1, 6)),
        ],
    )
    yield "undefined", "5", [
        r"\frac{1}{0}", r"\frac{0}{0}", r"0^{0}", r"\infty-\infty", r"\log(0)", r"\tan(\frac{\pi}{2})",
        r"\binom{1000000000}{500000000}", r"\lim_{x \to 0} \frac{\sin x}{x^9}", r"\sqrt[0]{5}", "5" + "!" * 30,
    ]  # fmt: skip


def children() -> set[int]:
    """Return this process's children, zombies included."""
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def resident_bytes(pid: int) -> int:
    """Return the largest resident size so far; 0 for a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), 0)


class Outcome(NamedTuple):
    answer: HostileAnswer
    verdict: Verdict
    wall_s: float


async def judge_all(settings: MathMatch.Settings, deadline_s: float) -> tuple[list[Outcome], int]:
    """Return all outcomes, and the largest resident size of a worker. Raises what `verify` raises."""
    outcomes: list[Outcome] = []
    largest = 0
    waiting = iter(hostile_answers())
    loop = asyncio.get_running_loop()

    async def work(verifier: MathMatch) -> None:
        for answer in waiting:
            start = loop.time()
            problem = Problem(id=answer.kind, text="", answer=answer.gold)
            verdict = await verifier.verify(problem, answer.response, deadline=start + deadline_s)
            outcomes.append(Outcome(answer, verdict, loop.time() - start))

    async def watch() -> None:
        nonlocal largest
        while True:
            largest = max(largest, *(resident_bytes(pid) for pid in children()), 0)
            await asyncio.sleep(0.02)

    async with MathMatch(settings) as verifier:
        watching = asyncio.create_task(watch())
        async with asyncio.TaskGroup() as group:
            for _ in range(settings.workers):
                group.create_task(work(verifier))
        watching.cancel()
    return outcomes, largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=5.0)
    parser.add_argument("--deadline-s", type=float, default=60.0, help="of one answer, the start of a worker included")
    chosen = parser.parse_args()
    settings = MathMatch.Settings(workers=chosen.workers, timeout_s=chosen.timeout_s)
    start = time.perf_counter()
    outcomes, largest = asyncio.run(judge_all(settings, chosen.deadline_s))
    wall_s = time.perf_counter() - start
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.answer.kind].append(outcome)
    rows = []
    for kind, found in [*by_kind.items(), ("all", outcomes)]:
        counts = Counter(outcome.verdict for outcome in found)
        longest = max(outcome.wall_s for outcome in found)
        rows.append([kind, str(len(found)), *(str(counts[verdict] or "") for verdict in Verdict), f"{longest:.1f}"])
    left = len(children())
    late = sum(outcome.wall_s > chosen.deadline_s for outcome in outcomes)
    show(
        f"hostile answers, {chosen.workers} workers, {chosen.timeout_s:g} s each",
        ("kind", "n", *Verdict, "longest s"),
        rows,
        [
            f"{wall_s:.0f} s; largest worker {largest / (1 << 20):.0f} MiB resident; {late} late; {left} workers left; "
            f"parent {resident_bytes(os.getpid()) / (1 << 20):.0f} MiB"
        ],
    )
    if late or left or largest > MEMORY_LIMIT_BYTES:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
