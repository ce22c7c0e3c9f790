"""What the ranks measured of a step, summed to what the step was: loss, seconds, sample ids, logged values."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SECONDS = ("data_s", "compute_s", "communication_s", "other_s")
_LIMB_BITS = 16  # a float64 sum of 16-bit limbs is exact for up to 2^37 ranks


@dataclass
class LocalStats:
    """One rank's part of a step."""

    loss_sum: float = 0.0
    """Sum over its samples of the loss."""
    sample_digest: int = 0
    """Modulo 2^64."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SECONDS, 0.0))
    logged: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By name: weighted sum, weight."""
    has_saved: bool = False
    """Whether a checkpoint waits to be collected."""


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
            loss (mean over samples), seconds (means over ranks), sample_digest, logged (weighted means) and all_have_saved.
        """
        total = self._sum(local)
        if total[-1] > 0:  # some rank has logged a name that the others do not know yet
            self._agree_on_names(local)
            total = self._sum(local)
        world_size = dist.get_world_size(self._group)
        limbs = [int(limb) for limb in total[1:5]]
        sums = total[9:-2].tolist()
        return {
            "loss": float(total[0]) / step_samples,
            "sample_digest": sum(limb << (_LIMB_BITS * place) for place, limb in enumerate(limbs)) % 2**64,
            **{name: float(total[5 + place]) / world_size for place, name in enumerate(SECONDS)},
            "all_have_saved": int(total[-2]) == world_size,
            "logged": {
                name: sums[2 * place] / sums[2 * place + 1]
                for place, name in enumerate(self._names)
                if sums[2 * place + 1] > 0
            },
        }

    def _sum(self, local: LocalStats) -> Tensor:
        limbs = [(local.sample_digest >> (_LIMB_BITS * place)) % 2**_LIMB_BITS for place in range(4)]
        logged = [part for name in self._names for part in local.logged.get(name, (0.0, 0.0))]
        has_new = any(name not in self._names for name in local.logged)
        seconds = [local.seconds[name] for name in SECONDS]
        flags = [float(local.has_saved), float(has_new)]
        vector = torch.tensor([local.loss_sum, *limbs, *seconds, *logged, *flags], dtype=torch.float64)
        dist.all_reduce(vector, group=self._group)
        return vector

    def _agree_on_names(self, local: LocalStats) -> None:
        names: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(names, sorted(local.logged), group=self._group)
        new = sorted({name for of_rank in names for name in of_rank} - set(self._names))
        self._names += new
