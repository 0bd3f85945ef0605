"""Runs the contract of backends as a user does: pytest with our plugin, in this process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

PACKAGE = "spot_async.testing.conformance"


class Outcome(NamedTuple):
    state: str  # passed, failed or skipped
    said: str  # what was found, or why it failed or was not asked
    nats: float


def run_contract(*options: str) -> tuple[int, dict[str, Outcome]]:
    """Return pytest's exit code, and what became of each check."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        words = ["-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "-o", "addopts="]
        words += ["-p", f"{PACKAGE}.plugin", "--pyargs", PACKAGE]
        code = pytest.main([*words, f"--junitxml={report}", *options])
        tests = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    return int(code), {test.attrib["name"].removeprefix("test_"): outcome_of(test) for test in tests}


def outcome_of(test: ElementTree.Element) -> Outcome:
    found = {each.attrib["name"]: each.attrib["value"] for each in test.iter("property")}
    for state, tag in (("failed", "failure"), ("failed", "error"), ("skipped", "skipped")):
        if (element := test.find(tag)) is not None:
            return Outcome(state, element.attrib["message"], 0.0)
    return Outcome("passed", found["note"], float(found.get("nats", 0.0)))
