"""Keys are struck out of foreign text in every spelling, and children do not get them."""

from __future__ import annotations

import os
import string
import sys
import urllib.parse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from key_spellings import SPELLINGS, json_escaped

from spot_async.backends.shared.launch_settings import ProcessSettings
from spot_async.base.processes.child import ChildProcess
from spot_async.base.secrets import SECRETS, STRUCK, Secrets, looks_secret, names_secret
from spot_async.errors import ProcessDiedError

KEYS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=12, max_size=60)
AROUND = st.text(st.characters(codec="utf-8"), max_size=30)


def says(text: str, key: str) -> bool:
    """Return whether a text has eight characters of a key in a row, in any of the spellings."""
    low = "".join(text.lower().split())
    return any(
        "".join(spell(key[at : at + 8]).lower().split()) in low
        for spell in (str, json_escaped, lambda part: part.encode().hex(), urllib.parse.quote_plus)
        for at in range(len(key) - 7)
    )


@given(key=KEYS, before=AROUND, after=AROUND)
def test_a_key_is_struck_out_however_it_is_spelled(key: str, before: str, after: str) -> None:
    secrets = Secrets()
    secrets.learn(key)
    for spelling, spell in SPELLINGS.items():
        spelled = spell(key)
        shown = secrets.struck_text(f"{before} <{spelled}> {after}")
        assert STRUCK in shown, spelling
        assert spelled not in shown, spelling
        assert not says(shown, key) or says(f"{before}{after}", key), spelling


@given(key=KEYS, cut=st.integers(8, 11))
def test_a_key_that_is_cut_off_at_an_end_of_the_text_is_struck_out(key: str, cut: int) -> None:
    secrets = Secrets()
    secrets.learn(key)
    assert key[:cut].lower() not in secrets.struck_text(f"wrong key: {key[:cut]}").lower()
    assert key[-cut:].lower() not in secrets.struck_text(f"{key[-cut:]} is wrong").lower()


@given(key=st.text(string.ascii_letters + string.digits + "-_.~/+=", min_size=24, max_size=60), cut=st.integers(12, 23))
def test_a_long_part_of_a_key_is_struck_out_wherever_it_stands(key: str, cut: int) -> None:
    secrets = Secrets()
    secrets.learn(key)
    for part in (key[:cut], key[-cut:], key[6 : 6 + cut], key[:cut].encode().hex(), json_escaped(key[:cut])):
        said = f'{{"message": "wrong key {part} (cut)"}}'
        assert STRUCK in secrets.struck_text(said)


@given(said=st.text(max_size=200))
def test_a_text_without_a_key_stays_as_it_is(said: str) -> None:
    secrets = Secrets()
    secrets.learn("abcdefgh0123456789")
    said = said.encode(errors="replace").decode()
    assert secrets.struck_text(said) == said


def test_a_short_key_is_struck_out_only_as_it_stands_and_of_what_its_own_server_says() -> None:
    secrets = Secrets()
    secrets.learn("test")
    assert secrets.struck_text("a test") == "a test"
    assert secrets.struck(b"a test, t e s t, \\u0074est", [b"test"]) == b"a ***, t e s t, \\u0074est"


def test_an_environment_loses_keys_and_nothing_else() -> None:
    secrets = Secrets()
    secrets.learn("abc", "MY_SERVER")
    kept = {
        **{"PATH": "/bin", "TOKENIZERS_PARALLELISM": "false", "SSH_AUTH_SOCK": "/s", "HTTP_PROXY": "http://p:1"},
        **{"VLLM_MAX_TOKENS": "5", "SLURM_JOB_ID": "7", "HF_HOME": "/hf", "KUBECONFIG": "/k", "MONKEY": "1"},
    }
    lost = {
        **{"OPENAI_API_KEY": "1", "HF_TOKEN": "1", "AWS_SECRET_ACCESS_KEY": "1", "AWS_ACCESS_KEY_ID": "1"},
        **{"WANDB_API_KEY": "1", "DB_PASSWORD": "1", "SPOT_ASYNC_CLUSTER_SECRET": "1", "MY_SERVER": "abc"},
        **{
            "API_KEY_2": "1",
            "DATABASE_URL": "postgres://me:pw@h/d",
            "SLURM_JWT": "1",
            "SENTRY_DSN": "1",
            "PG_PASS": "1",
        },
        **{"https_proxy": "http://me:pw@p:1", "NOTE": "sk-abcdefghijklmnopqrstuvwx"},
    }
    del kept["MONKEY"]
    assert secrets.without_keys(kept | lost) == kept
    assert secrets.without_keys(kept | lost, keep=["HF_TOKEN"]) == kept | {"HF_TOKEN": "1"}


@pytest.mark.parametrize("name", ["api_key", "--api-key", "apiKey", "hf_token", "x-api-key", "password", "AccessToken"])
def test_names_of_secrets_are_known(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize(
    "name", ["pad_token", "eos_token", "max_tokens", "api_key_env", "tokenizer", "--max-total-tokens", "stop_token"]
)
def test_names_of_other_things_are_not_taken_for_secrets(name: str) -> None:
    assert not names_secret(name)


def test_keys_of_well_known_services_are_known_by_their_looks() -> None:
    assert looks_secret("--key=sk-proj-abcdefghijklmnopqrstuvwx")
    assert looks_secret("hf_abcdefghijklmnopqrstuvwxyz")
    assert not looks_secret("sk-learn and hf_transfer")


async def test_the_log_of_a_foreign_program_hides_secrets_and_has_colours_alone_of_what_terminals_obey(
    tmp_path: Path,
) -> None:
    key, other = "sk-of-this-server-0123", "token-that-is-passed-on"
    said = f"{key} {json_escaped(other)} \x1b[31mred\x1b[0m \x1b]52;c;AA==\x07 \x9b2J \u202e \x08 é\tend"
    program = [sys.executable, "-c", f"print({said!r})"]
    child = await ChildProcess.start_foreign("told", program, log_path=tmp_path / "log", secrets=[key, other])
    with pytest.raises(ProcessDiedError, match="exited with code 0"):
        await child.watch()
    lost = "\ufffd"
    shown = f"*** *** \x1b[31mred\x1b[0m {lost}]52;c;AA=={lost} {lost}2J {lost} {lost} é\tend\n"
    assert (tmp_path / "log").read_text() == shown


def test_a_variable_that_is_passed_on_and_holds_no_secret_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_CACHE", "/srv/cache-of-models")
    settings = ProcessSettings(python="python", pass_environment=["MODEL_CACHE"])
    assert settings.passed_environment("launch") == {"MODEL_CACHE": "/srv/cache-of-models"}
    assert SECRETS.without_keys(os.environ)["MODEL_CACHE"] == "/srv/cache-of-models"
    assert SECRETS.struck_text("in /srv/cache-of-models") == "in /srv/cache-of-models"
    assert settings.passed_secrets == []
