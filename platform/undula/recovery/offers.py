"""What processes offer to a group that starts: states of a run, and the steps to which recorded updates of the optimizer lead from them.

Also here: workers that have left their group but still hold its state: the next group gets from them what its ranks lack.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from undula.recovery.baseline import LATER, UPDATED, Work
from undula.recovery.moves import Part
from undula.recovery.snapshot import NEVER, Age, Snapshot
from undula.recovery.update_log import BEFORE, ScriptPlace, can_replay, replayed, replayed_holding
from undula.recovery.worker_state import WORKER_MEMORY, HeldState
from undula.state.boxes import Box, whole_box
from undula.state.extents import Extent, Kinds, Names
from undula.state.pieces import Holding, RankState, Table, is_complete
from undula.state.records import StepRow

Stored: TypeAlias = HeldState | Snapshot


class Content(IntEnum):
    """What an answer offers. Of equal boxes, those of the first of these are taken."""

    STATE = 0
    """A process's part of a state, with its values and its rows of the ledger."""
    SHARDS = 1
    """Only shards, which are those of other places after the update as well, because the script has not changed them between these.
    Buffers and values can be others at each place."""
    REPLAYED = 2
    """Parameters and optimizer state that must be computed again."""


@dataclass(frozen=True)
class Answer:
    """Description of a state that a process offers."""

    age: Age
    holding: Holding | None
    """Extent of the process's pieces; None if it holds the whole state."""
    origin: str
    """Place of the state, for messages."""
    first: int = UPDATED
    """First place after the update, of those in `baseline`, whose state these pieces belong to."""
    last: int = UPDATED
    """Last place of which this is known."""
    content: Content = Content.STATE

    def is_of(self, place: int) -> bool:
        """Return whether the pieces are known to be those of a place after the update."""
        return self.first <= place <= self.last

    @property
    def preference(self) -> tuple[Content, bool]:
        """Order in which the answers of a place with equal boxes are taken: the least first."""
        return self.content, self.origin != WORKER_MEMORY


Answers: TypeAlias = list[list[Answer]]
"""Answers of each source: of the ranks, in the order of their numbers, and then of other workers."""


@dataclass(frozen=True)
class Offer:
    """State at a step boundary, and the updates that follow it."""

    base: Stored
    updates: tuple[Stored, ...] = ()
    """Recorded updates, one after another. The state of each has the age of the state after the update."""
    last: ScriptPlace | None = None
    """How far the script had come on the rank when the rank was lost; None if that is unknown."""

    @classmethod
    def of(cls, base: Stored, recorded: Iterable[Stored] = (), last: ScriptPlace | None = None) -> "Offer":
        """Return an offer of a state and of those updates of the same rank and group that follow it without a gap."""
        step, changes, updates = base.age[1], Work.of(base.values).changes, []
        for update in sorted(recorded, key=lambda each: each.age):
            before = Work.of(update.values)
            if update.age > base.age and (update.values[BEFORE], before.changes) == (step, changes):
                updates.append(update)
                step, changes = update.age[1], 0
        return cls(base, tuple(updates), last)

    def answers(self) -> Iterator[Answer]:
        base, work = self.base, Work.of(self.base.values)
        yield Answer(base.age, base.holding, base.origin, work.place, work.place)
        if base.holding is None:
            return
        names = base.shards
        shards = Holding(
            base.holding.expected, {name: box for name, box in base.holding.boxes.items() if name in names}
        )
        last = self._lasts_until(0, work)
        if work.changed_last < last:
            yield Answer(base.age, shards, base.origin, work.changed_last, last, Content.SHARDS)
        holding = replayed_holding(base.holding, self.updates[-1].values) if self.updates else None
        for number, update in enumerate(self.updates, 1):
            last = self._lasts_until(number, Work())
            yield Answer(update.age, holding, base.origin, UPDATED, last, Content.REPLAYED)

    def _lasts_until(self, number: int, work: Work) -> int:
        """Return the last place at which the state after so many of the updates is known to be unchanged, given its work."""
        if number < len(self.updates):
            return LATER  # the record of the next update says so
        step = (self.base, *self.updates)[number].age[1]
        return work.lasts_until(self.last.work if self.last and self.last.step == step else work)

    def bytes(self) -> int:
        """Return the number of bytes that are read to load the state."""
        stored = [each for each in (self.base, *self.updates) if isinstance(each, Snapshot)]
        return sum(each.bytes for each in stored)

    def load(self, answer: Answer, optimizer: torch.optim.Optimizer) -> RankState:
        """Return what one of this offer's answers describes.

        Args:
            answer: The answer.
            optimizer: Optimizer of the run. Updates are taken again on the device of its parameters, where it takes its own.
        """
        state, device = self.base.load(), optimizer.param_groups[0]["params"][0].device
        for update in self.updates:
            if update.age <= answer.age:
                state = replayed(state, update.load(), type(optimizer), device)
        extent = answer.holding
        pieces = {name: piece for name, piece in state.pieces.items() if extent is None or name in extent.boxes}
        return RankState(pieces, state.values)


def usable(offers: Iterable[Offer], optimizer: torch.optim.Optimizer) -> list[Offer]:
    """Return the offers without the updates of another optimizer than the run's, as after a change of the script."""
    return [
        each if all(can_replay(update.values, optimizer) for update in each.updates) else Offer(each.base)
        for each in offers
    ]


def newest_complete(answers: Answers) -> Age:
    """Return the age of the newest state that the sources hold completely, and that one of them has committed; NEVER if there is none.

    Surviving ranks may differ by one step, because one of them may have committed a step before the group broke.
    """
    ages = {answer.age for of_source in answers for answer in of_source}
    return next((age for age in sorted(ages, reverse=True) if _place(answers, age) is not None), NEVER)


def _place(answers: Answers, age: Age) -> int | None:
    """Return the last place after an update at which the sources have the whole state, and one knows its values; None for none.

    The parts of ranks that have come to different places are parts of one state only if nothing was changed between these places.
    """
    of_age = [answer for answer in itertools.chain(*answers) if answer.age == age]
    for place in sorted({answer.last for answer in of_age if answer.content == Content.STATE}, reverse=True):
        if is_complete([answer.holding for answer in of_age if answer.is_of(place)]):
            return place
    return None


def chosen(answers: Answers, age: Age) -> list[list[int]]:
    """Return the numbers of the answers from which the state of an age is restored, by source.

    If sources have the whole state, these are theirs. Otherwise, each box comes from one source, in the order of Content, and from a
    process before the memory of a node. The parts of several lost ranks are spread over the ranks that can read them.
    """
    place = _place(answers, age)
    assert place is not None
    of_place = [
        (source, number, answer)
        for source, of_source in enumerate(answers)
        for number, answer in enumerate(of_source)
        if answer.age == age and answer.is_of(place)
    ]
    whole = {source: (source, number) for source, number, answer in reversed(of_place) if answer.holding is None}
    holders: dict[tuple[str, Box], list[tuple[int, int, Answer]]] = {}
    for source, number, answer in of_place if not whole else ():
        for box in answer.holding.boxes.items() if answer.holding else ():
            holders.setdefault(box, []).append((source, number, answer))
    taken: dict[tuple[tuple[int, int], ...], tuple[int, int]] = {}
    for of_box in holders.values():
        best = min(each.preference for *_, each in of_box)
        equal = tuple((source, number) for source, number, each in of_box if each.preference == best)
        taken.setdefault(equal, equal[len(taken) % len(equal)])
    used = set(whole.values()) or set(taken.values())
    return [
        [number for number in range(len(of_source)) if (source, number) in used]
        for source, of_source in enumerate(answers)
    ]


def origin_of(answers: Iterable[Answer]) -> str:
    """Return the places of a state, given the answers from which it is restored."""
    return " and ".join(dict.fromkeys(answer.origin for answer in answers))


def boxes_of(answers: Iterable[Answer], name: str, shape: tuple[int, ...]) -> list[Box]:
    """Return the boxes of a tensor that a source gives.

    Args:
        answers: Answers of the source from which the state is restored.
        name: Name of the tensor.
        shape: Shape of the whole tensor.
    """
    holdings = [answer.holding for answer in answers]
    boxes = [whole_box(shape) if holding is None else holding.boxes.get(name) for holding in holdings]
    return [box for box in boxes if box is not None]


Described: TypeAlias = tuple[list[tuple[Answer, Extent | None]], Names]
"""Answers without their holdings, each with the extent of its holding, and the names of the tensors."""


def described(answers: Iterable[Answer]) -> Described:
    """Return answers in the small form in which they are sent to other ranks."""
    names: dict[bytes, tuple[str, ...]] = {}
    extents: dict[int, Extent] = {}
    pairs: list[tuple[Answer, Extent | None]] = []
    given = list(answers)  # so that no two holdings have the same id
    for answer in given:
        holding = answer.holding
        if holding is not None and id(holding) not in extents:
            extents[id(holding)], names[extents[id(holding)].names] = Extent.of(holding)
        pairs.append((replace(answer, holding=None), extents.get(id(holding))))
    return pairs, names


@dataclass(frozen=True)
class Asked:
    """What sources have answered. Holdings have only the first tensor of each kind."""

    answers: Answers
    kinds: Kinds


def combined(sources: Iterable[Iterable[tuple[Answer, Extent | None]]], names: Names) -> Asked:
    """Return the answers of all sources, given their descriptions and the names of all tensors."""
    given = [list(pairs) for pairs in sources]
    kinds = Kinds((extent for pairs in given for _, extent in pairs if extent), names)
    answers = [
        [replace(answer, holding=kinds.holding(extent)) if extent else answer for answer, extent in pairs]
        for pairs in given
    ]
    return Asked(answers, kinds)


Common: TypeAlias = tuple[Mapping[str, Any], tuple[StepRow, ...], Table]
"""What all ranks take over from one that has committed a state: its values, its rows of the ledger, and the table of its tensors."""


class Leavers(Protocol):
    """Workers that are in no group any more, as a rank of a group that starts sees them.

    All methods raise LostLeaverError if a worker was lost.
    """

    names: list[str]
    """Names of the workers that have answered rank 0. Their places in this list are their numbers."""

    def answers(self, plan_digest: str) -> list[tuple[str, Described]]:
        """Ask all of them for the states of a plan that they hold, and return their names and answers."""

    def common(self, number: int) -> Common:
        """Return what all ranks take over from one of them, by its number."""

    def parts(self, asked: Sequence[tuple[int, Sequence[Part]]]) -> Iterator[Tensor]:
        """Yield parts of their states, as `packed_parts` packs them.

        Args:
            asked: Number of the worker, and the parts, of each request.
        """
