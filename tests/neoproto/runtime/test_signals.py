from __future__ import annotations

import os
import signal

import pytest

from neoproto.runtime.signals import SignalHandlers, Terminated, held_signals, ignored_signals


def test_a_terminating_signal_is_an_exception_until_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    handlers = SignalHandlers()
    handlers.install()
    with pytest.raises(Terminated) as ended:
        os.kill(os.getpid(), signal.SIGTERM)
    assert (ended.value.code, ended.value.signal_name) == (143, "SIGTERM")
    handlers.restore()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_held_signal_takes_effect_when_the_block_ends() -> None:
    reached = []

    def held() -> None:
        with held_signals():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("the end")

    with pytest.raises(KeyboardInterrupt):
        held()
    assert reached == ["the end"]
    with held_signals():
        pass


def test_a_deferred_signal_has_none() -> None:
    with ignored_signals():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
