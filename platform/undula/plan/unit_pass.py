"""Memory and traffic of a pass of a sharded model, from counts of the whole model. Pure.

torch's `fully_shard` gathers a unit before its forward and its backward pass, concatenates its gradients after the backward pass, and frees
both. The pass of the whole model was counted with a mark where a unit begins or ends; here, what `fully_shard` and the sums of gradients
hold meanwhile is added to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from undula.errors import UsageError

MarkKind = Literal["forward", "forward end", "backward", "backward end"]
REST = 0
"""Number of the unit that has all parameters outside of the other units. It stays gathered from its forward to its backward pass."""


@dataclass(frozen=True)
class SplitTensor:
    """Parameter of a unit, which is split along its first dimension."""

    rows: int
    row_bytes: int
    trains: bool
    state_row_bytes: int = 0
    """State of the optimizer that is split like the parameter, for each row."""

    def rows_of_rank(self, ranks: int) -> int:
        """Return the rows of the first rank, which has most."""
        return -(-self.rows // ranks)


@dataclass(frozen=True)
class UnitCount:
    """Parameters that are gathered at once."""

    tensors: tuple[SplitTensor, ...]

    def shard_bytes(self, ranks: int) -> int:
        """Return the bytes of the parameters of a rank, which are padded to equal shards."""
        return sum(each.rows_of_rank(ranks) * each.row_bytes for each in self.tensors)

    def gradient_shard_bytes(self, ranks: int) -> int:
        """Return the bytes of a rank's slice of the unit's gradient."""
        return sum(each.rows_of_rank(ranks) * each.row_bytes for each in self.tensors if each.trains)

    def state_bytes(self, ranks: int) -> int:
        """Return the bytes of the optimizer's state that is split, on the first rank."""
        return sum(each.rows_of_rank(ranks) * each.state_row_bytes for each in self.tensors)


@dataclass(frozen=True)
class Mark:
    """Moment of a pass of the whole model at which a unit begins or ends, in bytes beside what was there before the pass.

    Gradients of units whose backward pass has ended are left out.
    """

    unit: int
    kind: MarkKind
    is_backward: bool
    """Whether the backward pass has begun. A forward pass of a unit is then one that is repeated."""
    bytes: int
    """What is held at the mark."""
    peak: int
    """Most that is held until the next mark."""
    gradient_bytes: int = 0
    """Gradients of the unit, which end here."""


@dataclass(frozen=True)
class PassSums:
    """Sums of gradients that a rank holds in a pass, each in relation to the padded gradient of a unit."""

    before: float
    """Sums that are held until the backward pass of the unit has ended."""
    after: float
    """Sums that are held afterwards."""
    taken: float = 0.0
    """Most that is held beside these while the gradient of a unit is taken, without the gradient itself."""
    waiting: float = 0.0
    """Sums that are held in the forward pass beside those of `before`."""
    keeps_flat: bool = False
    """Whether the gradient of the unit is part of `after`, without a copy."""


@dataclass(frozen=True)
class PassMoment:
    """Memory of a rank at a moment of a pass, in bytes."""

    pass_bytes: float
    """What the pass of the whole model holds: activations, temporary tensors, and gradients of the current unit."""
    gathered: float
    """Parameters of units, and what is received of them."""
    gradients: float
    """Concatenated gradients, and their sums."""

    @property
    def total(self) -> float:
        return self.pass_bytes + self.gathered + self.gradients


@dataclass(frozen=True)
class ReplayedPass:
    """A pass of a sharded model."""

    forward: PassMoment
    """Moment of the forward pass that takes most."""
    backward: PassMoment
    sent_bytes: int
    """What the rank sends to others, so that they can gather units."""
    gathers: int
    """Number of times that a unit is gathered."""


@dataclass
class Replay:
    """State of `fully_shard` in a pass.

    Args:
        units: Parameters of the units.
        ranks: Number of ranks.
        stage: Stage of sharding, from 1 to 3.
        sums: Sums of gradients.
        is_first: Whether the pass is the first one of a step. In stages 1 and 2, it leaves the units gathered for the others.
        is_last: Whether it is the last one.
        gathered_share: Bytes of a gathered parameter, relative to its own.
    """

    units: Sequence[UnitCount]
    ranks: int
    stage: int
    sums: PassSums
    is_first: bool
    is_last: bool
    gathered_share: float = 1.0
    sent_bytes: int = 0
    gathers: int = 0
    _whole: set[int] = field(default_factory=set)
    """Units that are gathered."""
    _received: dict[int, int] = field(default_factory=dict)
    """Bytes that were received of units, from which their parameters are not copied yet."""
    _copied: int = 0
    """Bytes that were received of the last unit of the forward pass, which are freed with the next one."""
    _flat: int = 0
    """Concatenated gradient of the last unit."""
    _zeros: int = 0
    """Slices that torch takes for the sums of gradients of this pass."""
    _summed: float = 0.0
    _order: list[int] = field(default_factory=list)
    """Units in the order of the ends of their forward passes."""
    _places: dict[int, list[int]] = field(default_factory=dict)
    _in_backward: set[int] = field(default_factory=set)
    _most: dict[bool, PassMoment] = field(default_factory=dict)

    def run(self, marks: Sequence[Mark]) -> ReplayedPass:
        """Return what a pass takes, from the marks of the whole model."""
        if self.stage < 3 and not self.is_first:
            self._whole = {*range(len(self.units))}
        padded = sum(self._flat_bytes(unit) for unit in range(len(self.units)))
        self._summed = (self.sums.before + self.sums.waiting) * padded
        begun = False
        for mark in marks:
            if mark.is_backward and not begun:
                begun = True
                self._summed -= self.sums.waiting * padded
            if mark.kind == "forward":
                self._gather(mark)
                self._copy_out(mark, in_forward=mark.unit not in self._in_backward)
            elif mark.kind == "forward end":
                self._end_forward(mark)
            elif mark.kind == "backward":
                self._begin_backward(mark)
            else:
                self._end_backward(mark)
            self._note(mark, mark.peak)
        nothing = PassMoment(0.0, 0.0, 0.0)
        return ReplayedPass(
            self._most.get(False, nothing), self._most.get(True, nothing), self.sent_bytes, self.gathers
        )

    def _shard_bytes(self, unit: int) -> int:
        """Return the bytes of a rank's shard of a unit, in the format in which it is gathered."""
        return int(self.units[unit].shard_bytes(self.ranks) * self.gathered_share)

    def _gathered_bytes(self, unit: int) -> int:
        return self.ranks * self._shard_bytes(unit)

    def _flat_bytes(self, unit: int) -> int:
        return self.ranks * self.units[unit].gradient_shard_bytes(self.ranks)

    def _note(self, mark: Mark, held: float, more: float = 0.0, converted: int = 0) -> None:
        """Note what is held at a moment: by the pass of the whole model, further gradients, and a converted shard."""
        gathered = sum(map(self._gathered_bytes, self._whole)) + sum(self._received.values()) + self._copied + converted
        moment = PassMoment(held, gathered, self._flat + self._zeros + self._summed + more)
        if mark.is_backward not in self._most or moment.total > self._most[mark.is_backward].total:
            self._most[mark.is_backward] = moment

    def _gather(self, mark: Mark, unit: int | None = None) -> None:
        unit = mark.unit if unit is None else unit
        if unit in self._whole or unit in self._received or not self._shard_bytes(unit):
            return
        self._received[unit] = self._gathered_bytes(unit) if self.ranks > 1 else 0
        self.sent_bytes += (self.ranks - 1) * self._shard_bytes(unit)
        self.gathers += 1
        # A rank converts its shard before it sends it.
        self._note(mark, mark.bytes, converted=self._shard_bytes(unit) if self.gathered_share < 1 else 0)

    def _copy_out(self, mark: Mark, in_forward: bool) -> None:
        """Copy what was received of a unit to its parameters."""
        if mark.unit not in self._received:
            return
        if in_forward:
            self._copied = 0
        self._whole.add(mark.unit)
        self._note(mark, mark.bytes)
        received = self._received.pop(mark.unit)
        if in_forward:
            self._copied = received

    def _end_forward(self, mark: Mark) -> None:
        if mark.is_backward:
            return
        if self.stage == 3 and mark.unit != REST:
            self._whole.discard(mark.unit)
        self._places.setdefault(mark.unit, []).append(len(self._order))
        self._order.append(mark.unit)
        if mark.unit == REST:
            self._copied = 0

    def _begin_backward(self, mark: Mark) -> None:
        if mark.unit in self._in_backward:
            return
        self._in_backward.add(mark.unit)
        self._gather(mark)
        self._copy_out(mark, in_forward=False)
        if self._places.get(mark.unit) and (place := self._places[mark.unit].pop()):
            self._gather(mark, self._order[place - 1])

    def _end_backward(self, mark: Mark) -> None:
        unit = mark.unit
        self._in_backward.discard(unit)
        if self.stage == 3 or self.is_last:
            self._whole.discard(unit)
        self._flat = 0
        flat, own = self._flat_bytes(unit), self.units[unit].gradient_shard_bytes(self.ranks)
        if not flat:
            return
        self._note(mark, mark.bytes, flat)
        self._zeros += own
        self._note(mark, mark.bytes - mark.gradient_bytes, flat * (1 + self.sums.taken))
        self._summed += (self.sums.after - self.sums.before) * flat
        self._flat = 0 if self.sums.keeps_flat else flat


def extrapolated_marks(one: Sequence[Mark], other: Sequence[Mark], share: float) -> tuple[Mark, ...]:
    """Return the marks of a micro-batch of another size, on a line through those of two counts.

    Args:
        one: Marks of the first count.
        other: Marks of the second one.
        share: Place on the line; 0 for the first count and 1 for the second one.

    Raises:
        UsageError: The passes came to the units in different orders.
    """
    if [(each.unit, each.kind) for each in one] != [(each.unit, each.kind) for each in other]:
        raise UsageError(
            "the units of the model run in an order that depends on the number of samples, so larger micro-batches of the sharded model "
            "cannot be counted; name units in sharding.units that always run, or count the job with sharding.stage=0"
        )

    def between(before: int, after: int) -> int:
        return max(round(before + share * (after - before)), 0)

    return tuple(
        replace(mine, bytes=between(mine.bytes, its.bytes), peak=between(mine.peak, its.peak))
        for mine, its in zip(one, other, strict=True)
    )
