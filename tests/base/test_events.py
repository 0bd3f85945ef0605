"""Who hears of an event, and in which order."""

from __future__ import annotations

from spot_async.base.events import Channel, Event


def test_listeners_that_came_last_are_told_first():
    """Files are opened after the screen, and the screen must not say what is not in them yet."""
    heard = []

    class Listener:
        def __init__(self, name):
            self.name = name

        def on(self, event):
            heard.append((self.name, event))

    channel, event = Channel(), Event()
    channel.subscribe(Listener("history"), Listener("screen"))
    channel.subscribe(Listener("files"))
    channel.publish(event)
    assert heard == [("files", event), ("history", event), ("screen", event)]
