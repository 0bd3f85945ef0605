"""Reads TensorBoard's event files as TensorBoard does."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path


def records(data: bytes) -> Iterator[bytes]:
    """Payloads of a TFRecord file: each has its length and a checksum before it, and a checksum behind."""
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield data[12 : 12 + length]
        data = data[12 + length + 4 :]


def shown_steps(directory: Path, tag: str) -> list[int]:
    """The steps of a scalar that are shown: a mark of a new start voids the steps from there on."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    shown: list[int] = []
    for file in sorted(directory.iterdir()):
        for event in map(Event.FromString, records(file.read_bytes())):
            if event.session_log.status == SessionLog.START:
                shown = [step for step in shown if step < event.step]
            shown += [event.step for value in event.summary.value if value.tag == tag]
    return shown
