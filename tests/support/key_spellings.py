"""The ways in which a server may repeat a key, and a look for them in what should show none."""

from __future__ import annotations

import base64
import html
import json
import urllib.parse
from collections.abc import Callable, Mapping


def json_escaped(key: str) -> str:
    return "".join(f"\\u{ord(each):04x}" for each in key)


SPELLINGS: Mapping[str, Callable[[str], str]] = {
    "plain": str,
    "JSON": lambda key: json.dumps(key)[1:-1],
    "JSON's escapes": json_escaped,
    "JSON within JSON": lambda key: json.dumps(json_escaped(key))[1:-1],
    "some of JSON's escapes": lambda key: json_escaped(key[:5]) + key[5:],
    "percent": lambda key: urllib.parse.quote(key, safe=""),
    "all percent": lambda key: "".join(f"%{ord(each):02X}" for each in key),
    "percent twice": lambda key: urllib.parse.quote(urllib.parse.quote(key, safe=""), safe=""),
    "entities": html.escape,
    "decimal entities": lambda key: "".join(f"&#{ord(each)};" for each in key),
    "hexadecimal entities": lambda key: "".join(f"&#x{ord(each):x};" for each in key),
    "hexadecimal": lambda key: key.encode().hex(),
    "HEXADECIMAL": lambda key: key.encode().hex().upper(),
    "base64": lambda key: base64.b64encode(key.encode()).decode(),
    "base64 of a pair": lambda key: base64.b64encode(f"me:{key}".encode()).decode(),
    "base64 of a longer one": lambda key: base64.b64encode(f"user{key}tail".encode()).decode(),
    "base64 for addresses": lambda key: base64.urlsafe_b64encode(f"x{key}".encode()).decode(),
    "CASE": str.upper,
    "braces": lambda key: "".join(f"\\u{{{ord(each):x}}}" for each in key),
    "octal": lambda key: "".join(f"\\{ord(each):03o}" for each in key),
    "entities of entities": lambda key: "".join(f"&amp;#{ord(each)};" for each in key),
    "hexadecimal with colons": lambda key: key.encode().hex(":"),
    "numbers": lambda key: ", ".join(str(each) for each in key.encode()),
    "in colour": lambda key: f"{key[:6]}\x1b[1m{key[6:]}\x1b[0m",
    "with what is not seen": "\u200b".join,
    "two lines": lambda key: f"{key[:6]}\n{key[6:]}",
    "two lines of JSON": lambda key: f"{key[:6]}\\n{key[6:]}",
    "folded": lambda key: f"{key[:6]}\r\n\t {key[6:]}",
    "apart": " ".join,
}


def shown(said: bytes, key: str) -> list[str]:
    """Return the spellings in which a text has a key, or most of it."""
    low = b"".join(said.lower().split()).replace(b"\\n", b"").replace(b"\\r", b"").replace(b"\\t", b"")
    part = key[: max(8, 2 * len(key) // 3)]
    whole = {name for name in SPELLINGS if name.startswith("base64")}
    return [
        name
        for name, spell in SPELLINGS.items()
        if "".join(spell(key if name in whole else part).lower().split()).replace("\\n", "").replace("\\r", "").encode()
        in low
    ]
