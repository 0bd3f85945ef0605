"""Keeps keys out of what people see, of what is saved, and of processes that do not need them.

Whoever reads a key lets it be known here. Then it is struck out of foreign text, since servers repeat what they were
sent: as it is, escaped as in JSON, Python, C, HTML or addresses, in hexadecimal, base64 or as numbers, in other
case, broken by blanks, line ends or colours, and long parts of it.
"""

from __future__ import annotations

import base64
import html
import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

STRUCK = "***"
SHORTEST = 8  # a shorter secret may be part of any word: it is struck out only of what comes from who was sent it
PIECE = 12  # so many characters of a key in a row are struck out wherever they stand; of a short key, most of it
BLOCK = 4  # a piece of `SHORTEST` characters has one of these whole, wherever it begins

# What a text can have in place of one character of a key. `%`, `\` and `&` may have been escaped several times. The
# last are blanks: control characters, colours of terminals, soft line ends, and characters of UTF-8 that show nothing.
_SPELLED = re.compile(
    rb"""\\+[uU](?:0{4})?([0-9a-fA-F]{4}) | \\+u\{([0-9a-fA-F]{1,6})\} | \\+x([0-9a-fA-F]{2}) |
    %(?:25)*([0-9a-fA-F]{2}) | &(?:amp;)*\#[xX]([0-9a-fA-F]{1,6});? | \\+([01][0-7]{2}) |
    &(?:amp;)*\#([0-9]{1,7});? | &(?:amp;)*([A-Za-z]{2,8}); | \\+([nrtbf]) | \\+(["'/]) | (\\)\\+ |
    ((?:\x1b\[[0-9;]*[A-Za-z]|=\r?\n|[\x00-\x20\x7f]|\xc2[\x80-\xa0\xad]|\xe2\x80[\x80-\x8f\xa8-\xae]|\xef\xbb\xbf)+)""",
    re.VERBOSE,
)

# Ends of the names of variables, options and keys that hold a secret. `pad_token` and `max_tokens` do not.
_SECRET_NAME = re.compile(
    r"(api|access|secret|private|auth|account|master|service|admin|encryption|judge|teacher|student|verifier|server|"
    r"openai|anthropic|azure|google|wandb|subscription)[_-]?keys?([_-]id)?$|"
    r"(^|[_-])(hf|hub|auth|access|api|bearer|session|refresh|admin|id|github|gitlab|gh|slack|bot|personal|judge|teacher|"
    r"server|openai|wandb|secret)[_-]?tokens?$|"
    r"(^token|passw(or)?d|passphrase|secrets?|credentials?|authorization|[_-]pat|cookie)$",
    re.IGNORECASE,
)
# Variables are named less carefully than options, and those that hold none are not missed by a trainer.
_SECRET_VARIABLE = re.compile(
    r"(KEYS?|KEY_ID|TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|COOKIE|CONNECTION_STRING|JWT|DSN|_PAT|_PASS|"
    r"_AUTH)(_?[0-9]+)?$",
    re.IGNORECASE,
)
_PROXY_VARIABLE = re.compile(r"[A-Z]+_PROXY$", re.IGNORECASE)
_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s@]*@")
# What keys of well-known services look like, wherever they stand.
_SECRET_VALUE = re.compile(
    r"\b(sk-[A-Za-z0-9_-]{20,}|hf_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{30,}|xox[abprs]-[\w-]{20,}|"
    r"glpat-[\w-]{20,}|eyJ[\w-]{20,}\.[\w-]{20,}\.[\w-]*)|-----BEGIN [A-Z ]*PRIVATE KEY|[Bb]earer [\w.~+/-]{16,}"
)


def names_secret(name: str) -> bool:
    """Return whether a key, an option or a header of this name holds a secret."""
    return _SECRET_NAME.search(name) is not None


def is_secret_variable(name: str, value: str) -> bool:
    """Return whether a variable of an environment holds a secret, by its name or its value."""
    if _PROXY_VARIABLE.match(name):
        return "@" in value
    return _SECRET_VARIABLE.search(name) is not None or looks_secret(value)


def looks_secret(value: str) -> bool:
    """Return whether a value looks like a key of a well-known service, or is an address with a password."""
    return _SECRET_VALUE.search(value) is not None or _PASSWORD.search(value) is not None


class Secrets:
    """What must be shown to nobody."""

    def __init__(self) -> None:
        self._spellings: dict[bytes, int] = {}  # with the length of a piece that is struck out
        self._places: dict[bytes, set[tuple[bytes, int]]] = {}  # of blocks of spellings: the spelling, and where in it
        self._variables: set[str] = set()

    def learn(self, value: str | bytes, variable: str | None = None) -> None:
        """Let a secret be known, and the variable of the environment that holds it."""
        secret = value.encode(errors="replace") if isinstance(value, str) else value
        if len(secret) >= SHORTEST:
            piece = min(PIECE, max(SHORTEST, len(secret) * 3 // 4))
            for each in _spellings(secret) - self._spellings.keys():
                self._spellings[each] = max(SHORTEST, piece * len(each) // len(secret))
                for at in range(len(each) - BLOCK + 1):
                    self._places.setdefault(each[at : at + BLOCK], set()).add((each, at))
        if variable is not None:
            self._variables.add(variable)

    def struck(self, said: bytes, short: Collection[bytes] = ()) -> bytes:
        """Return a text with asterisks in place of all secrets, and of `short` ones as they stand."""
        for secret in short:
            said = said.replace(secret, STRUCK.encode())
        if not self._spellings or len(said) < SHORTEST:
            return said
        read, places = _read(said)
        spans = sorted((places[start][0], places[end - 1][1]) for start, end in self._found(read))
        made, done = bytearray(), 0
        for start, end in spans:
            if start >= done:
                made += said[done:start] + STRUCK.encode()
            done = max(done, end)
        return bytes(made + said[done:]) if spans else said

    def struck_text(self, said: str) -> str:
        """Do as `struck`."""
        if not self._spellings:
            return said
        before = said.encode(errors="surrogatepass")
        after = self.struck(before)
        return said if after == before else after.decode(errors="replace")

    def _found(self, read: bytes) -> Iterator[tuple[int, int]]:
        """Return where parts of secrets stand that are long enough, at the text's ends also shorter ones.

        Each holds a block of the text whole. So only blocks are looked up, and what stands beside those that are known
        is compared.
        """
        done = 0
        for at in range(0, len(read) - BLOCK + 1, BLOCK):
            if at + BLOCK <= done:
                continue
            for spelling, place in self._places.get(read[at : at + BLOCK], ()):
                start = at - _alike(reversed(read[max(0, at - place) : at]), reversed(spelling[:place]))
                end = at + _alike(read[at : at + len(spelling) - place], spelling[place:])
                is_cut = (start == 0 and place + end - at == len(spelling)) or (
                    end == len(read) and start + place == at
                )
                if end - start >= (SHORTEST if is_cut else self._spellings[spelling]):
                    yield start, end
                    done = max(done, end)

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
        return name in self._variables or is_secret_variable(name, value)


SECRETS = Secrets()  # of this process


def pattern(secrets: Iterable[str]) -> str:
    """Return a regular expression that finds secrets in the lines of a log, for who has nothing of ours (`guard.py`).

    It ignores case.
    """
    return "|".join(map(_pattern, secrets))


def _pattern(secret: str) -> str:
    spelled = [
        rf"(?:{re.escape(each)}|\\+[ux](?:00)?{ord(each):02x}|%(?:25)*{ord(each):02x}|&#x?0*(?:{ord(each)}|{ord(each):x});?)"
        for each in secret
    ]
    others = [re.escape(each.decode()) for each in _spellings(secret.encode())]
    return "|".join(["".join(spelled), *others])


def _spellings(secret: bytes) -> set[bytes]:
    """Return what a text that is read by `_read` may have in a secret's place, in lower case."""
    read, _ = _read(secret)
    numbers = {",".join(f"{each:{form}}" for each in secret).encode() for form in ("d", "#04x")}
    # The second where a key itself looks like an escape.
    found = {read, secret.lower(), secret.hex().encode(), secret.hex(":").encode(), secret.hex("-").encode(), *numbers}
    for before in range(3):
        # Only the characters of base64 that say nothing of what stands around the secret.
        coded = base64.b64encode(bytes(before) + secret)[-(-8 * before // 6) : (before + len(secret)) * 8 // 6].lower()
        found |= {coded, coded.replace(b"+", b"-").replace(b"/", b"_")}
    return found


def _alike(ours: Iterable[int], theirs: Iterable[int]) -> int:
    """Return how many characters two texts have in common at their beginnings."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))


def _read(said: bytes) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the characters that a text spells, without blanks and in lower case, and where each stands."""
    read, places, done = bytearray(), list[tuple[int, int]](), 0
    for match in _SPELLED.finditer(said):
        start, end = match.span()
        read += said[done:start]
        places += ((at, at + 1) for at in range(done, start))
        if character := _character(match):
            read += character
            places += [(start, end)] * len(character)
        done = end
    read += said[done:]
    places += ((at, at + 1) for at in range(done, len(said)))
    return bytes(read).lower(), places


def _character(match: re.Match[bytes]) -> bytes:
    """Return the character that an escape stands for; nothing for a blank, and all of what is no escape of a key's."""
    *of_16, octal, decimal, named, _blank, itself, backslash, _blanks = match.groups()
    for text, base in (*((each, 16) for each in of_16), (octal, 8), (decimal, 10)):
        if text is not None:
            code = int(text, base)
            return bytes([code]) if 0x20 < code < 0x7F else b""
    if named is not None:
        meant = html.unescape(f"&{named.decode()};")
        return meant.encode() if len(meant) == 1 and meant.isascii() else match[0]
    return itself or backslash or b""
