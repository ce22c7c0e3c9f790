"""The part of a job's spec that says how gradients are reduced."""

from typing import Annotated, Literal

from annotated_types import Ge, Gt
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.errors import STRICT

EngineName = Literal["torch", "horovod"]


@checked_dataclass(frozen=True, config=STRICT)
class GradientSpec:
    """What happens to the gradient before the optimizer sees it."""

    max_norm: Annotated[float, Gt(0)] | None = None
    """Norm to which the gradient is clipped; by default it is not."""
    reduce: Literal["average", "sum", "adasum"] = "average"
    """How the virtual workers' gradients become one: their mean over the step's samples; that times the number of virtual workers, as
    Horovod's `Sum` over as many ranks; or Adasum (arXiv:2006.02924), with the memory of one gradient for each virtual worker of a rank,
    and for each rank."""
    compression: Literal["none", "fp16"] = "none"
    """How gradients go over the network: as they are, or as 16-bit floats, whose rounding depends on the number of workers."""
    noise_every_steps: Annotated[int, Ge(0)] = 0
    """Steps between measurements of the gradient noise scale (arXiv:1812.06162), which the ledger then has as `noise_scale`, in samples;
    0 for none. A schedule.batch_rule that needs it has it measured in each."""
