"""Collects wheels for a machine without a network, and installs them there beside a Python that has torch.

    python benchmarks/gpu_proof/kit.py collect FOLDER [--python-version 3.12]
    python benchmarks/gpu_proof/kit.py install FOLDER ENVIRONMENT

Torch, transformers and what comes with them are the other machine's own. Nothing there is changed: the wheels go into a
virtual environment of their own, which sees that Python's packages, and takes only what is missing or too old there.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_BYTES = 60_000_000
# What the experiments import, with all that it needs. `datasets` and `pyarrow` are not among it: problems are in files.
PACKAGES = (
    *(
        "aiohappyeyeballs",
        "aiohttp",
        "aiosignal",
        "annotated-doc",
        "annotated-types",
        "antlr4-python3-runtime",
        "anyio",
    ),
    *("attrs", "certifi", "click", "execnet", "frozenlist", "h11", "httpcore", "httptools", "httpx"),
    *(
        "hypothesis",
        "idna",
        "iniconfig",
        "Jinja2",
        "latex2sympy2_extended",
        "markdown-it-py",
        "MarkupSafe",
        "math-verify",
    ),
    *("mdurl", "mpmath", "msgspec", "multidict", "packaging", "pluggy", "prometheus_client", "propcache", "pydantic"),
    *(
        "protobuf",
        "pydantic_core",
        "Pygments",
        "pytest",
        "pytest-asyncio",
        "PyYAML",
        "pyzmq",
        "rich",
        "setuptools",
        "shellingham",
    ),
    *(
        "sortedcontainers",
        "starlette",
        "structlog",
        "sympy",
        "tensorboardX",
        "typer",
        "typing-inspection",
        "typing_extensions",
    ),
    *("uvicorn", "yarl"),
)
FOR_TESTS = ("pytest", "pytest-asyncio", "hypothesis", "setuptools", "tensorboardX")
# The machine's own, and what they need.
TORCH_AND_MORE = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "regex", "tqdm")
# Needed by this project's metadata and by no experiment, so pip is not asked whether they are there.
LEFT_OUT = ("datasets", "pyarrow")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def pinned(constraints: str) -> list[str]:
    """Return the packages of the kit as constraints.txt pins them."""
    versions = dict(re.findall(r"^([\w.-]+)==(\S+)", constraints, flags=re.M))
    return [f"{name}=={versions[name]}" for name in PACKAGES]


def collect(folder: Path, python_version: str) -> None:
    """Download the wheels. Ends with one line if they are larger than a kit may be."""
    if folder.exists() and any(each.suffix != ".whl" for each in folder.iterdir()):
        raise SystemExit(f"{folder} holds more than wheels: name another folder")
    shutil.rmtree(folder, ignore_errors=True)
    wanted = pinned((ROOT / "constraints.txt").read_text())
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder)]
    if python_version != sysconfig.get_python_version():
        command += ["--python-version", python_version, "--implementation", "cp"]
        command += [word for each in PLATFORMS for word in ("--platform", each)]
    subprocess.run([*command, *wanted], check=True)
    size = kit_bytes(folder)
    if size > MOST_BYTES:
        raise SystemExit(f"{folder} has {size / 1e6:.0f} MB, and a kit may have {MOST_BYTES / 1e6:.0f}")
    sys.stdout.write(f"{folder}: {len(wanted)} wheels, {size / 1e6:.1f} MB, for Python {python_version}\n")


def kit_bytes(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.glob("*.whl"))


def install(folder: Path, environment: Path) -> None:
    """Make an environment that sees this Python's packages, and put what they lack into it."""
    if not list(folder.glob("*.whl")):
        raise SystemExit(f"KIT={folder} has no wheels: `make gpu-proof-kit KIT={folder}` collects them, with a network")
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    # `--system-site-packages` would show the packages of the Python that this one's own environment was made from.
    site = next((environment / "lib").glob("python*")) / "site-packages"
    library = Path(sysconfig.get_path("stdlib"))
    not_packages = {str(library), str(library / "lib-dynload")}
    own = [path for path in sys.path[1:] if path not in not_packages and Path(path).is_dir()]
    (site / "of_this_python.pth").write_text("\n".join(own) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    offline = ["--no-index", "--find-links", str(folder.absolute())]
    subprocess.run([*pip, *offline, *requirements(), *FOR_TESTS], check=True)
    subprocess.run([*pip, "--no-index", "--no-deps", "--no-build-isolation", "-e", str(ROOT)], check=True)


def requirements() -> list[str]:
    """Return what the project needs, without what no experiment does."""
    text = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [")[2].partition("\n]")[0]
    found = re.findall(r'^ *"([^"]+)"', text, flags=re.M)
    return [each for each in found if re.split(r"[<>=]", each)[0] not in LEFT_OUT]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("collect", "install"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("environment", type=Path, nargs="?", help="where to install")
    parser.add_argument("--python-version", default=sysconfig.get_python_version())
    given = parser.parse_args()
    if given.action == "collect":
        collect(given.folder, given.python_version)
    elif given.environment is None:
        parser.error("install needs a place for the environment")
    else:
        install(given.folder, given.environment)


if __name__ == "__main__":
    main()
