"""Inboxes on real ports of this process, which has a client of Monarch's for it."""

from __future__ import annotations

import logging
import pickle
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from neoproto.private_api import monarch as private
from neoproto.private_api.monarch_ports import Inbox

pytestmark = pytest.mark.live


@pytest.fixture(params=[True, False], ids=["private", "public"])
def inbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inbox]:
    monkeypatch.setattr(private, "_allowed", request.param)
    private.pin_context(client=True)
    made = Inbox("inbox")
    yield made
    made.close()
    assert not made._thread.is_alive()


def test_messages_arrive_in_order_from_every_thread_and_survive_one_that_cannot_be_read(
    inbox: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    got: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def take(who: str, number: int) -> None:
        if number == 7:
            raise ValueError("seven")
        got.put((who, number))

    inbox.set_sink(take)
    address = inbox.address
    with caplog.at_level(logging.WARNING):
        private.send(b"no pickle", [private.sending_port(address, inbox._instance)])
        private.send(pickle.dumps(("too", "many", "items")), [private.sending_port(address, inbox._instance)])
        others = [
            threading.Thread(target=lambda who=who: [inbox.send((who, i), address) for i in range(100)])
            for who in "ab"
        ]
        for other in others:
            other.start()
        received = [got.get(timeout=30) for _ in range(198)]
    for who in "ab":
        assert [number for name, number in received if name == who] == [i for i in range(100) if i != 7]
    said = [record.getMessage() for record in caplog.records]  # Monarch puts the actor's name before it
    assert [one.rpartition("] ")[2] for one in said] == ["inbox: a message could not be handed over"] * 4


def test_what_is_sent_to_a_closed_inbox_is_dropped(inbox: Inbox) -> None:
    got: queue.SimpleQueue[Any] = queue.SimpleQueue()
    inbox.set_sink(lambda *items: got.put(items))
    other = Inbox("other")
    other.set_sink(lambda *items: got.put(items))
    other.close()
    other.close()
    inbox.send((1,), other.address, inbox.address)
    assert got.get(timeout=30) == (1,)
    assert got.empty()


def test_an_inbox_may_be_closed_by_its_own_sink(inbox: Inbox) -> None:
    done = threading.Event()

    def last() -> None:
        inbox.close()
        done.set()

    inbox.set_sink(last)
    inbox.send((), inbox.address)
    assert done.wait(30)
