"""Attacks a server as another user of the machine would: it tries everything to have the student replaced.

    python attacker.py URL DIRECTORY

It says `ready`, waits until something answers at the address, and asks until nothing does any more. Then it prints a
JSON object of how often it got which status. If it learns which version is served, it names that version in its
requests, so that nobody would notice.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections import Counter
from urllib.parse import urlsplit

from spot_async.base import wire
from spot_async.serving import api
from spot_async.types import WeightSnapshot, WeightVersion

KEYS = (None, "", "None", "secret")


def ask(address: str, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def attack(address: str, directory: str) -> Counter[str]:
    seen: Counter[str] = Counter()
    while True:
        for key in KEYS:
            shown = {} if key is None else {"Authorization": f"Bearer {key}", api.UPDATE_TOKEN_HEADER: key}
            try:
                status, told = ask(address, "GET", api.HEALTH, b"", shown)
                seen[f"health {status}"] += 1
                version = wire.decode(told, api.HealthReply).version if status == 200 else WeightVersion(0, 1)
                update = api.UpdateRequest(
                    snapshot=WeightSnapshot(directory=directory, version=version), timeout_s=30.0
                )
                content = {"Content-Type": api.CONTENT_TYPE}
                status, _ = ask(address, "POST", api.UPDATE_WEIGHTS, wire.encode(update), {**shown, **content})
                seen[f"update {status}"] += 1
            except (OSError, http.client.HTTPException):
                if seen:
                    return seen
            time.sleep(0.02)


if __name__ == "__main__":
    url, directory = sys.argv[1:]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdout.write(json.dumps(attack(urlsplit(url).netloc, directory)))
