r"""Holds graders of mathematics beside each other: what they take for a gold, and what they should not.

Pairs of gold and response are made from benchmark rows by class: another spelling is right, another answer is wrong.
With `--graded` there are rows that others have graded, and with `--pairs` pairs of `gold`, `response` and `right`.
Peers run in environments of their own: `--peer trl=ENVIRONMENT/bin/python` (lighteval, lm_eval, trl, verl).

    python benchmarks/graders.py ../shared/data/canonical/*.jsonl.gz --graded ../shared/data/graded/graded.jsonl.gz
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from report import show

from spot_async.base import registry
from spot_async.types import Problem, Verdict

OURS = ("math", "math_verify", "boxed_match")
PEER = Path(__file__).with_name("graders_peer.py")
INTEGER = re.compile(r"-?[0-9]+")
FRACTION = re.compile(r"\\frac\{([0-9]+)\}\{([0-9]+)\}")
PAIR = re.compile(r"(?:\\left)?\s*\(([^(),]+),([^(),]+?)(?:\\right)?\s*\)")
INTERVAL = re.compile(r"([(\[])(-?[0-9]+),\s*(-?[0-9]+)([)\]])")
BASED = re.compile(r"([0-9]+)_\{?([0-9])\}?")
LIST = re.compile(r"(-?[0-9]+),\s*(-?[0-9]+)")


class Pair(NamedTuple):
    kind: str
    gold: str
    response: str
    right: bool


def read_rows(path: str) -> list[dict[str, Any]]:
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def pairs_of(gold: str) -> Iterator[Pair]:
    """Yield a pair for each class that has an answer to this gold."""
    for kind, answer in _spellings(gold):
        yield Pair(kind, gold, rf"So the answer is \boxed{{{answer}}}.", right=True)
    for kind, answer in _changes(gold):
        yield Pair(kind, gold, rf"So the answer is \boxed{{{answer}}}.", right=False)
    yield Pair("a reminder of the format", gold, rf"\boxed{{{gold}}} (format: \boxed{{answer}})", right=True)
    yield Pair("thinking cut off", gold, rf"<think> Perhaps \boxed{{{gold}}}? Let me", right=False)
    if match := LIST.fullmatch(gold):
        yield Pair("boxes that are a set", gold, rf"\boxed{{{match[2]}}} and \boxed{{{match[1]}}}", right=True)
    if INTEGER.fullmatch(gold):
        for kind, told, answer in _with_more(gold):
            yield Pair(kind, told, rf"So the answer is \boxed{{{answer}}}.", right=False)
        yield Pair("a letter elsewhere", rf"\frac{{{gold}}}{{m}}t", rf"\boxed{{\frac{{{gold}t}}{{m}}}}", right=True)
        yield Pair("Python", f"{gold}./7", rf"\boxed{{\frac{{{gold}}}{{7}}}}", right=True)


def _spellings(gold: str) -> Iterator[tuple[str, str]]:
    yield "bold type", rf"\mathbf{{{gold}}}" if INTEGER.fullmatch(gold) else rf"\boldsymbol{{{gold}}}"
    if INTEGER.fullmatch(gold) and len(gold.lstrip("-")) > 3:
        yield "digits in groups", re.sub(r"(?<=[0-9])(?=(?:[0-9]{3})+\Z)", r"\\ ", gold)
    if "." in gold and "e" not in gold and re.fullmatch(r"[0-9.]+", gold):
        yield "rounded", rf"\approx {gold}"
    if match := re.fullmatch(r"([0-9.]+)e(-?[0-9]+)", gold):
        yield "powers of ten", rf"{match[1]} \times 10^{{{match[2]}}}"
    if match := FRACTION.fullmatch(gold):
        yield "fractions", rf"{match[1]}/{match[2]}"
    if r"\circ" in gold:
        yield "degrees", re.sub(r"\^\{?\\circ\}?", r"\\degree", gold)
    if gold.endswith(r"\%"):
        yield "per cent", gold.replace(r"\%", r"\,\%")
    if match := PAIR.fullmatch(gold):
        yield "brackets", rf"\bigl({match[1]},\;{match[2]}\bigr)"
    if match := INTERVAL.fullmatch(gold):
        low, high = ("<" if match[1] == "(" else r"\le"), ("<" if match[4] == ")" else r"\le")
        yield "relations for intervals", f"{match[2]}{low} x{high} {match[3]}"
    if match := LIST.fullmatch(gold):
        yield "lists in another order", f"{match[2]}, {match[1]}"
    if match := re.fullmatch(r"(.+?)\\text\s*\{\s*([a-z]+)\s*\}", gold):
        yield "units", rf"{match[1]}\,\mathrm{{{match[2]}}}"


def _changes(gold: str) -> Iterator[tuple[str, str]]:
    if digits := list(re.finditer("[0-9]", gold)):
        at = digits[-1].start()
        yield "another digit", f"{gold[:at]}{(int(gold[at]) + 1) % 10}{gold[at + 1 :]}"
    if INTEGER.fullmatch(gold):
        yield "a base", rf"{gold}_{{7}}"
        yield "words that change it", rf"{gold}\text{{ million}}"
        yield "relations that are no value", rf"\neq {gold}"
        yield "two numbers", rf"{gold[:2]} \quad {gold[2:] or 1}"
    if match := BASED.fullmatch(gold):
        yield "a base", f"{match[1]}_{int(match[2]) + 1}"
    if match := PAIR.fullmatch(gold):
        yield "pairs as sets", rf"\{{{match[1]},{match[2]}\}}"
        if match[1].strip() != match[2].strip():
            yield "pairs turned round", f"({match[2]},{match[1]})"
    if match := INTERVAL.fullmatch(gold):
        yield "other ends", f"{'(['[match[1] == '(']}{match[2]},{match[3]}{match[4]}"


def _with_more(gold: str) -> Iterator[tuple[str, str, str]]:
    """Yield golds with a part that graders overlook, and answers that differ in it."""
    yield "behind the first unit", rf"{gold}\text{{ a}}, 60\text{{ b}}", rf"{gold}\text{{ a}}, 50\text{{ b}}"
    yield "an equation's right side", f"x + y + z = {gold}", gold
    yield "powers of units", rf"{gold}\text{{ cm}}^2", rf"{gold}\text{{ cm}}^4"
    if int(gold):
        yield "letters as units", f"{gold}t", gold
    yield "no TeX", f"x ≥ {gold}<sup>2</sup>", gold


async def our_verdicts(kind: str, pairs: Sequence[Pair]) -> list[bool]:
    verifier = registry.load("verifiers", kind)
    found: list[bool] = []
    async with verifier(verifier.Settings()) as judge:
        for pair in pairs:
            problem = Problem(id="pair", text="", answer=pair.gold)
            found.append(await judge.verify(problem, pair.response, deadline=float("inf")) is Verdict.CORRECT)
    return found


def peer_verdicts(name: str, python: str, pairs: Sequence[Pair]) -> list[bool]:
    lines = "".join(json.dumps([pair.gold, pair.response]) + "\n" for pair in pairs)
    done = subprocess.run([python, str(PEER), name], input=lines, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr.strip()[-500:]}")
    return [bool(json.loads(line)) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", help="JSONL, also gzipped, with `answer`")
    parser.add_argument("--golds", type=int, default=150, help="golds of each file, evenly taken")
    parser.add_argument("--graded", default="", help="JSONL with gold, response (or pred) and label")
    parser.add_argument("--pairs", default="", help="JSONL with gold, response and right")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    chosen = parser.parse_args()
    pairs = []
    for path in chosen.rows:
        golds = list(dict.fromkeys(row["answer"].strip() for row in read_rows(path)))
        pairs += [pair for gold in golds[:: max(1, len(golds) // chosen.golds)] if gold for pair in pairs_of(gold)]
    for row in read_rows(chosen.pairs) if chosen.pairs else ():
        if row.get("verifier", "math_verify") != "multiple_choice":
            pairs.append(Pair("given pairs", row["gold"], row["response"], row["right"] == "correct"))
    for row in read_rows(chosen.graded) if chosen.graded else ():
        response = row["response"] or rf"\boxed{{{row['pred']}}}"
        pairs.append(Pair("graded by others", row["gold"], response, bool(row["label"])))
    verdicts = {kind: asyncio.run(our_verdicts(kind, pairs)) for kind in OURS}
    verdicts |= {
        name: peer_verdicts(name, python, pairs) for name, _, python in (p.partition("=") for p in chosen.peer)
    }
    by_kind: dict[tuple[bool, str], list[int]] = defaultdict(list)
    for number, pair in enumerate(pairs):
        by_kind[pair.right, pair.kind].append(number)
    rows = [
        [f"{kind}{'' if right else ', wrong'}", str(len(numbers)),
         *(str(sum(found[number] is not right for number in numbers) or "") for found in verdicts.values())]
        for (right, kind), numbers in sorted(by_kind.items(), key=lambda item: (not item[0][0], item[0][1]))
    ]  # fmt: skip
    for title, right in (("false negatives", True), ("false positives", False)):
        of = [number for number, pair in enumerate(pairs) if pair.right is right]
        rows.append(
            [title, str(len(of)), *(str(sum(found[n] is not right for n in of)) for found in verdicts.values())]
        )
    agree = [sum(map(lambda a, b: a is b.right, found, pairs)) / len(pairs) for found in verdicts.values()]
    rows.append(["agreement", str(len(pairs)), *(f"{100 * share:.1f} %" for share in agree)])
    show("graders: verdicts that are not right, by class", ("class", "n", *verdicts), rows)


if __name__ == "__main__":
    main()
