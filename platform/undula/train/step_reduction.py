"""What the ranks measured of a step, summed to what the step was: loss, seconds, sample ids, norms, logged values.

Losses, digests and norms are summed exactly, so that they do not depend on how many ranks there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist

from undula.parallel.reduce.exact import exact_total, total_value
from undula.plan.noise import StepNorms

SECONDS = ("data_s", "compute_s", "communication_s", "other_s", "blocked_s")
_LIMB_BITS = 16  # a float64 sum of 16-bit limbs is exact for up to 2^37 ranks
_DIGEST_LIMBS, _LOSS_LIMBS = 4, 8


@dataclass
class Asked:
    """What a rank asks for after the step, or all of them."""

    leaves: bool = False
    """To leave the group."""
    gives: bool = False
    """Not to keep for itself what only one rank has."""
    saves: bool = False
    """A durable checkpoint."""
    snapshots: bool = False
    """A snapshot in memory."""
    sends: bool = False
    """A copy of it at the controller."""
    lacks_memory: bool = False
    """For snapshots of its part, without which the others' are of no use."""
    has_saved: bool = False
    """To collect a checkpoint that it is done with; agreed on by all, where any rank's word is enough for the others."""


@dataclass
class LocalStats:
    """One rank's part of a step."""

    losses: list[float] = field(default_factory=list)
    """Of its micro-batches: the sum of the loss over samples."""
    sample_digest: int = 0
    """Modulo 2^64."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SECONDS, 0.0))
    logged: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By name: weighted sum, weight."""
    small_squares: list[float] = field(default_factory=list)
    """Of its micro-batches: the squared norm of the gradient, times their part of the step's samples; where that is measured."""
    whole_square: float = 0.0
    """Squared norm of the step's gradient; of rank 0, and 0 of the others."""
    stored_steps: int = 0
    """Steps whose rows of the ledger have reached storage; of rank 0, and 0 of the others."""
    asked: Asked = field(default_factory=Asked)


@dataclass(frozen=True)
class StepStats:
    """A step over all ranks."""

    loss: float
    """Mean over its samples."""
    sample_digest: int
    seconds: dict[str, float]
    """Means over the ranks."""
    logged: dict[str, float]
    """Weighted means."""
    norms: StepNorms
    """Of gradients; of no micro-batches where they were not measured."""
    stored_steps: int
    asked: Asked


class StepReducer:
    """Sums LocalStats over the ranks of a group with one small all-reduce a step.

    Logged names are agreed on when one first shows up, so that ranks may log different ones.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._names: list[str] = []

    def reduce(self, local: LocalStats, step_samples: int) -> StepStats:
        """Sum up a step."""
        total = self._sum(local)
        if total["has_new_name"][0] > 0:
            self._agree_on_names(local)
            total = self._sum(local)
        world_size = dist.get_world_size(self._group)
        asked = {name: count > 0 for name, count in zip(_ASKED, total["asked"], strict=True)}
        asked["has_saved"] = total["asked"][_ASKED.index("has_saved")] == world_size
        sums = zip(self._names, total["logged"][::2], total["logged"][1::2], strict=True)
        return StepStats(
            loss=total_value(_joined(total["losses"]), total["odd_losses"][0]) / step_samples,
            sample_digest=_joined(total["sample_digest"]) % 2**64,
            seconds={name: value / world_size for name, value in zip(SECONDS, total["seconds"], strict=True)},
            logged={name: value / weight for name, value, weight in sums if weight > 0},
            norms=StepNorms(
                small_squared=total_value(_joined(total["small_squares"]), total["odd_squares"][0]),
                whole_squared=total["whole_square"][0],
                micro_batches=int(total["micro_batches"][0]),
                samples=step_samples,
            ),
            stored_steps=int(total["stored_steps"][0]),
            asked=Asked(**asked),
        )

    def _sum(self, local: LocalStats) -> dict[str, list[float]]:
        losses, odd = exact_total(local.losses)
        squares, odd_squares = exact_total(local.small_squares)
        terms: dict[str, list[float]] = {
            "odd_losses": [odd],
            "losses": [*map(float, _limbs(losses, _LOSS_LIMBS))],
            "sample_digest": [*map(float, _limbs(local.sample_digest, _DIGEST_LIMBS))],
            "seconds": [local.seconds[name] for name in SECONDS],
            "logged": [part for name in self._names for part in local.logged.get(name, (0.0, 0.0))],
            "odd_squares": [odd_squares],
            "small_squares": [*map(float, _limbs(squares, _LOSS_LIMBS))],
            "whole_square": [local.whole_square],
            "micro_batches": [float(len(local.small_squares))],
            "stored_steps": [float(local.stored_steps)],
            "asked": [float(getattr(local.asked, name)) for name in _ASKED],
            "has_new_name": [float(any(name not in self._names for name in local.logged))],
        }
        vector = torch.tensor([value for values in terms.values() for value in values], dtype=torch.float64)
        dist.all_reduce(vector, group=self._group)
        parts = torch.split(vector, [len(values) for values in terms.values()])
        return {name: part.tolist() for name, part in zip(terms, parts, strict=True)}

    def _agree_on_names(self, local: LocalStats) -> None:
        names: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(names, sorted(local.logged), group=self._group)
        new = sorted({name for of_rank in names for name in of_rank} - set(self._names))
        self._names += new


_ASKED = tuple(each.name for each in fields(Asked))


def exact_mean(losses: Sequence[float], samples: int, group: dist.ProcessGroup) -> tuple[float, int]:
    """The mean over the ranks' samples of sums of losses, which no order changes, and the number of samples."""
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, (*exact_total(losses), samples), group=group)
    totals, odds, counts = (sum(column) for column in zip(*parts, strict=True))
    return total_value(totals, odds) / counts, counts


def _limbs(value: int, count: int) -> list[int]:
    """An integer as limbs that add up, the last of them signed and as large as it takes."""
    limbs = [(value >> (_LIMB_BITS * place)) % 2**_LIMB_BITS for place in range(count - 1)]
    return [*limbs, value >> (_LIMB_BITS * (count - 1))]


def _joined(limbs: list[float]) -> int:
    return sum(int(limb) << (_LIMB_BITS * place) for place, limb in enumerate(limbs))
