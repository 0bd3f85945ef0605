"""Settings of an endpoint: its address, and where its keys are, but never a secret itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spot_async.backends.openai.backend import OpenAIBackend
from spot_async.backends.sglang.backend import SglangBackend
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.config.loading import validate
from spot_async.errors import ConfigError

KEY = "sk-a-key-that-nobody-may-read"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"headers": {"Authorization": f"Bearer {KEY}"}}, "headers.Authorization: holds a secret"),
        ({"headers": {"x-api-key": KEY}}, "headers.x-api-key: holds a secret"),
        ({"proxy": f"http://user:{KEY}@proxy"}, "proxy: holds a secret"),
        ({"proxy": f"user:{KEY}@proxy:3128"}, "proxy: holds a secret"),
        ({"url": f"https://user:{KEY}@host"}, "url: holds a secret"),
    ],
)
def test_a_configuration_with_a_secret_in_it_is_refused_without_repeating_it(
    settings: dict[str, Any], said: str
) -> None:
    tree = {
        "student": {"model": "m"},
        "teacher": {"model": "m", "backend": {"kind": "openai", "url": "http://h"} | settings},
    }
    with pytest.raises(ConfigError, match=said) as caught:
        validate(tree)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("kind", ["openai", "vllm", "sglang"])
def test_an_address_that_cannot_be_one_is_refused_before_anything_is_sent(kind: str) -> None:
    wrong = [
        "", "localhost:8000", "10.0.0.5:8000", "ftp://h:1", "http://", "http://:8000", "http://h:99999", "http://h:0",
        "http://h:x", " http://h:1", "http://h :1", "http:///v1",
    ]  # fmt: skip
    for url in wrong:
        tree = {"student": {"model": "m"}, "teacher": {"model": "m", "backend": {"kind": kind, "url": url}}}
        with pytest.raises(ConfigError, match=r"teacher\.backend\.\S*url.*give http://host:port"):
            validate(tree)
    with pytest.raises(ConfigError, match="give http://host:port"):
        validate({"student": {"model": "m", "backend": {"kind": kind, "url": "http://h", "proxy": "proxy:99999"}}})


@pytest.mark.parametrize("settings", [OpenAIBackend.Settings, VllmBackend.Settings, SglangBackend.Settings])
def test_an_address_may_end_in_the_version_of_the_api_whatever_the_server(settings: Any) -> None:
    for given, used in (
        ("http://10.0.0.5:8000", "http://10.0.0.5:8000"),
        ("https://[::1]:8000/", "https://[::1]:8000/"),
        ("http://h/v1", "http://h"),
        ("http://h:1/inference/v1/", "http://h:1/inference"),
    ):
        assert settings(url=given, proxy="proxy.example:3128").url == used


@pytest.mark.parametrize(
    ("value", "said"), [(None, "is not set"), (" ", "is not set"), ("a\x01b", "holds what no header can carry")]
)
async def test_a_key_that_is_not_there_or_cannot_be_sent_is_named_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, random_model: Callable[..., Path], tmp_path: Path, value: str | None, said: str
) -> None:
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("TEACHER_KEY", value)
    settings = OpenAIBackend.Settings(url="http://127.0.0.1:9", api_key_env="TEACHER_KEY")
    backend = OpenAIBackend(settings, role="teacher", model=str(random_model()), run_directory=tmp_path)
    with pytest.raises(ConfigError, match=rf"teacher\.backend: the environment variable TEACHER_KEY .*{said}"):
        async with backend:
            pass
