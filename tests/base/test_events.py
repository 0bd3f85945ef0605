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


def test_a_listener_is_told_of_the_types_it_wants_whenever_it_came():
    class Request(Event, frozen=True):
        pass

    class Ended(Request, frozen=True):
        pass

    class Listener:
        def __init__(self):
            self.heard = []

        def on(self, event):
            self.heard.append(type(event))

    channel, of_requests, of_all = Channel(), Listener(), Listener()
    channel.subscribe(of_requests, to=Request)
    channel.publish(Ended())
    channel.publish(Event())
    channel.subscribe(of_all)  # after both types were published
    channel.publish(Ended())
    channel.publish(Event())
    assert of_requests.heard == [Ended, Ended]
    assert of_all.heard == [Ended, Event]
