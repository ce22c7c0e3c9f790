"""Order in which ranks gather the units of a sharded model and send their gradients, whichever units the batch of each rank uses.

Torch's `fully_shard` gathers a unit when a pass comes to it. The collectives have no names: if the batch of one rank skips a unit, such as
an expert or the head of another task, its next collective would pair up with that of the skipped unit on the other ranks. Here, all ranks
go through one list of collectives in each pass. A rank takes part in those that its batch does not need, and at the end of a pass in those
that are left. A collective that is not in the rest of the list makes all ranks go through all units once more. If that happens, or if a
gradient was ready later than the list said, the ranks make a better list of what each of them did.
"""

from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import reduce
from typing import Literal, NamedTuple, get_args
from zlib import crc32

import torch
import torch.distributed as dist


class Collective(NamedTuple):
    """A collective of all ranks about one unit."""

    kind: Literal["gather", "send"]
    """Whether the parameters of the unit are gathered, or its gradient is sent."""
    unit: int
    """Number of the unit."""


Pass = Literal["forward", "evaluation", "backward", "last backward", "sending", "last sending"]
"""Kind of a pass: forward passes of a micro-batch, forward passes that no backward pass follows, or backward passes. These may be the last
ones of a step, after which units are freed, and may send gradients."""


SENDING: tuple[Pass, ...] = ("sending", "last sending")


class UnitOrder:
    """The lists of collectives, and the place in the list of the present pass.

    Attributes:
        is_regular: Whether the forward pass came to the same units in the same order on all ranks, and as when the lists were made. The
            backward pass then sends all gradients as the list says.
        is_ending: Whether the present pass has ended on this rank, which takes part in what other ranks still need.
        late: Units of which a rank had not all of the gradient when the list came to them; after the end of a pass, those of all ranks.

    Args:
        trainable: Whether each unit has parameters that require a gradient; the first unit is the model itself.
        stays: Whether each unit stays gathered from its forward pass to its backward pass.
        join_in: Function that takes part in a collective which the batch of this rank does not need, or not yet.
        control: Process group of all ranks on the host.
    """

    def __init__(
        self,
        trainable: Sequence[bool],
        stays: Sequence[bool],
        join_in: Callable[[Collective], None],
        control: dist.ProcessGroup,
    ):
        self._join_in, self._control, self._num_units = join_in, control, len(stays)
        gathers = [Collective("gather", unit) for unit in range(len(stays))]
        again = [each for each in gathers if not stays[each.unit]]
        expected = _expected(trainable, stays)
        kinds: tuple[Pass, ...] = get_args(Pass)
        self._lists = dict.fromkeys(kinds, gathers)
        self._further = dict.fromkeys(kinds, again)
        """Collectives of a further list. A unit that stays gathered is not gathered twice in a forward pass."""
        for kind in kinds[2:]:
            self._lists[kind] = [each for each in expected if each.kind == "gather" or kind in SENDING]
            self._further[kind] = gathers[::-1]
        self._pass: Pass | None = None
        self._list: list[Collective] = []
        self._next = self._num_further = 0
        self._own: list[Collective] = []
        """Collectives that this rank has needed itself in the present pass, in order."""
        self._calls: list[int] = []
        """Units in the order in which the latest forward pass came to them."""
        self._expected_calls: dict[Pass, list[int]] = {}
        """The same before the backward passes of which a list was made."""
        self._then: Pass | None = None
        self._is_joining = self._knows_better = False
        self.is_regular, self.is_ending = True, False
        self.late: set[int] = set()

    @property
    def is_open(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._pass is not None

    def begin(self, kind: Pass, is_gathered: bool = False) -> None:
        """Begin a pass. All ranks must call this.

        Args:
            kind: Kind of the pass.
            is_gathered: Whether all units are gathered on all ranks, so that a forward pass gathers none.
        """
        self._pass, self._next, self._num_further, self._own, self.late = kind, 0, 0, [], set()
        self._list = [] if is_gathered else self._lists[kind]
        if kind == "forward":
            self._calls = []

    def call(self, unit: int) -> None:
        """Record that a forward pass has come to a unit."""
        if self._pass == "forward":
            self._calls.append(unit)

    def reach(self, collective: Collective) -> bool:
        """Take part in all collectives that come before one that this rank needs now.

        Returns:
            Whether this rank may begin it. A gradient whose place in the list has passed is sent at the end of the pass.
        """
        if self._pass is None or self._is_joining:
            return True
        self._own.append(collective)
        while (place := self._place_of(collective)) is None:
            if collective.kind == "send":
                self.late.add(collective.unit)
                return False
            if collective not in self._further[self._pass]:
                return True
            self._end_list(wants_more=True)
        self._join_until(place)
        self._next = place + 1
        return True

    def note(self, unit: int) -> None:
        """Record that a gradient is ready of a unit to which the pass may come again. Its last place is that where it can be sent."""
        send = Collective("send", unit)
        self._own = [each for each in self._own if each != send] + [send]

    def come_late(self, unit: int) -> None:
        """Record that a gradient is ready of a unit whose gradient has been sent."""
        self.note(unit)
        self.late.add(unit)

    def end(self, then: Pass | None = None) -> None:
        """End the pass, after what other ranks still need in it. All ranks must call this.

        Args:
            then: Kind of the backward pass that follows a forward pass.
        """
        kind, self.is_ending, self._then = self._pass, True, then
        assert kind is not None
        while (agreed := self._end_list(wants_more=False))[0]:
            pass
        self._pass, self.is_ending = None, False
        _, is_irregular, is_poor, calls, other_calls, *late = agreed
        self.late = {unit for unit, flag in enumerate(late) if flag}
        if kind == "forward":
            self.is_regular = not is_irregular
            self._knows_better = bool(is_irregular) and calls == 255 - other_calls
        if is_poor or (kind in SENDING and self._knows_better):
            self._learn(kind)

    def _place_of(self, collective: Collective) -> int | None:
        rest = range(self._next, len(self._list))
        return next((place for place in rest if self._list[place] == collective), None)

    def _join_until(self, stop: int) -> None:
        self._is_joining = True
        while self._next < stop:
            self._next += 1
            self._join_in(self._list[self._next - 1])
        self._is_joining = False

    def _end_list(self, wants_more: bool) -> list[int]:
        """Go through the rest of the list, and agree on whether any rank needs a further one.

        Returns:
            Whether any rank needs a further list, has come to other units than expected, and needs better lists; the largest checksum of
            the calls, and the largest complement of one; whether any rank is late with each unit.
        """
        assert self._pass is not None
        self._join_until(len(self._list))
        checksum = crc32(str(self._calls).encode()) % 256
        late = [unit in self.late for unit in range(self._num_units)]
        is_poor = self._num_further > 0 or bool(self.late)
        is_other = self._then is not None and self._calls != self._expected_calls.get(self._then)
        own = [wants_more, is_other, is_poor, checksum, 255 - checksum, *late]
        flags = torch.tensor(own, dtype=torch.uint8, device="cpu")
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._control)
        agreed: list[int] = flags.tolist()
        if agreed[0]:
            self._list, self._next = self._further[self._pass], 0
            self._num_further += 1
        return agreed

    def _learn(self, kind: Pass) -> None:
        """Make the list of a kind of pass anew, of what each rank has needed, in an order that suits all of them as far as possible."""
        ranks: list[tuple[list[int], list[Collective]]] = [([], [])] * dist.get_world_size(self._control)
        dist.all_gather_object(ranks, (self._calls, self._own), group=self._control)
        merged = _sending_once(reduce(_merged, (own for _, own in ranks)))
        known = set(merged)
        self._lists[kind] = merged + [each for each in self._lists[kind] if each not in known]
        if all(calls == self._calls for calls, _ in ranks):
            self._expected_calls[kind] = self._calls
        else:
            self._expected_calls.pop(kind, None)


def _expected(trainable: Sequence[bool], stays: Sequence[bool]) -> list[Collective]:
    """Return the collectives of a backward pass whose forward pass came to the units in their order, once each.

    Torch gathers the next unit before the backward pass of a unit has ended, and ends that of the model last.
    """
    units = range(len(stays))
    gathers = [Collective("gather", unit) for unit in units if not stays[unit]]
    order: list[Collective] = []
    for unit in reversed(units):
        while gathers and gathers[-1].unit >= unit - 1:
            order.append(gathers.pop())
        if trainable[unit]:
            order.append(Collective("send", unit))
    return order


def _merged(one: Sequence[Collective], other: Sequence[Collective]) -> list[Collective]:
    """Return a list that has both lists within it, in their orders."""
    merged: list[Collective] = []
    for kind, begin, end, other_begin, other_end in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        merged += one[begin:end]
        if kind != "equal":
            merged += other[other_begin:other_end]
    return merged


def _sending_once(collectives: Sequence[Collective]) -> list[Collective]:
    """Return a list in which each gradient is sent only where it is sent first."""
    return [each for place, each in enumerate(collectives) if each.kind == "gather" or each not in collectives[:place]]
