"""Damages replies: their bytes, or what they say. All chance comes from the generator that is passed in."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec

Path = tuple[Any, ...]  # keys and indices from the root to what was changed
BIG = 1 << 40
NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 7, 511, 512, 513, BIG, -BIG, 1 << 70, -(1 << 70), 0.5, -0.5, 1e-30, 1e30, -1e30, 1e308, -9999.0,
    float("nan"), float("inf"), float("-inf"), -3.25,
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, "", "0", "token_id:3", "token_id:-1", "token_id:x", "\ud83d", "abort",
                           "stop", "length", "0.0", "9.9", [], {}, [[]], [None], {"": None})  # fmt: skip
DEEP = 100_000


def damaged_bytes(body: bytes, draw: random.Random) -> bytes:
    """Return a body with bytes flipped, cut, doubled or replaced, as a bad connection or proxy would."""
    data = bytearray(body)
    start = draw.randrange(len(data))
    end = min(len(data), start + 1 + int(draw.expovariate(1 / 12)))
    match draw.randrange(11):
        case 0:
            for _ in range(draw.randint(1, 8)):
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        case 1:
            del data[start:]
        case 2:
            del data[:start]
        case 3:
            del data[start:end]
        case 4:
            data[end:end] = data[start:end]
        case 5:
            data[start:end] = draw.randbytes(end - start)
        case 6:
            data[start:start] = draw.choice(
                [b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\x00", b"NaN", b"1e999", b'"']
            )
        case 7:
            data[start] = draw.choice(b"0123456789-.eE,:[]{}\"'")
        case 8:
            data[start:end] = (b"[" if draw.random() < 0.5 else b'{"a":') * draw.choice([50, DEEP])
        case 9:
            return draw.choice([b"", b"null", b"[]", b"{}", b"\xff", b"<html>502 Bad Gateway</html>", b"[" * DEEP])
        case _:
            data += draw.choice([b" ", b"\n", b"}", b"\x00", bytes(body)])
    return bytes(data)


def damaged_json(body: bytes, draw: random.Random) -> tuple[bytes, Path]:
    """Return a JSON reply with one value changed, and where. The rest is as it was."""
    tree, path = damaged_tree(json.loads(body), draw)
    return json.dumps(tree).encode(), path


def damaged_msgpack(body: bytes, draw: random.Random) -> tuple[bytes, Path]:
    """Return a reply of our own servers with one value changed, and where."""
    while True:
        tree, path = damaged_tree(msgspec.msgpack.decode(body), draw)
        try:
            return msgspec.msgpack.encode(tree), path
        except (OverflowError, UnicodeEncodeError):  # msgpack has no form for the new value
            continue


def damaged_tree(tree: Any, draw: random.Random) -> tuple[Any, Path]:
    """Return the tree with one change, and where."""
    box = {"": tree}
    holder, key, path = draw.choice(list(_places(box, ())))
    value = holder[key]
    change = draw.choice(_changes(value))
    if change is _dropped and holder is not box:
        del holder[key]
    elif change is _doubled and isinstance(holder, list):
        holder.insert(key, value)
    else:
        holder[key] = change(value, draw)
    return box[""], path[1:]


def _places(node: Any, path: Path) -> Any:
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        here = (*path, key)
        yield node, key, here
        if isinstance(node[key], dict | list):
            yield from _places(node[key], here)


Change = Callable[[Any, random.Random], Any]


def _dropped(value: Any, draw: random.Random) -> Any:
    return None


def _doubled(value: Any, draw: random.Random) -> Any:
    return [value, value]


def _number(value: Any, draw: random.Random) -> Any:
    return draw.choice(NUMBERS)


def _other(value: Any, draw: random.Random) -> Any:
    return draw.choice(OTHERS)


def _text(value: Any, draw: random.Random) -> Any:
    return str(value)


def _moved(value: Any, draw: random.Random) -> Any:
    return value + draw.choice([-1, 1, 0.5, -0.5, -700, 700])


def _shorter(value: Any, draw: random.Random) -> Any:
    at = draw.randrange(len(value) + 1)
    return value[:at]


def _swapped(value: list[Any], draw: random.Random) -> Any:
    one, other = draw.randrange(len(value)), draw.randrange(len(value))
    value = list(value)
    value[one], value[other] = value[other], value[one]
    return value


def _longer(value: list[Any], draw: random.Random) -> Any:
    return value + value[: draw.randint(1, len(value))]


def _flipped(value: bytes, draw: random.Random) -> Any:
    data = bytearray(value)
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def _spelled(value: str, draw: random.Random) -> Any:
    at = draw.randrange(len(value))
    return value[:at] + draw.choice(["A", "/", "=", "\u0000", "9", "f8", "\u00e9"]) + value[at + 1 :]


def _renamed(value: dict[str, Any], draw: random.Random) -> Any:
    name = draw.choice(list(value))
    return {draw.choice(["x", "511", "512", "-1", "99999999999999999999", f"{name} "]) if k == name else k: v
            for k, v in value.items()}  # fmt: skip


def _changes(value: Any) -> list[Change]:
    common: list[Change] = [_dropped, _doubled, _number, _other]
    match value:
        case bool() | None:
            return common
        case int() | float():
            return [*common, _text, _moved, _moved, _moved]
        case str() | bytes() if value:
            return [*common, _shorter, _spelled if isinstance(value, str) else _flipped]
        case list() if value:
            return [*common, _shorter, _swapped, _longer]
        case dict() if value:
            return [*common, _renamed]
        case _:
            return common
