"""Steps and ledgers of small runs, for the tests of reports."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa

from undula.state.events import Event
from undula.state.ledger import Ledger
from undula.state.ledger_files import EVENT_SCHEMA, STEP_SCHEMA
from undula.state.records import StepRow


def step_of(step: int, **values: Any) -> StepRow:
    """Return a step of 8 samples that takes a second on two workers."""
    row = StepRow(1, step, 0, (step + 1) * 8, 8, 2, 1.0, 0.1, 0.1, 0.5, 0.3, 0.1, 0, 0.0)
    return replace(row, **values)


def ledger_of(steps: Sequence[StepRow], events: Sequence[Event] = (), replaced: Sequence[StepRow] = ()) -> Ledger:
    tables = [pa.Table.from_pylist([asdict(step) for step in rows], schema=STEP_SCHEMA) for rows in (steps, replaced)]
    return Ledger(*tables, pa.Table.from_pylist([event.row() for event in events], schema=EVENT_SCHEMA))
