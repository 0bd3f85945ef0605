"""A page in chromium, used as people use it: by pointer, finger and keys. It is driven over chromium's own protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

KEYS = {"Tab": (9, ""), "Enter": (13, "\r")}  # codes, and what they write


class Page:
    """The browser's only page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            reply = await self._socket.receive_json(timeout=60)
            if reply.get("id") == number:
                assert "error" not in reply, reply
                return dict(reply["result"])

    async def value(self, expression: str) -> Any:
        """Return what a JavaScript expression comes to."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Return what an expression comes to once it is true. A page that loads anew is asked again."""
        async with asyncio.timeout(60):
            while True:
                try:
                    if value := await self.value(expression):
                        return value
                except AssertionError:  # between two documents
                    await asyncio.sleep(0.05)

    async def open(self, file: Path) -> None:
        await self.call("Page.navigate", url=f"file://{file}")
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def tap(self, selector: str) -> None:
        """Touch the middle of the first element that a selector finds, and let go."""
        place = await self._middle(selector)
        await self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[place])
        await self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    async def click(self, selector: str) -> None:
        place = await self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    async def _middle(self, selector: str) -> dict[str, float]:
        await self.value(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        box = f"document.querySelector({selector!r}).getBoundingClientRect()"
        return {
            "x": await self.value(f"{box}.x + {box}.width / 2"),
            "y": await self.value(f"{box}.y + {box}.height / 2"),
        }

    async def press(self, key: str) -> None:
        code, text = KEYS[key]
        for kind, written in (("keyDown", text), ("keyUp", "")):
            given = {"key": key, "code": key, "windowsVirtualKeyCode": code, "text": written}
            await self.call("Input.dispatchKeyEvent", type=kind, **given)

    async def write(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def pdf(self) -> bytes:
        return base64.b64decode((await self.call("Page.printToPDF", printBackground=False))["data"])


@asynccontextmanager
async def browser(profile: Path, width: int = 1280) -> AsyncIterator[Page]:
    """Start chromium with an empty page, so many pixels wide."""
    process = await asyncio.create_subprocess_exec(
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--touch-events=enabled",
        "--remote-debugging-port=0", f"--user-data-dir={profile}", f"--window-size={width},900", "about:blank",
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        while not (found := re.search(rb"DevTools listening on ws://(\S+?)/", line := await process.stderr.readline())):
            assert line, "chromium ended"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{found[1].decode()}/json/list") as reply:
                (url,) = [each["webSocketDebuggerUrl"] for each in await reply.json() if each["type"] == "page"]
            async with session.ws_connect(url, max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        process.kill()
        await process.wait()
