"""`python -m spot_async.serving MODEL_DIR --uds PATH`: the server as a process of its own."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from pydantic import ValidationError

from spot_async.errors import SpotError
from spot_async.processes import exit_with_parent
from spot_async.serving.server import serve
from spot_async.serving.settings import ServeSettings

USAGE_ERROR = 2


def main() -> None:
    exit_with_parent()
    given = {name: value for name, value in vars(_parser().parse_args()).items() if value is not None}
    try:
        serve(ServeSettings.model_validate_strings(given))
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        _refuse(f"{'.'.join(map(str, first['loc']))} {first['msg']}".strip())
    except SpotError as error:
        _refuse(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m spot_async.serving", description="Serve a causal LM.")
    for name, field in ServeSettings.model_fields.items():
        flag = name if field.is_required() else f"--{name.replace('_', '-')}"
        default = f" (default: {field.default})" if field.default is not None and not field.is_required() else ""
        parser.add_argument(flag, help=f"{field.description}{default}")
    return parser


def _refuse(message: str) -> NoReturn:
    sys.stderr.write(f"error: {message}\n")
    sys.exit(USAGE_ERROR)


if __name__ == "__main__":
    main()
