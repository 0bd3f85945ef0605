"""A configuration with a key in it is refused, with the place and without the key, since it would be saved."""

from __future__ import annotations

from typing import Any

import pytest

from spot_async.config.loading import config_from
from spot_async.errors import ConfigError

KEY = "0123456789-planted-key"
LOOKS = "sk-proj-0123456789abcdefghij"


def tree(role: str, backend: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "student": {"model": "s"},
        "teacher": {"model": "t"},
        "data": {"train": "p.jsonl"},
        "policy": {"kind": "opd"},
        "training": {"iterations": 1},
    }
    found[role] = {**found[role], "backend": backend}
    return found


@pytest.mark.parametrize("role", ["student", "teacher"])
@pytest.mark.parametrize(
    ("backend", "key", "advice"),
    [
        ({"kind": "openai", "url": f"http://me:{KEY}@h/v1"}, "backend.url", "api_key_env"),
        ({"kind": "openai", "url": f"http://h/v1?api_key={KEY}"}, "backend.url", "api_key_env"),
        ({"kind": "openai", "url": [f"http://h/v1?x=1&access-token={KEY}"]}, "backend.url", "api_key_env"),
        ({"kind": "openai", "url": "http://h", "api_key": KEY}, "backend.api_key", "api_key_env"),
        ({"kind": "openai", "url": "http://h", "proxy": f"http://me:{KEY}@p:1"}, "backend.proxy", "HTTPS_PROXY"),
        ({"kind": "openai", "url": "http://h", "headers": {"X-Auth-Token": KEY}}, "X-Auth-Token", "secret_headers"),
        ({"kind": "openai", "url": "http://h", "headers": {"X-Mine": f"Bearer {KEY}"}}, "X-Mine", "secret_headers"),
        (
            {"kind": "openai", "url": "http://h", "request_fields": {"extra": {"api_key": KEY}}},
            "backend.request_fields.extra.api_key",
            "api_key_env",
        ),
        (
            {"kind": "openai", "url": "http://h", "request_fields": {"user": LOOKS}},
            "backend.request_fields.user",
            "api_key_env",
        ),
        (
            {"kind": "vllm", "launch": {"python": "p", "arguments": ["--api-key", KEY]}},
            "backend.launch.arguments",
            "api_key_env",
        ),
        (
            {"kind": "sglang", "launch": {"python": "p", "arguments": [f"--admin-api-key={KEY}"]}},
            "backend.launch.arguments",
            "api_key_env",
        ),
        (
            {"kind": "sglang", "launch": [{"python": "p", "environment": {"HF_TOKEN": KEY}}]},
            "backend.launch.environment.HF_TOKEN",
            "pass_environment",
        ),
        (
            {"kind": "vllm", "launch": {"python": "p", "prefix": ["env", LOOKS]}},
            "backend.launch.prefix",
            "api_key_env",
        ),
    ],
)
def test_a_key_in_the_configuration_is_refused_where_it_stands_and_not_shown(
    role: str, backend: dict[str, Any], key: str, advice: str
) -> None:
    for make in (
        lambda: config_from(tree(role, backend)),
        lambda: config_from(tree(role, {}), [f"{role}.backend={backend}"]),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        found = [
            line for line in str(caught.value).split("\n") if key in line and "would be saved with the run" in line
        ]
        assert found
        assert advice in found[0]
        assert KEY not in str(caught.value)
        assert LOOKS not in str(caught.value)


def test_names_of_variables_and_other_tokens_are_no_secrets() -> None:
    backend = {
        "kind": "vllm",
        "api_key_env": "TEACHER_KEY",
        "secret_headers": {"Authorization": "TEACHER_BASIC", "x-api-key": "OTHER_KEY"},
        "launch": {"python": "p", "arguments": ["--max-num-batched-tokens", "4096"], "pass_environment": ["HF_TOKEN"]},
    }
    assert config_from(tree("teacher", backend)).teacher is not None
