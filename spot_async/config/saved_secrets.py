"""Finds secrets in a configuration, which is saved with the run and shown by `ps` where it is given as words. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from spot_async.base.secrets import looks_secret, names_secret

_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s@]*@")
_QUERY = re.compile(r"[?&]([^=&#\s]+)=[^&#\s]")
_OPTION = re.compile(r"--?([A-Za-z][\w-]*)(=.+)?", re.DOTALL)
OF_VARIABLES = ("secret_headers",)  # its values are names of variables
ADVICE = {
    "environment": "name a variable of this process in pass_environment",
    "headers": "name an environment variable in secret_headers",
    "proxy": "use the environment variable HTTPS_PROXY",
}


def saved_secrets(tree: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Return a line for each secret, with its key and without the secret."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            here = (*path, str(key))
            if isinstance(value, str) and value and names_secret(str(key)) and path[-1:] != OF_VARIABLES:
                yield _line(here)
            else:
                yield from saved_secrets(value, here)
    elif isinstance(tree, list):
        for before, value in zip([None, *tree], tree, strict=False):
            if _is_option_with_secret(before, value):
                yield _line(path)
            else:
                yield from saved_secrets(value, path)
    elif isinstance(tree, str) and _holds_secret(tree):
        yield _line(path)


def _is_option_with_secret(before: Any, value: Any) -> bool:
    """Return whether a word of a command line is a secret option with its value, or the value of the word before it."""
    own = _OPTION.fullmatch(value) if isinstance(value, str) else None
    if own is not None:
        return own[2] is not None and names_secret(own[1])
    option = _OPTION.fullmatch(before) if isinstance(before, str) else None
    return option is not None and option[2] is None and names_secret(option[1])


def _holds_secret(value: str) -> bool:
    return (
        looks_secret(value)
        or _PASSWORD.search(value) is not None
        or ("://" in value and any(map(names_secret, _QUERY.findall(value))))
    )


def _line(path: tuple[str, ...]) -> str:
    advice = next((words for key, words in ADVICE.items() if key in path), "use api_key_env or secret_headers")
    return f"{'.'.join(path)}: holds a secret, which would be saved with the run: {advice}"
