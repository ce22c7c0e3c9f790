"""What processes offer to a group that starts: states of a run, and the steps to which recorded updates of the optimizer lead from them."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch

from undula.recovery.replay import BEFORE, CHANGES, can_replay, replayed, replayed_holding
from undula.recovery.snapshot import NEVER, Age, Snapshot
from undula.recovery.worker_state import WORKER_MEMORY, HeldState
from undula.state.boxes import Box, whole_box
from undula.state.pieces import Holding, RankState, Table, is_complete

Stored: TypeAlias = HeldState | Snapshot


@dataclass(frozen=True)
class Answer:
    """Description of a state that a process offers."""

    age: Age
    holding: Holding | None
    """Extent of the process's pieces; None if it holds the whole state."""
    origin: str
    """Place of the state, for messages."""
    changes: int = 0
    """What the script has changed since the last update, as `replay.CHANGES` says it."""
    is_settled: bool = True
    """Whether the process has committed the state, and so knows its values and rows of the ledger. Otherwise it has the pieces only."""

    @property
    def preference(self) -> tuple[bool, bool]:
        """Order in which the answers with equal boxes are taken: the least first."""
        return not self.is_settled, self.origin != WORKER_MEMORY


Answers: TypeAlias = list[list[Answer]]
"""Answers of each source: of the ranks, in the order of their numbers, and then of other workers."""


@dataclass(frozen=True)
class Offer:
    """State at a step boundary, and the updates that follow it."""

    base: Stored
    updates: tuple[Stored, ...] = ()
    """Recorded updates, one after another. The state of each has the age of the state after the update."""

    @classmethod
    def of(cls, base: Stored, recorded: Iterable[Stored] = ()) -> "Offer":
        """Return an offer of a state and of those updates of the same rank and group that follow it without a gap."""
        step, changes, updates = base.age[1], changes_of(base), []
        for update in sorted(recorded, key=lambda each: each.age):
            if update.age > base.age and (update.values[BEFORE], changes_of(update)) == (step, changes):
                updates.append(update)
                step, changes = update.age[1], 0
        return cls(base, tuple(updates))

    def answers(self) -> Iterator[Answer]:
        yield Answer(self.base.age, self.base.holding, self.base.origin, changes_of(self.base))
        holding = replayed_holding(self.base.holding, self.updates[-1].values) if self.updates else None
        if holding:
            for update in self.updates:
                yield Answer(update.age, holding, self.base.origin, is_settled=False)

    def bytes(self) -> int:
        """Return the number of bytes that are read to load the state."""
        stored = [each for each in (self.base, *self.updates) if isinstance(each, Snapshot)]
        return sum(each.bytes for each in stored)

    def load(self, age: Age, optimizer: torch.optim.Optimizer) -> RankState:
        """Return the state of an age, to which this offer leads.

        Args:
            age: The age.
            optimizer: Optimizer of the run. Updates are taken again on the device of its parameters, where it takes its own.
        """
        state, device = self.base.load(), optimizer.param_groups[0]["params"][0].device
        for update in self.updates:
            if update.age <= age:
                state = replayed(state, update.load(), type(optimizer), device)
        base = self.base.holding
        pieces = {name: piece for name, piece in state.pieces.items() if base is None or name in base.boxes}
        return RankState(pieces, state.values)


def changes_of(stored: Stored) -> int:
    """Return what the script has changed in a state since its last update, or in the state before a recorded update."""
    return int(stored.values.get(CHANGES, 0))


def usable(offers: Iterable[Offer], optimizer: torch.optim.Optimizer) -> list[Offer]:
    """Return the offers without the updates of another optimizer than the run's, as after a change of the script."""
    return [
        Offer(each.base, each.updates if all(can_replay(update.values, optimizer) for update in each.updates) else ())
        for each in offers
    ]


def newest_complete(answers: Answers) -> Age:
    """Return the age of the newest state that the sources hold completely, and that one of them has committed; NEVER if there is none.

    Surviving ranks may differ by one step, because one of them may have committed a step before the group broke.
    """
    return max((age for age, changes in _states(answers)), default=NEVER)


def _states(answers: Answers) -> list[tuple[Age, int]]:
    """Return the ages, and the changes since the update, of the states that the sources hold completely and one has committed."""
    alike: dict[tuple[Age, int], list[Answer]] = {}
    for answer in itertools.chain(*answers):
        alike.setdefault((answer.age, answer.changes), []).append(answer)
    return [
        state
        for state, of_state in alike.items()
        if any(answer.is_settled for answer in of_state) and is_complete([answer.holding for answer in of_state])
    ]


def chosen(answers: Answers, age: Age) -> list[list[int]]:
    """Return the places of the answers from which a state is restored, by source.

    If sources have the whole state, these are theirs. Otherwise, each box comes from one source: what is settled comes before what must be
    computed again, and a process before the memory of a node. The parts of several lost ranks are spread over the ranks that can read them.
    """
    # Of several states of one age, the one after the most of the script's own work.
    changes = max(changes for their_age, changes in _states(answers) if their_age == age)
    of_age = [
        (source, place, answer)
        for source, of_source in enumerate(answers)
        for place, answer in enumerate(of_source)
        if (answer.age, answer.changes) == (age, changes)
    ]
    whole = {source: (source, place) for source, place, answer in reversed(of_age) if answer.holding is None}
    holders: dict[tuple[str, Box], list[tuple[int, int, Answer]]] = {}
    for source, place, answer in of_age if not whole else ():
        for box in answer.holding.boxes.items() if answer.holding else ():
            holders.setdefault(box, []).append((source, place, answer))
    taken: dict[tuple[tuple[int, int], ...], tuple[int, int]] = {}
    for of_box in holders.values():
        best = min(each.preference for *_, each in of_box)
        equal = tuple((source, place) for source, place, each in of_box if each.preference == best)
        taken.setdefault(equal, equal[len(taken) % len(equal)])
    used = set(whole.values()) or set(taken.values())
    return [
        [place for place in range(len(of_source)) if (source, place) in used]
        for source, of_source in enumerate(answers)
    ]


def origin_of(answers: Iterable[Answer]) -> str:
    """Return the places of a state, given the answers from which it is restored."""
    return " and ".join(dict.fromkeys(answer.origin for answer in answers))


def boxes_of(answers: Iterable[Answer], expected: Table) -> dict[str, list[Box]]:
    """Return the boxes of a state that a source gives, by name.

    Args:
        answers: Answers of the source from which the state is restored.
        expected: All tensors of the state.
    """
    boxes: dict[str, list[Box]] = {}
    whole = {name: whole_box(spec.shape) for name, spec in expected.items()}
    for answer in answers:
        for name, box in (answer.holding.boxes if answer.holding else whole).items():
            boxes.setdefault(name, []).append(box)
    return boxes
