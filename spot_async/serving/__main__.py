"""Runs the server as a process of its own: `python -m spot_async.serving MODEL_DIR --uds PATH`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from spot_async.base.processes.exits import exit_with_parent
from spot_async.errors import SpotError
from spot_async.serving.server import serve
from spot_async.serving.settings import ServeSettings

USAGE_ERROR = 2
PARENT_VARIABLE = "SPOT_ASYNC_PARENT"
DEFAULT_PORT = "8000"
DESCRIPTION = (
    "Serve a causal language model of transformers on a port or a Unix socket: OpenAI's /v1/completions and /v1/models "
    "(docs/serving.md), and generation, scoring and weight updates for training, over HTTP with msgpack bodies. "
    "`spot-async train` starts such servers itself."
)


def main(arguments: Sequence[str] | None = None, *, program: str = "python -m spot_async.serving") -> None:
    """Run the server that the command line describes. `spot-async serve` calls this too."""
    if PARENT_VARIABLE in os.environ:  # a server started from a shell may outlive the shell
        exit_with_parent()
    given = {name: value for name, value in vars(_parser(program).parse_args(arguments)).items() if value is not None}
    if "uds" not in given:
        given.setdefault("port", DEFAULT_PORT)
    try:
        serve(ServeSettings.model_validate_strings(given))
    except ValidationError as errors:
        _refuse(_explain(errors.errors(include_url=False)[0]))
    except SpotError as error:
        _refuse(str(error))
    except KeyboardInterrupt:  # interrupted before it could serve
        sys.stderr.write("stopped\n")
        sys.exit(130)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=DESCRIPTION)
    for name, field in ServeSettings.model_fields.items():
        flag = name if field.is_required() else _option(name)
        default = f" (default: {field.default})" if field.default is not None and not field.is_required() else ""
        default = f" (default: {DEFAULT_PORT})" if name == "port" else default
        parser.add_argument(flag, help=f"{field.description}{default}")
    return parser


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _explain(error: ErrorDetails) -> str:
    """Say in one line which option is wrong, its value, and what it must be."""
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return f"{_option(str(error['loc'][0]))} {error['input']}: {message}" if error["loc"] else message


def _refuse(message: str) -> NoReturn:
    sys.stderr.write(f"error: {message}\n")
    sys.exit(USAGE_ERROR)


if __name__ == "__main__":
    main()
