"""Keeps keys out of what people see, of what is saved, and of processes that do not need them.

Whoever reads a key lets it be known here. Then it is struck out of foreign text, since servers repeat what they were
sent: as it is, in JSON's escapes, percent-encoded, as HTML entities, in hexadecimal or base64, in other case, broken by
blanks and line ends, or cut off at either end.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

STRUCK = "***"
SHORTEST = 8  # a shorter secret may be part of any word: it is struck out only of what comes from who was sent it

# What a text can have in place of one character of a key. `%` and `\` may have been escaped several times.
_SPELLED = re.compile(
    rb"""\\+u([0-9a-fA-F]{4}) | \\+x([0-9a-fA-F]{2}) | %(?:25)*([0-9a-fA-F]{2}) | &\#[xX]([0-9a-fA-F]{1,6});? |
    &\#([0-9]{1,7});? | &(amp|lt|gt|quot|apos); | \\+([nrtbf]) | \\+(["'/]) | (\\)\\+ | ([\x00-\x20\x7f]+)""",
    re.VERBOSE,
)
_ENTITIES = {b"amp": b"&", b"lt": b"<", b"gt": b">", b"quot": b'"', b"apos": b"'"}

# Ends of the names of variables, options and keys that hold a secret. `pad_token` and `max_tokens` do not.
_SECRET_NAME = re.compile(
    r"(api|access|secret|private|auth|account|master|service|admin|encryption)[_-]?keys?([_-]id)?$|"
    r"(^|[_-])(hf|hub|auth|access|api|bearer|session|refresh|admin|id|github|gitlab|gh|slack|bot|personal)[_-]?token$|"
    r"(^token|passw(or)?d|passphrase|secrets?|credentials?|authorization|[_-]pat|cookie)$",
    re.IGNORECASE,
)
# Variables are named less carefully than options, and those that hold none are not missed by a trainer.
_SECRET_VARIABLE = re.compile(r"(KEY|KEYS|KEY_ID|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|_PAT)$", re.I)
_PROXY_VARIABLE = re.compile(r"[A-Z]+_PROXY$", re.IGNORECASE)
# What keys of well-known services look like, wherever they stand.
_SECRET_VALUE = re.compile(
    r"\b(sk-[A-Za-z0-9_-]{20,}|hf_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{30,}|xox[abprs]-[\w-]{20,}|"
    r"glpat-[\w-]{20,}|eyJ[\w-]{20,}\.[\w-]{20,}\.[\w-]*)|-----BEGIN [A-Z ]*PRIVATE KEY|[Bb]earer [\w.~+/-]{16,}"
)


def names_secret(name: str) -> bool:
    """Return whether a key, an option or a header of this name holds a secret."""
    return _SECRET_NAME.search(name) is not None


def looks_secret(value: str) -> bool:
    """Return whether a value looks like a key of a well-known service."""
    return _SECRET_VALUE.search(value) is not None


class Secrets:
    """What must be shown to nobody."""

    def __init__(self) -> None:
        self._spellings: set[bytes] = set()
        self._variables: set[str] = set()

    def learn(self, value: str | bytes, variable: str | None = None) -> None:
        """Let a secret be known, and the variable of the environment that holds it."""
        secret = value.encode(errors="replace") if isinstance(value, str) else value
        if len(secret) >= SHORTEST:
            self._spellings.update(_spellings(secret))
        if variable is not None:
            self._variables.add(variable)

    def struck(self, said: bytes, short: Collection[bytes] = ()) -> bytes:
        """Return a text with asterisks in place of all secrets, and of `short` ones as they stand."""
        for secret in short:
            said = said.replace(secret, STRUCK.encode())
        if not self._spellings or len(said) < SHORTEST:
            return said
        read, places = _read(said)
        spans = sorted(
            (places[start][0], places[end - 1][1]) for each in self._spellings for start, end in _found(each, read)
        )
        made, done = bytearray(), 0
        for start, end in spans:
            if start >= done:
                made += said[done:start] + STRUCK.encode()
            done = max(done, end)
        return bytes(made + said[done:])

    def struck_text(self, said: str) -> str:
        """Do as `struck`."""
        if not self._spellings:
            return said
        return self.struck(said.encode(errors="surrogatepass")).decode(errors="replace")

    def without_keys(self, environ: Mapping[str, str], keep: Collection[str] = ()) -> dict[str, str]:
        """Return an environment without variables that hold a secret, but for those to `keep`."""
        return {name: value for name, value in environ.items() if name in keep or not self._holds_secret(name, value)}

    @contextmanager
    def hidden(self, keep: Collection[str] = ()) -> Iterator[None]:
        """Take secrets but those to `keep` out of this process's environment while a library starts processes inside.

        Proxies stay, with their passwords.
        """
        keep = {*keep, *filter(_PROXY_VARIABLE.match, os.environ)}
        kept = self.without_keys(os.environ, keep)
        taken = {name: os.environ.pop(name) for name in [*os.environ] if name not in kept}
        try:
            yield
        finally:
            os.environ.update(taken)

    def _holds_secret(self, name: str, value: str) -> bool:
        if _PROXY_VARIABLE.match(name):
            return "@" in value
        return name in self._variables or _SECRET_VARIABLE.search(name) is not None or looks_secret(value)


SECRETS = Secrets()  # of this process


def pattern(secret: str) -> str:
    """Return a regular expression that finds a secret in the lines of a log, for who has nothing of ours (`guard.py`).

    It ignores case.
    """
    spelled = [
        rf"(?:{re.escape(each)}|\\+[ux](?:00)?{ord(each):02x}|%(?:25)*{ord(each):02x}|&#x?0*(?:{ord(each)}|{ord(each):x});?)"
        for each in secret
    ]
    others = [re.escape(each.decode()) for each in _spellings(secret.encode())]
    return "|".join(["".join(spelled), *others])


def _spellings(secret: bytes) -> set[bytes]:
    """Return what a text that is read by `_read` may have in a secret's place, in lower case."""
    read, _ = _read(secret)
    found = {read, secret.lower(), secret.hex().encode()}  # the second where a key itself looks like an escape
    for before in range(3):
        # Only the characters of base64 that say nothing of what stands around the secret.
        coded = base64.b64encode(bytes(before) + secret)[-(-8 * before // 6) : (before + len(secret)) * 8 // 6].lower()
        found |= {coded, coded.replace(b"+", b"-").replace(b"/", b"_")}
    return found


def _read(said: bytes) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the characters that a text spells, without blanks and in lower case, and where each stands."""
    read, places, done = bytearray(), list[tuple[int, int]](), 0
    for match in _SPELLED.finditer(said):
        start, end = match.span()
        read += said[done:start]
        places += ((at, at + 1) for at in range(done, start))
        if character := _character(match):
            read += character
            places.append((start, end))
        done = end
    read += said[done:]
    places += ((at, at + 1) for at in range(done, len(said)))
    return bytes(read).lower(), places


def _character(match: re.Match[bytes]) -> bytes:
    """Return the character that an escape stands for; nothing for a blank, and for what no key has."""
    unicode, hexadecimal, percent, entity, decimal, named, _blank, itself, backslash, _blanks = match.groups()
    code = next((int(each, 16) for each in (unicode, hexadecimal, percent, entity) if each is not None), None)
    if decimal is not None:
        code = int(decimal)
    if code is not None:
        return bytes([code]) if 0x20 < code < 0x7F else b""
    return _ENTITIES[named] if named is not None else itself or backslash or b""


def _found(secret: bytes, read: bytes) -> Iterator[tuple[int, int]]:
    """Return where a secret stands, and parts of it at the text's ends, which may have been cut."""
    at = read.find(secret)
    while at >= 0:
        yield at, at + len(secret)
        at = read.find(secret, at + len(secret))
    for size in range(min(len(secret) - 1, len(read)), SHORTEST - 1, -1):
        if read.endswith(secret[:size]):
            yield len(read) - size, len(read)
            break
    for size in range(min(len(secret) - 1, len(read)), SHORTEST - 1, -1):
        if read.startswith(secret[-size:]):
            yield 0, size
            break
