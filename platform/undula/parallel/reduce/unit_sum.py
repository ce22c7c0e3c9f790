"""Sum of the gradients of one unit of a sharded model, along the tree over the virtual workers.

Torch's `fully_shard` concatenates the gradients of a unit after each backward pass of it. The classes of this module take this flat
gradient, of shape [numel], in place of torch's reduce-scatter, whose order of terms depends on the number of ranks. The flat gradient has
a slice for each rank, of shape [numel / ranks]. A *leaf* is the sum over the micro-batches of one virtual worker.
"""

from collections.abc import Callable, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from undula.errors import UsageError
from undula.parallel.collectives import OwnCollectives, any_rank, as_bytes
from undula.parallel.layout import Layout
from undula.parallel.reduce.unit_order import Collective, UnitOrder
from undula.plan.tree import Fold, combined


class UnitSum:
    """Sum of which each rank folds whole leaves, those of a contiguous range of virtual workers. Slices are sent once a step.

    It has the methods of torch's `ReduceScatter`.

    Attributes:
        forward_passes: Number of forward passes of the unit since the last backward pass; None if it cannot be counted.
        stream: Stream on which torch gives flat gradients to this sum; None before the first one, and on a CPU.

    Args:
        layout: Layout of the worker group.
        virtual_workers: Number of virtual workers of the plan.
        flat: Tensor of the length, dtype and device of the flat gradient, which need not have memory.
        sent_as: Dtype to which each leaf and each sum of leaves is rounded, and in which slices are sent; None for their own dtype.
        offloads: Whether torch moves its sum to host memory, where the shards of the parameters are.
    """

    def __init__(
        self,
        layout: Layout,
        virtual_workers: int,
        flat: Tensor,
        sent_as: torch.dtype | None = None,
        offloads: bool = False,
    ):
        self._sent_as, self._offloads = sent_as, offloads
        self._all = (0, virtual_workers)
        self._layout = layout
        self._zero = flat.new_zeros((), dtype=sent_as)
        self._length = len(flat)
        self._shares = layout.assignment(virtual_workers)
        self._roots = layout.roots(virtual_workers)
        self.forward_passes: int | None = 0
        self.stream: torch.cuda.Stream | None = None
        self.begin_step()

    def begin_step(self) -> None:
        self._fold = Fold[Tensor | None](self._all[1], _summed)
        self._leaf: Tensor | None = None
        self._counts = self._is_last = self._is_open = self._has_input = False

    def begin_pass(self, counts: bool, is_last: bool) -> None:
        """Prepare a backward pass.

        Args:
            counts: Whether the micro-batch has samples, so that its gradient is part of the sum.
            is_last: Whether it is the last pass in which the ranks run their present virtual workers.
        """
        self._counts, self._is_last, self._is_open = counts, is_last, True
        self._has_input, self.forward_passes = False, 0

    def end_pass(self) -> None:
        self._is_open = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the flat gradient, or, at every second call, for the sum that torch expects.

        Torch moves each parameter's view of its sum to host memory if shards are there. A view of memory on the host stays the view that
        it is, so that nothing is copied, and so that it still says where the parameter is in the sum.
        """
        is_sum, self._has_input = self._has_input, not self._has_input
        return torch.empty(*size, dtype=dtype, device="cpu" if is_sum and self._offloads else device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, op: object, async_op: bool = False
    ) -> None:
        """Take the flat gradient of a backward pass. What torch takes for its sum becomes zero.

        Raises:
            UsageError: The backward pass is one of the script.
        """
        output_tensor.zero_()
        self._require_open()
        if input_tensor.is_cuda:
            self.stream = torch.cuda.current_stream(input_tensor.device)
        self._take(input_tensor)

    def take_alone(self, flat: Tensor) -> None:
        """Take the flat gradient on a single rank, for which torch calls no reduce-scatter."""
        own = flat.clone()
        flat.zero_()
        self._require_open()
        self._take(own)

    def _require_open(self) -> None:
        if not self._is_open:
            raise UsageError(
                "loss.backward() or torch.autograd.grad() was called in place of step.backward(), and would reduce the gradients of a "
                "sharded model; add the loss to that of step.backward(), or set sharding.stage=0"
            )

    def _take(self, flat: Tensor) -> None:
        self._add_to_leaf(flat)

    def _zeros(self, length: int) -> Tensor:
        return self._zero.expand(length)

    def _rounded(self, leaf: Tensor | None) -> Tensor | None:
        if leaf is None or self._sent_as is None:
            return leaf
        _keep_for_stream(leaf)
        return leaf.to(self._sent_as)

    def _add_to_leaf(self, flat: Tensor) -> None:
        if len(flat) != self._length:
            raise UsageError(
                "requires_grad of a parameter of a sharded model was changed between step.batches() and step.backward(), but all workers "
                "must train the same parameters in a step; call requires_grad_() before step.batches() or after step.update()"
            )
        if self._counts:
            self._leaf = _summed(self._leaf, flat)

    def end_leaves(self, place: int) -> None:
        """End the leaves of the ranks' virtual workers number `place`. Those without samples are zero."""
        own = self._shares[self._layout.cell]
        if place < len(own):
            self._fold.push(own[place], self._rounded(self._leaf))
        self._leaf = None

    def total(self) -> Tensor:
        """Return this rank's slice of the sum. All ranks must call this."""
        roots = [*self._fold.roots.values()]
        self.begin_step()  # frees what has been folded
        zeros = self._zeros(self._length)
        own = [zeros if root is None else root for root in roots]
        rows = exchanged(own, list(map(len, self._roots)), zeros, self._layout.shards)
        known = dict(zip(chain.from_iterable(self._roots), rows, strict=True))
        return combined(self._all, known, Tensor.add) + 0.0  # the sign of a zero depends on where a term is missing


class InterleavedUnitSum(UnitSum):
    """Sum of which each rank folds its slice of all leaves. Ranks take the virtual workers in turn, and send slices after each turn.

    Beside the flat gradient, a rank holds 1 + log2(virtual workers) slices if a virtual worker has one micro-batch.

    Attributes:
        order: Order of the ranks' collectives; set before the first step.
        number: Number of the unit in that order.
        collectives: Count of the run's own collectives.
        has_gradient: Function that returns whether the present backward pass has computed a gradient of the unit.
    """

    order: UnitOrder
    number: int
    collectives: OwnCollectives
    has_gradient: Callable[[], bool]
    _passes_of_unit: int | None = None
    """Number of times that a backward pass comes to this unit, if forward passes cannot be counted; None before the first one."""

    def begin_step(self) -> None:
        super().begin_step()
        self._received: Tensor | None = None
        """Slices of the leaves that are open, of all ranks that have one; shape [leaves, numel / ranks]."""
        self._place = self._turn = self._passes = 0
        """Numbers of the ranks' virtual workers whose leaves are ended, now and before the present pass, and of the times that this pass
        has come here."""
        self._expected: int | None = None
        """Number of times that the present backward pass comes here, as often as forward passes have; None if it is not known."""
        self._is_sent = False
        """Whether the leaf of this turn has been sent."""

    @property
    def is_folded(self) -> bool:
        """Whether the slices of the present turn are folded."""
        return self._place > self._turn

    def begin_pass(self, counts: bool, is_last: bool) -> None:
        self._turn = self._place
        if self._passes:
            self._passes_of_unit = max(self._passes, self._passes_of_unit or 0)
        is_known = self.forward_passes is not None
        self._expected, self._passes = self.forward_passes if is_known else self._passes_of_unit, 0
        self._is_sent = False
        super().begin_pass(counts, is_last)

    def _take(self, flat: Tensor) -> None:
        if self._is_sent and not self.has_gradient():
            return  # torch makes zeros for a unit to which no backward pass comes
        self._add_to_leaf(flat)
        self._passes += 1
        if self._is_sent:
            self.order.come_late(self.number)
        elif self._is_last and self._expected is None:
            self.order.note(self.number)
        elif self._is_last and self._passes == self._expected:
            with self.collectives.counted():
                if self.order.reach(Collective("send", self.number)):
                    self.send()

    def send(self) -> None:
        """Send each other rank its slice of this rank's leaf, and add the slices that they send to the open leaves.

        All ranks must call this, in the last pass of each turn, and again after it for a unit of which a rank was late. Slices are folded
        as soon as no rank can be late.
        """
        leaf, self._leaf = self._leaf, None
        is_complete = self.order.is_ending or self._passes == self._expected or not self.order.is_open
        if not is_complete and self._sent_as and leaf is not None:  # a sum over several passes must be rounded once
            leaf, self._leaf = None, leaf
            self.order.late.add(self.number)
        counts = [int(self._place < len(share)) for share in self._shares]
        rounded, zeros = self._rounded(leaf), self._zeros(self._length)
        own = [zeros.contiguous() if rounded is None else rounded] if counts[self._layout.cell] else []
        received = torch.stack(exchanged(own, counts, zeros, self._layout.shards))
        _keep_for_stream(leaf)
        self._received, self._is_sent = _summed(self._received, received), True
        if self.order.is_regular or not any_rank(not is_complete, self._layout.control):
            self._fold_received(self._place)

    def end_leaves(self, place: int) -> None:
        if self._place == place:
            self._fold_received(place)
        self._leaf = None

    def _fold_received(self, place: int) -> None:
        here = [share[place] for share in self._shares if place < len(share)]
        received = [None] * len(here) if self._received is None else self._received
        self._received, self._place = None, place + 1
        for virtual_worker, leaf in zip(here, received, strict=True):
            # A view would keep the slices of all ranks in memory.
            self._fold.push(virtual_worker, None if leaf is None else leaf.clone())

    def total(self) -> Tensor:
        (total,) = self._fold.roots.values()
        self.begin_step()
        return (self._zeros(self._length // self._layout.num_cells) if total is None else total) + 0.0


def exchanged(own: Sequence[Tensor], counts: Sequence[int], like: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return this rank's slice of the tensors of all ranks, in the order of the ranks. All ranks must call this.

    Args:
        own: Tensors of this rank.
        counts: Number of tensors of each rank.
        like: Tensor of the same shape [numel], dtype and device.
        group: Process group of the ranks.
    """
    ranks = len(counts)
    if ranks == 1:
        return list(own)
    length = len(like) // ranks
    slices = [tensor.view(ranks, 1, length) for tensor in own]
    sent = torch.cat(slices, dim=1) if len(slices) > 1 else slices[0].contiguous() if slices else like.new_empty(0)
    received = like.new_empty(sum(counts), length)
    size = length * like.itemsize
    # Sent as bytes, because gloo does not send some dtypes.
    dist.all_to_all_single(
        as_bytes(received), as_bytes(sent), [count * size for count in counts], [len(own) * size] * ranks, group=group
    )
    return list(received)


def _summed(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Add a sum to another one, in place. None counts as zero."""
    if left is None or right is None:
        return right if left is None else left
    for each in (left, right):
        _keep_for_stream(each)
    return left.add_(right)


def _keep_for_stream(tensor: Tensor | None) -> None:
    """Keep the memory of a tensor on a GPU from being used again before the present stream, on which torch reduces, has read it."""
    if tensor is not None and tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
