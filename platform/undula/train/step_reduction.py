"""Reduction of each step's measurements over the ranks: losses, seconds, sample ids, norms, logged values, and requests of the ranks.

Losses, digests, norms and logged values are summed exactly, so that they do not depend on the number of ranks.

Also here: sums of Python's floating-point numbers that are equal bit for bit in any order of the terms.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from undula.errors import UsageError
from undula.plan.noise import StepNorms

TOTAL_BITS = 1074
"""Number of binary places of a total: all that a float64 can have."""


def exact_total(values: Iterable[float], weights: Iterable[float] | None = None) -> tuple[int, float]:
    """Return the sum of some values in a form that can be added to other sums in any order.

    Args:
        values: Terms of the sum.
        weights: Factor of each term; by default 1. A product of a term and a factor that is no integer may be cut off after TOTAL_BITS.

    Returns:
        The sum of the finite values as an integer in units of 2^-TOTAL_BITS, and the sum of the values that are not finite.
    """
    total, not_finite = 0, 0.0
    for value, weight in zip(values, weights, strict=True) if weights is not None else ((each, 1) for each in values):
        if math.isfinite(value) and math.isfinite(weight):
            (numerator, denominator), (factor, divisor) = value.as_integer_ratio(), weight.as_integer_ratio()
            total += (numerator * factor << TOTAL_BITS) // (denominator * divisor)
        else:
            not_finite += value * weight
    return total, not_finite


def total_value(total: int, not_finite: float) -> float:
    """Convert a result of `exact_total`, or the sum of several results, to a float."""
    try:
        return float(total / 2**TOTAL_BITS + not_finite)
    except OverflowError:
        return math.copysign(math.inf, total) + not_finite


SECONDS = ("data_s", "transfer_s", "compute_s", "communication_s", "other_s", "blocked_s")
_LIMB_BITS = 32  # a float64 sum of 32-bit limbs is exact for up to 2^21 ranks
_BITS = 3
_DIGEST_LIMBS, _EXACT_LIMBS = 2, (TOTAL_BITS + 1024 + 64) // 32
"""Number of limbs of a digest, and of a sum of numbers below 2^1024, of which there may be 2^64."""
Local = TypeVar("Local")
Total = TypeVar("Total")


@dataclass(frozen=True)
class Reduction(Generic[Local, Total]):
    """Reduction of one value of each rank to one value of the step, by a sum over the ranks."""

    width: int
    """Number of float64 terms that a rank contributes."""
    encode: Callable[[Local], Sequence[float]]
    """Function that returns the terms of a rank's value."""
    decode: Callable[[Sequence[float], int], Total]
    """Function that returns the result, given the sums of the terms and the number of ranks."""


def reduced(reduction: Reduction[Any, Any], **default: Any) -> Any:
    """Return a dataclass field with a reduction. `default` has arguments of `dataclasses.field`."""
    return field(metadata={"reduction": reduction}, **default)


SUM = Reduction[float, float](1, lambda value: [value], lambda sums, ranks: sums[0])
MEAN = Reduction[float, float](1, lambda value: [value], lambda sums, ranks: sums[0] / ranks)
FROM_FIRST = SUM
"""Reduction of a value that rank 0 measures and that is 0 on all other ranks."""
ANY = Reduction[bool, bool](1, lambda value: [float(value)], lambda sums, ranks: sums[0] > 0)
BITS = Reduction[int, int](
    _BITS,
    lambda value: [float(value >> place & 1) for place in range(_BITS)],
    lambda sums, ranks: sum((total > 0) << place for place, total in enumerate(sums)),
)
"""Bits that are set on any rank, of _BITS."""
SAME = Reduction[int, bool](
    2, lambda value: [float(value), float(value) ** 2], lambda sums, ranks: sums[1] * ranks == sums[0] ** 2
)
"""Whether all ranks have the same number, which is below 2^16. This is exact for up to 1,024 ranks."""
ALL = Reduction[bool, bool](1, lambda value: [float(value)], lambda sums, ranks: sums[0] == ranks)


def _limbs(value: int, count: int) -> list[float]:
    """Split an integer into `count` limbs, which can be summed over ranks. The last limb is signed and has all remaining bits."""
    limbs = [(value >> (_LIMB_BITS * place)) % 2**_LIMB_BITS for place in range(count - 1)]
    return [*map(float, limbs), float(value >> (_LIMB_BITS * (count - 1)))]


def _joined(limbs: Sequence[float]) -> int:
    return sum(int(limb) << (_LIMB_BITS * place) for place, limb in enumerate(limbs))


def _encode_exact(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    total, not_finite = exact_total(values, weights)
    return [not_finite, *_limbs(total, _EXACT_LIMBS)]


def _mapping(names: Sequence[str], of: Reduction[float, float]) -> Reduction[Mapping[str, float], dict[str, float]]:
    """Return a reduction of several values by name."""
    return Reduction(
        len(names),
        lambda values: [of.encode(values[name])[0] for name in names],
        lambda sums, ranks: {name: of.decode([total], ranks) for name, total in zip(names, sums, strict=True)},
    )


EXACT_SUM = Reduction[Sequence[float], float](
    1 + _EXACT_LIMBS, _encode_exact, lambda sums, ranks: total_value(_joined(sums[1:]), sums[0])
)
"""Sum of all values of all ranks, which does not depend on their order."""
DIGEST = Reduction[int, int](
    _DIGEST_LIMBS, lambda value: _limbs(value % 2**64, _DIGEST_LIMBS), lambda sums, ranks: _joined(sums) % 2**64
)
"""Sum modulo 2^64."""


@dataclass
class Wants:
    """Requests for the boundary after the step, of one rank or reduced over all ranks."""

    leaves: bool = reduced(ANY, default=False)
    """Whether to leave the group, once no checkpoint is being written."""
    abandons: bool = reduced(ANY, default=False)
    """Whether to leave without waiting for a checkpoint that is being written."""
    saves: bool = reduced(ANY, default=False)
    """Whether to write a checkpoint at once."""
    owes_save: bool = reduced(ANY, default=False)
    """Whether a checkpoint was due but did not begin, because another one was being written or the former group ended."""
    snapshots: bool = reduced(ANY, default=False)
    """Whether to take a snapshot."""
    sends: bool = reduced(ANY, default=False)
    """Whether to send a replica of the snapshot to the controller."""
    is_sending: bool = reduced(ANY, default=False)
    """Whether a replica of the last snapshot is still on its way. The next one is sent only after it has arrived from all ranks."""
    lacks_memory: bool = reduced(ANY, default=False)
    """Whether a node has no memory for a snapshot of a rank's pieces. The snapshots of the other ranks are then useless."""
    has_saved: bool = reduced(ALL, default=False)
    """Whether the writing of a checkpoint has ended, so that its result can be collected."""


def _fields_of(kind: type) -> tuple[tuple[str, Reduction[Any, Any]], ...]:
    return tuple((field.name, field.metadata["reduction"]) for field in fields(kind) if "reduction" in field.metadata)


_WANTED = _fields_of(Wants)


def _decode_wants(sums: Sequence[float], ranks: int) -> Wants:
    values = zip(_WANTED, sums, strict=True)
    return Wants(**{name: reduction.decode([total], ranks) for (name, reduction), total in values})


WANTS = Reduction[Wants, Wants](
    len(_WANTED), lambda wants: [float(getattr(wants, name)) for name, _ in _WANTED], _decode_wants
)


@dataclass
class LocalStep:
    """Measurements of a step on one rank."""

    losses: list[float] = reduced(EXACT_SUM, default_factory=list)
    """Sum of the loss over the samples of each micro-batch."""
    sample_digest: int = reduced(DIGEST, default=0)
    """Digest of the ids of the samples, modulo 2^64."""
    seconds: dict[str, float] = reduced(_mapping(SECONDS, MEAN), default_factory=partial(dict.fromkeys, SECONDS, 0.0))
    small_squares: list[float] = reduced(EXACT_SUM, default_factory=list)
    """Squared gradient norm of each micro-batch, times its share of the step's samples; empty if the step is not measured."""
    micro_batches: float = reduced(SUM, default=0.0)
    """Number of micro-batches in `small_squares`."""
    grad_norm: float = reduced(FROM_FIRST, default=0.0)
    """Norm of the step's gradient before clipping."""
    overflows: bool = reduced(ANY, default=False)
    """Whether a scaled gradient has overflowed, so that all ranks must skip the step. Ranks with shards may see different gradients."""
    changes: int = reduced(BITS, default=0)
    """Places after the former update at which the script has changed the weights or the optimizer's state, as bits."""
    settings: int = reduced(SAME, default=0)
    """Digest of the settings of the optimizer, and of which parameters are frozen."""
    weights: int = reduced(SAME, default=0)
    """Digest of the weights and the state of the optimizer before the step, or of the changes of shards; 0 if ranks may have other ones."""
    stored_steps: float = reduced(FROM_FIRST, default=0.0)
    """Number of steps whose ledger rows have reached storage."""
    wants: Wants = reduced(WANTS, default_factory=Wants)
    logged: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Logged values and their weights, by name."""

    @property
    def ready_s(self) -> float:
        """Seconds after which the rank had nothing left to do but communicate."""
        return sum(self.seconds[name] for name in ("data_s", "transfer_s", "compute_s"))


@dataclass(frozen=True)
class StepTotals:
    """Measurements of a step, reduced over all ranks. The fields are those of LocalStep."""

    losses: float
    """Sum of the loss over all samples of the step."""
    sample_digest: int
    seconds: dict[str, float]
    """Mean durations over the ranks in seconds, by class, and `wait_s`, for which ranks waited for the one that was ready last."""
    small_squares: float
    micro_batches: float
    grad_norm: float
    overflows: bool
    changes: int
    settings: bool
    weights: bool
    stored_steps: float
    wants: Wants
    logged: dict[str, float]
    """Weighted mean of each logged value, by name."""

    def norms(self, samples: int, scale: float = 1.0) -> StepNorms:
        """Return the gradient norms of the step, for the noise scale.

        Args:
            samples: Number of samples in the step.
            scale: Factor by which gradients are larger than the mean over samples.
        """
        return StepNorms(self.small_squares, (self.grad_norm / scale) ** 2, int(self.micro_batches), samples)


class StepReducer:
    """Reduces the measurements of the ranks with one small all-reduce per step.

    Ranks may log values of different names. When a name is logged for the first time, the ranks exchange the names that they log.

    Args:
        group: Process group of the ranks, which must support CPU tensors.
        local_type: LocalStep, or a subclass with more fields.
        total_type: StepTotals, or a subclass with more fields.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        local_type: type[LocalStep] = LocalStep,
        total_type: type[StepTotals] = StepTotals,
    ):
        self._group = group
        self._fields = _fields_of(local_type)
        self._total_type = total_type
        self._names: list[str] = []

    def reduce(self, local: LocalStep) -> StepTotals:
        """Reduce the measurements of a step. All ranks must call this."""
        sums = self._sum(local)
        if next(sums)[0] > 0:
            self._agree_on_names(local)
            sums = self._sum(local)
            next(sums)
        ranks, ready = dist.get_world_size(self._group), next(sums)
        totals = {name: reduction.decode(next(sums), ranks) for name, reduction in self._fields}
        logged = {name: [EXACT_SUM.decode(next(sums), ranks) for _ in range(2)] for name in self._names}
        means = {name: total / weight for name, (total, weight) in logged.items() if weight > 0}
        totals["seconds"]["wait_s"] = max(ready) - sum(ready) / ranks
        return self._total_type(**totals, logged=means)

    def _sum(self, local: LocalStep) -> Iterator[list[float]]:
        """Return sums over the ranks: first the number of ranks with a new name, then the seconds after which each rank was ready, which
        has a place of its own, then each field, and last the sum and the weight of each logged value."""
        ready = [0.0] * dist.get_world_size(self._group)
        ready[dist.get_rank(self._group)] = local.ready_s
        terms = [[float(any(name not in self._names for name in local.logged))], ready]
        terms += [list(reduction.encode(getattr(local, name))) for name, reduction in self._fields]
        for name in self._names:
            values = local.logged.get(name, [])
            weights = [weight for _, weight in values]
            terms += [_encode_exact([value for value, _ in values], weights), _encode_exact(weights)]
        flat = [value for values in terms for value in values]
        if dist.get_world_size(self._group) > 1:
            vector = torch.tensor(flat, dtype=torch.float64, device="cpu")
            dist.all_reduce(vector, group=self._group)
            flat = vector.tolist()
        rest = iter(flat)
        return (list(islice(rest, len(values))) for values in terms)

    def _agree_on_names(self, local: LocalStep) -> None:
        names: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(names, sorted(local.logged), group=self._group)
        self._names += sorted({name for of_rank in names for name in of_rank} - set(self._names))


def exact_sum(values: float | Sequence[float], group: dist.ProcessGroup | None = None) -> float:
    """Return the sum of the values of all ranks, which does not depend on their order. All ranks must call this.

    Args:
        values: A number, or several ones, that this rank adds.
        group: Process group of the ranks; None for a process alone.
    """
    own = list(map(float, values if isinstance(values, Sequence) else [values]))
    vector = torch.tensor(EXACT_SUM.encode(own), dtype=torch.float64, device="cpu")
    if group:
        dist.all_reduce(vector, group=group)
    return EXACT_SUM.decode(vector.tolist(), 1)


def exact_means(
    sums: Mapping[str, Sequence[float]], samples: int, group: dist.ProcessGroup
) -> tuple[dict[str, float], int]:
    """Return means over the samples of all ranks by name, and the number of these samples. All ranks must call this.

    The means do not depend on the order of the sums.

    Args:
        sums: Sums of values on this rank, by name; empty if the rank has no samples.
        samples: Number of samples on this rank.
        group: Process group of the ranks.

    Raises:
        UsageError: Ranks with samples have values of other names. All ranks raise it.
    """
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, ({name: exact_total(total) for name, total in sums.items()}, samples), group=group)
    held = [totals for totals, count in parts if count]
    if differing := next((totals for totals in held if totals.keys() != held[0].keys()), None):
        raise UsageError(
            f"the validation function returned {sorted(held[0])} on one worker and {sorted(differing)} on another; return the same names "
            "for every batch"
        )
    count = sum(count for _, count in parts)
    means = {}
    for name in held[0]:
        total, not_finite = (sum(column) for column in zip(*(totals[name] for totals in held), strict=True))
        means[name] = total_value(total, not_finite) / count
    return means, count
