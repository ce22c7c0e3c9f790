"""Events reach their sink in order, and hold nobody up."""

import pickle
import threading
from pathlib import Path

from undula.elastic.events import EventQueue
from undula.run.hub import TellEverywhere
from undula.state.ledger import Event, read_ledger
from undula.storage import Store


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


def test_what_the_storage_did_not_take_is_told_with_the_next_event_and_all_in_one_file(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "run"))
    tell: TellEverywhere = pickle.loads(pickle.dumps(TellEverywhere(store, print)))  # type: ignore[arg-type]
    tell(Event("group", "first"))
    (folder,) = tmp_path.glob("run/ledger")
    folder.rename(tmp_path / "away")
    folder.touch()  # a file where the folder was
    tell(Event("group", "second"))
    folder.unlink()
    tell(Event("group", "third"))
    assert read_ledger(store).events["message"].to_pylist() == ["first", "second", "third"]
    assert len(store.list("ledger")) == 1
