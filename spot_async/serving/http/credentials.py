"""What requests to one of our servers have to show. Server and client read both from their environments: command lines
are visible to every user of the machine, environments are not.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from typing import Self

API_KEY_VARIABLE = "SPOT_ASYNC_API_KEY"
UPDATE_TOKEN_VARIABLE = "SPOT_ASYNC_UPDATE_TOKEN"


@dataclass(frozen=True)
class Credentials:
    """None: not asked for. Neither is shown where one of these is printed."""

    api_key: str | None = field(default=None, repr=False)  # of every request
    update_token: str | None = field(default=None, repr=False)  # of new weights, besides the key

    @classmethod
    def of_environment(cls) -> Self:
        """Those of a server that was started by hand."""
        return cls(os.environ.get(API_KEY_VARIABLE) or None, os.environ.get(UPDATE_TOKEN_VARIABLE) or None)

    @classmethod
    def of_new_server(cls) -> Self:
        """Those of a server that we start. The key may be one that its user knows; the token is always only ours."""
        return cls(os.environ.get(API_KEY_VARIABLE) or new_secret(), new_secret())

    @property
    def environment(self) -> dict[str, str]:
        """For the server's process."""
        given = {API_KEY_VARIABLE: self.api_key, UPDATE_TOKEN_VARIABLE: self.update_token}
        return {name: value for name, value in given.items() if value is not None}


def new_secret() -> str:
    """What nobody guesses, any header can carry, and no command line takes for an option."""
    return secrets.token_hex(32)
