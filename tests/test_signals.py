"""A signal as a flag that the work looks at."""

import signal

from robo_rl.signals import asked_to_stop


def test_work_sees_the_signals_that_came_and_the_handlers_of_before_come_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with asked_to_stop() as stop:
        assert not stop
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop == [signal.SIGTERM, signal.SIGINT]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
