"""What the ranks measured of a step, summed to what the step was: loss, seconds, sample ids, logged values.

Losses and digests are summed exactly, so that they do not depend on how many ranks there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from undula.run.exact import exact_total, total_value

SECONDS = ("data_s", "compute_s", "communication_s", "other_s", "blocked_s")
FLAGS = 5
_LIMB_BITS = 16  # a float64 sum of 16-bit limbs is exact for up to 2^37 ranks


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
    has_saved: bool = False
    """Whether a checkpoint waits to be collected."""
    leaves: bool = False
    """Whether this rank was asked to leave the group after the step."""
    stored_steps: int = 0
    """Steps whose rows of the ledger have reached storage; of rank 0, and 0 of the others."""
    saves: bool = False
    """Whether it was asked for a checkpoint there."""


class StepReducer:
    """Sums LocalStats over the ranks of a group with one small all-reduce a step.

    Logged names are agreed on when one first shows up, so that ranks may log different ones.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self._names: list[str] = []

    def reduce(self, local: LocalStats, step_samples: int) -> dict[str, Any]:
        """Sum up a step.

        Returns:
            loss (mean over samples), seconds (means over ranks), sample_digest, logged (weighted means), all_have_saved,
            stored_steps, and whether any rank leaves and saves.
        """
        total = self._sum(local)
        if total[-1] > 0:  # some rank has logged a name that the others do not know yet
            self._agree_on_names(local)
            total = self._sum(local)
        world_size = dist.get_world_size(self._group)
        odd, *rest = total.tolist()
        digest, losses, seconds, sums = rest[:4], rest[4:12], rest[12:17], rest[17:-FLAGS]
        return {
            "loss": total_value(_joined(losses), odd) / step_samples,
            "sample_digest": _joined(digest) % 2**64,
            **{name: value / world_size for name, value in zip(SECONDS, seconds, strict=True)},
            "all_have_saved": int(total[-2]) == world_size,
            "stored_steps": int(total[-5]),
            "leaves": bool(total[-4] > 0),
            "saves": bool(total[-3] > 0),
            "logged": {
                name: sums[2 * place] / sums[2 * place + 1]
                for place, name in enumerate(self._names)
                if sums[2 * place + 1] > 0
            },
        }

    def _sum(self, local: LocalStats) -> Tensor:
        losses, odd = exact_total(local.losses)
        limbs = [*_limbs(local.sample_digest, 4), *_limbs(losses, 8)]
        logged = [part for name in self._names for part in local.logged.get(name, (0.0, 0.0))]
        has_new = any(name not in self._names for name in local.logged)
        seconds = [local.seconds[name] for name in SECONDS]
        flags = [float(flag) for flag in (local.leaves, local.saves, local.has_saved, has_new)]
        vector = torch.tensor([odd, *limbs, *seconds, *logged, local.stored_steps, *flags], dtype=torch.float64)
        dist.all_reduce(vector, group=self._group)
        return vector

    def _agree_on_names(self, local: LocalStats) -> None:
        names: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(names, sorted(local.logged), group=self._group)
        new = sorted({name for of_rank in names for name in of_rank} - set(self._names))
        self._names += new


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
