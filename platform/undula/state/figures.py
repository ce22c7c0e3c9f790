"""Numbers that a run has reported, and those in which another run of the same steps differs from it."""

import json
from collections import defaultdict
from collections.abc import Mapping
from math import isclose
from typing import TypeAlias

from undula.state.events import LogEvent, ValidationEvent
from undula.state.ledger import events_of, read_ledger
from undula.storage import Store

Place: TypeAlias = tuple[int, str]
"""Number of steps done, and name of a number."""
Figures: TypeAlias = Mapping[Place, list[float]]
"""Numbers of a run by place. A number that a group has reported once more is there twice."""
LOGGED = "which the script logs,"
"""End of the names of logged numbers, which may be times, and so differ between equal runs."""
OWN_STATE = "keep what the script has of its own, and reads later, with run.state() or in buffers of the model"
"""Fix of a script that reports other numbers after an interruption, although the state of the run is the same."""


def figures_of(store: Store) -> Figures:
    """Return the losses, the means of the validations and the logged numbers of a run."""
    ledger, found = read_ledger(store), defaultdict[Place, list[float]](list)

    def add(done: int, text: str, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            found[done, text.format(name)].append(number)

    for row in ledger.steps.to_pylist():
        done = row["step"] + row["merged_steps"]
        add(done, "the {} of the step", {"loss": row["loss"]})
        add(done, f"{{!r}}, {LOGGED}", json.loads(row["logged"]))
    for log in events_of(ledger.events, LogEvent):
        add(log.step, f"{{!r}}, {LOGGED}", log.values)
    for validation in events_of(ledger.events, ValidationEvent):
        add(validation.step, "the {} of the validation", validation.means)
    return found


def other_figures(actual: Figures, expected: Figures, run: str, tolerance: float = 0.0) -> dict[Place, str]:
    """Return sentences, without their ends, about the numbers in which a run differs from the first one, in the order of the steps.

    Args:
        actual: Numbers of the run.
        expected: Numbers of the first run. What only one of them has is not compared.
        run: Description of the run.
        tolerance: Relative difference up to which numbers count as equal.
    """
    gaps = {}
    for (done, name), numbers in sorted(actual.items()):
        for number, known in ((number, known) for number in numbers for known in expected.get((done, name), [])):
            if not (repr(number) == repr(known) or isclose(number, known, rel_tol=tolerance)):
                gaps[done, name] = f"{name} is {number!r} after {done} steps of {run}, and {known!r} in the first run"
    return gaps
