"""Finds secrets in a configuration, which is saved with the run and shown by `ps` where it is given as words. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from spot_async.base.secrets import is_secret_variable, looks_secret, names_secret

_QUERY = re.compile(r"[?&]([^=&#\s]+)=[^&#\s]")
_OPTION = re.compile(r"--?([A-Za-z][\w-]*)(?:[= ](.+))?", re.DOTALL)
_ASSIGNMENT = re.compile(r"(?:--?[\w-]+[= ])?([A-Za-z_]\w*)=(.+)", re.DOTALL)  # also `--env=NAME=VALUE`
_HEADER = re.compile(r"(?:-H ?)?([A-Za-z][\w-]*):\s*\S.*", re.DOTALL)
# A name of a variable, and not a key that was given in its place.
_VARIABLE = re.compile(r"(?!(?=.*[0-9])(?=.*[a-z])\w{20})[A-Za-z_]\w*")
OF_VARIABLES = ("api_key_env", "secret_headers", "pass_environment")  # these hold names of variables
NAMED_FREELY = ("environment", "headers")
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
            if _is_secret(str(key), value, path):
                yield _line(here)
            else:
                yield from saved_secrets(value, here)
    elif isinstance(tree, list):
        for before, value in zip([None, *tree], tree, strict=False):
            if _is_value_of_option(before, value):
                yield _line(path)
            else:
                yield from saved_secrets(value, path)
    elif isinstance(tree, str):
        if any(each in path[-2:] for each in OF_VARIABLES):
            if not _VARIABLE.fullmatch(tree):
                yield f"{'.'.join(path)}: give the name of an environment variable that holds it, not the secret itself"
        elif _holds_secret(tree):
            yield _line(path)


def _is_secret(key: str, value: Any, path: tuple[str, ...]) -> bool:
    """Return whether a key says that its values are secret."""
    if value in (None, "", []) or isinstance(value, bool | dict) or not set(path).isdisjoint(OF_VARIABLES):
        return False
    if path[-1:] in [(each,) for each in NAMED_FREELY]:
        return is_secret_variable(key.replace("-", "_"), str(value))
    return names_secret(key)


def _is_value_of_option(before: Any, value: Any) -> bool:
    """Return whether a word of a command line is the value of the secret option before it."""
    option = _OPTION.fullmatch(before) if isinstance(before, str) else None
    is_option = isinstance(value, str) and value.startswith("-")
    return option is not None and option[2] is None and names_secret(option[1]) and not is_option


def _holds_secret(value: str) -> bool:
    option, assignment, header = (form.fullmatch(value) for form in (_OPTION, _ASSIGNMENT, _HEADER))
    return (
        looks_secret(value)
        or ("://" in value and any(map(names_secret, _QUERY.findall(value))))
        or (option is not None and option[2] is not None and names_secret(option[1]))
        or (assignment is not None and is_secret_variable(assignment[1], assignment[2]))
        or (header is not None and names_secret(header[1]))
        or any(True for _ in saved_secrets(_json(value)))
    )


def _json(value: str) -> Any:
    """Return the mapping that a word such as `--extra-config={...}` has; None if it has none."""
    try:
        found = json.loads(value[value.index("{") :])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _line(path: tuple[str, ...]) -> str:
    advice = next((words for key, words in ADVICE.items() if key in path), "use api_key_env or secret_headers")
    return f"{'.'.join(path)}: holds a secret, which would be saved with the run: {advice}"
