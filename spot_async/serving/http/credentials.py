"""The secrets that requests to one of our servers must show.

Server and client read them from their environments. Every user of the machine can see command lines, but not
environments.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from typing import Self

from spot_async.base.secrets import SECRETS

API_KEY_VARIABLE = "SPOT_ASYNC_API_KEY"
UPDATE_TOKEN_VARIABLE = "SPOT_ASYNC_UPDATE_TOKEN"


@dataclass(frozen=True)
class Credentials:
    """A server's secrets. None: not required. Printing the object does not show them."""

    api_key: str | None = field(default=None, repr=False)  # required for every request
    update_token: str | None = field(default=None, repr=False)  # required for new weights, besides the key

    @classmethod
    def of_environment(cls) -> Self:
        """Return the credentials of a server that was started by hand."""
        SECRETS.learn(os.environ.get(API_KEY_VARIABLE, ""))
        return cls(os.environ.get(API_KEY_VARIABLE) or None, os.environ.get(UPDATE_TOKEN_VARIABLE) or None)

    @classmethod
    def of_new_server(cls) -> Self:
        """Return the credentials of a server that we start. The user may know the key, but only we know the token."""
        SECRETS.learn(os.environ.get(API_KEY_VARIABLE, ""))
        return cls(os.environ.get(API_KEY_VARIABLE) or new_secret(), new_secret())

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables for the server's process."""
        given = {API_KEY_VARIABLE: self.api_key, UPDATE_TOKEN_VARIABLE: self.update_token}
        return {name: value for name, value in given.items() if value is not None}


def new_secret() -> str:
    """Return a text that nobody can guess, any header can carry, and no command line takes for an option."""
    made = secrets.token_hex(32)
    SECRETS.learn(made)
    return made
