"""Integers that a float would round, such as ids, stand beside fractions in what a script records: whole, or refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate_kit import changed, train
from numbers_job import begin, cpu_run, numbers_job, refusal, trained

from undula.adapters.transformers.library import logged_by_script
from undula.errors import UsageError
from undula.state.events import LogEvent
from undula.state.ledger import events_of, read_ledger
from undula.storage import Store
from undula.train.run import Run
from undula.train.single_process import local_world

ID = 2**53 + 1


def test_integers_that_are_logged_beside_fractions_stay_whole(tmp_path: Path) -> None:
    values = {"python": ID, "torch": torch.tensor(ID), "numpy": np.int64(ID), "seen": 12_345_678, "share": 1 / 3}
    job = numbers_job(tmp_path)
    with local_world(torch.device("cpu")):
        run = cpu_run(job)
        for _ in trained(run):
            pass
        run.log(values)
        run.log(logged_by_script(values))
        run.free()
    ledger = read_ledger(Store(job.run_url))
    events = events_of(ledger.events, LogEvent)
    whole = {"python": ID, "torch": ID, "numpy": ID, "seen": 12_345_678.0, "share": 1 / 3}
    assert [event.values for event in events] == [whole, whole]
    assert events[0].message == f"The script logged python {ID}, torch {ID}, numpy {ID}, seen 12345678, share 0.333333."


def logs_in_step(value: Any) -> Callable[[Run], None]:
    def act(run: Run) -> None:
        model = begin(run)
        for step in run.steps():
            for batch in step.batches():
                step.backward(model(batch["x"][:, None]).mean())
                step.log(share=0.5, id=value)
            step.update()

    return act


def validates(run: Run) -> None:
    for _ in trained(run):
        run.validated({"loss": 0.5, "id": ID}, 1)


@pytest.mark.parametrize(
    ("act", "call"),
    [
        (logs_in_step(ID), "step.log()"),
        (logs_in_step(torch.tensor(ID)), "step.log()"),
        (validates, "run.validated()"),
    ],
)
def test_a_mean_that_would_round_an_integer_is_refused(tmp_path: Path, act: Callable[[Run], None], call: str) -> None:
    sentence = f"{call} got 'id' as {ID}, which a mean would round to {2**53}; record it by run.log() between two steps"
    assert refusal(numbers_job(tmp_path), act).startswith(sentence)


def test_what_accelerates_loop_logs_is_whole_or_refused(tmp_path: Path) -> None:
    used: list[Any] = []
    loop = changed("before", used.append)
    loop.after_epoch = lambda accelerator, *_: accelerator.log({"id": ID, "share": 0.5})  # type: ignore[method-assign]
    assert [event.values["id"] for event in events_of(train(loop, tmp_path).events, LogEvent)] == [ID, ID]
    loop.after_step = lambda _: used[-1].log({"id": ID})  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=rf"^accelerator.log\(\) got 'id' as {ID}, which a mean would round"):
        train(loop, tmp_path, "name=other")
