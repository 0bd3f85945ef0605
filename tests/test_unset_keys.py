"""Keys that nothing which ships sets: their number only falls (`python tests/support/unset_keys.py` names them)."""

from __future__ import annotations

import pytest
import unset_keys
from generated_docs import every_key

MOST_UNSET = 161
MOST_KEYS = 400  # each where it stands, and once for each kind of plug-in: the page has fewer rows


def test_few_keys_are_set_by_nothing_that_ships() -> None:
    assert len(unset_keys.unset()) <= MOST_UNSET
    assert len(list(every_key())) <= MOST_KEYS


@pytest.mark.parametrize(
    ("text", "kind", "key"),
    [
        ("teachers: {math: {weight: 2}}", "", "teacher.weight"),
        ("evaluation: {benchmarks: {AMC: {verifier: {kind: http, url: u}}}}", "http", "url"),
        ("data: {train: [{path: x}, {path: y, share: 1}]}", "", "data.train.share"),
        ("student: {backend: {kind: vllm, launch: [{python: p}]}}", "vllm", "launch.python"),
        ("student: {backend: {launch: {python: p}}}", "*", "launch.python"),
        ("reference: {backend: local}", "", "student.backend"),
    ],
)
def test_a_key_counts_as_set_where_a_file_has_it(text: str, kind: str, key: str) -> None:
    assert (kind, key) in set(unset_keys.leaves(unset_keys.plain(text)))
