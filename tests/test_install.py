"""What `make quickstart` and `make test` install, by whom, and how many tests run at a time."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from workers import BYTES_OF_ONE, workers

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def install() -> ModuleType:
    loader = SourceFileLoader("install", str(ROOT / ".ci" / "install"))
    spec = importlib.util.spec_from_loader("install", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_uv_is_given_what_pip_is_configured_with_and_the_environment_wins(install, tmp_path, monkeypatch):
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://first.example/simple\nextra-index-url =\n    https://a.example\n"
        "    https://b.example\nfind-links = /none\nconstraint = /etc/them.txt\ntrusted-host = c.example\n"
        "[install]\ntrusted-host = a.example\n"
    )
    for name in [each for each in os.environ if each.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    words, variables = install.by_uv(["--editable", "."], "https://cpu.example")
    assert {
        ("--find-links", "/none"), ("--constraint", "/etc/them.txt"), ("--allow-insecure-host", "a.example"),
        ("--python", sys.executable), ("--editable", "."),
    } <= set(itertools.pairwise(words))  # fmt: skip
    assert "c.example" not in words
    assert not any("https:" in each for each in words)  # addresses may hold a password, and `ps` shows words
    assert variables["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    assert variables["UV_INDEX"] == "https://a.example https://b.example https://cpu.example"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://own.example")
    monkeypatch.setenv("UV_INDEX", "https://mine.example")
    _, variables = install.by_uv([], "")
    assert variables["UV_DEFAULT_INDEX"] == "https://own.example"
    assert variables["UV_INDEX"] == "https://mine.example https://a.example https://b.example"


@pytest.mark.parametrize(
    ("own", "expected"),
    [([], ["uv", "pip"]), ([("no-index", "1")], ["pip"]), ([("proxy", "http://p")], ["pip"])],
)
def test_pip_installs_where_uv_fails_or_does_not_know_what_pip_is_told(install, monkeypatch, own, expected):
    asked = []

    def run(command, **_):
        asked.append("uv" if command[0] == "uv" else "pip")
        return subprocess.CompletedProcess(command, returncode=int(command[0] == "uv"))

    monkeypatch.setattr(install, "pips_own", lambda: iter(own))
    monkeypatch.setattr(install.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(install.subprocess, "run", run)
    monkeypatch.setattr(install.compileall, "compile_dir", lambda *_, **__: True)
    monkeypatch.setattr(sys, "argv", ["install"])
    assert install.main() == 0
    assert asked == expected


def test_without_a_gpu_and_a_torch_it_says_how_to_take_the_build_for_cpus(install, monkeypatch, capsys):
    monkeypatch.setattr(install, "GPUS", ())
    monkeypatch.setattr(install.importlib.metadata, "distributions", lambda: iter(()))
    monkeypatch.setattr(install.shutil, "which", lambda name: None)
    done = subprocess.CompletedProcess([], returncode=0, stdout="")
    monkeypatch.setattr(install.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(install.compileall, "compile_dir", lambda *_, **__: True)
    monkeypatch.setattr(sys, "argv", ["install"])
    for index, is_said in (("", True), ("https://cpu.example", False)):
        monkeypatch.setenv("TORCH_INDEX", index)
        assert install.main() == 0
        assert ("TORCH_INDEX=https://download.pytorch.org/whl/cpu" in capsys.readouterr().err) == is_said


def test_tests_add_to_an_installed_checkout_only_what_they_need_and_install_all_where_there_is_none(
    install, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    whole = ["--editable", f"{ROOT}[dev]"]
    assert install.wanted(None) == ["--editable", str(ROOT)]
    assert install.wanted("dev") == whole
    mark = tmp_path / "core"
    mark.touch()
    added = install.wanted("dev")
    assert any(each.startswith("pytest>") for each in added)
    assert "--editable" not in added
    os.utime(mark, (0, 0))  # older than pyproject.toml
    assert install.wanted("dev") == whole


@pytest.mark.parametrize(
    ("given", "cores", "free_bytes", "expected"),
    [("", 8, 99 << 30, 9), ("", 8, 3 * BYTES_OF_ONE + 1, 3), ("", 2, 1 << 20, 1), ("5", 2, 1 << 20, 5)],
)
def test_one_test_more_than_cores_runs_at_a_time_where_memory_is_enough_unless_a_number_is_given(
    given, cores, free_bytes, expected
):
    assert workers(given, cores, free_bytes) == expected


@pytest.mark.parametrize("given", ["0", "many", "-1", "1.5"])
def test_what_is_no_number_of_tests_ends_make_test_in_one_line(given):
    done = subprocess.run(["make", "--dry-run", "test", f"WORKERS={given}"], cwd=ROOT, capture_output=True, text=True)
    assert f'workers.py "{given}"' in done.stdout
    said = subprocess.run(
        [sys.executable, ROOT / "tests" / "support" / "workers.py", given], capture_output=True, text=True
    )
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr == f"WORKERS={given}: give the number of tests at a time, 1 or more, or leave it out\n"
