"""Events reach their sink in order, and hold nobody up."""

import pickle
import threading

from undula.elastic.events import EventQueue
from undula.state.ledger import Event


def test_a_slow_sink_holds_nobody_up_and_gets_all_in_order() -> None:
    told: list[str] = []
    may_go_on = threading.Event()

    def slow(event: Event) -> None:
        assert may_go_on.wait(10)
        told.append(event.message)

    queue = EventQueue(slow)
    for number in range(5):
        queue(Event("notice", str(number)))
    assert told == []
    may_go_on.set()
    queue.close()
    assert told == ["0", "1", "2", "3", "4"]


def test_a_queue_that_has_told_nothing_can_be_sent() -> None:
    copy = pickle.loads(pickle.dumps(EventQueue(print)))
    copy.close()
