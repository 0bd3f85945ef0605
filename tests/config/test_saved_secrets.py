"""A configuration with a key in it is refused, with the place and without the key, since it would be saved."""

from __future__ import annotations

from typing import Any

import pytest

from spot_async.config import Config
from spot_async.config.loading import config_from
from spot_async.config.suggestions import unknown_option
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
        *(
            ({"kind": "vllm", "launch": {"python": "p", "arguments": words}}, "backend.launch.arguments", "api_key_env")
            for words in (
                [f"--api-key {KEY}"],
                ["--hf-overrides", f'{{"auth": {{"api_key": "{KEY}"}}}}'],
                [f'--extra-config={{"password": "{KEY}"}}'],
                ["-H", f"Authorization: Basic {KEY}"],
                [f"--env=TEACHER_KEY={KEY}"],
            )
        ),
        (
            {"kind": "vllm", "launch": {"python": "p", "prefix": ["docker", "run", "-e", f"MY_KEY={KEY}", "image"]}},
            "backend.launch.prefix",
            "api_key_env",
        ),
        (
            {"kind": "vllm", "launch": {"python": "p", "environment": {"TEACHER_KEY": KEY}}},
            "backend.launch.environment.TEACHER_KEY",
            "pass_environment",
        ),
        (
            {"kind": "vllm", "launch": {"python": "p", "environment": {"STORE": f"redis://:{KEY}@h"}}},
            "backend.launch.environment.STORE",
            "pass_environment",
        ),
        ({"kind": "openai", "url": "http://h", "headers": {"X-Team-Key": KEY}}, "X-Team-Key", "secret_headers"),
        (
            {"kind": "openai", "url": "http://h", "request_fields": {"api_keys": [KEY]}},
            "backend.request_fields.api_keys",
            "api_key_env",
        ),
        (
            {"kind": "openai", "url": "http://h", "request_fields": {"password": 12345678}},
            "backend.request_fields.password",
            "api_key_env",
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


@pytest.mark.parametrize(
    "key", [KEY, LOOKS, "Basic bWU6cHc", "0123456789abcdef0123456789abcdef", "abcdef0123456789abcdef01"]
)
@pytest.mark.parametrize(
    ("form", "place"),
    [
        ("teacher.backend={{kind: openai, url: 'http://h', api_key_env: '{}'}}", "backend.api_key_env"),
        (
            "teacher.backend={{kind: openai, url: 'http://h', secret_headers: {{Authorization: '{}'}}}}",
            "backend.secret_headers.Authorization",
        ),
        (
            "teacher.backend={{kind: vllm, launch: {{python: p, pass_environment: ['{}']}}}}",
            "backend.launch.pass_environment",
        ),
    ],
)
def test_a_key_in_place_of_the_name_of_its_variable_is_refused_and_not_shown(form: str, place: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{place}: give the name of an environment variable") as caught:
        config_from(tree("teacher", {}), [form.format(key)])
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [f"teacher.backend.url=[http://me:{KEY}@h", f"training.iterations.api_key={KEY}", f"training.x.y=: {KEY}: ["],
)
def test_an_override_that_cannot_be_read_is_not_shown(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from(tree("teacher", {"kind": "openai"}), [override])
    assert KEY not in str(caught.value)


def test_an_option_that_is_none_of_ours_shows_no_key() -> None:
    assert KEY not in unknown_option("--api-key", KEY, Config)
    assert LOOKS not in unknown_option("--teacher.model", LOOKS, Config)


def test_names_of_variables_and_other_tokens_are_no_secrets() -> None:
    backend = {
        "kind": "vllm",
        "api_key_env": "TEACHER_KEY",
        "secret_headers": {"Authorization": "TEACHER_BASIC", "x-api-key": "OTHER_KEY"},
        "launch": {"python": "p", "arguments": ["--max-num-batched-tokens", "4096"], "pass_environment": ["HF_TOKEN"]},
    }
    assert config_from(tree("teacher", backend)).teacher is not None
