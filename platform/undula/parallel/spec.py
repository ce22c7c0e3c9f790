"""Spec of the gradient: the part of a job's settings that engines use."""

from typing import Annotated, Literal

from annotated_types import Ge, Gt
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.errors import STRICT

EngineName = Literal["torch", "horovod"]
Reduction = Literal["average", "sum", "adasum"]
Compression = Literal["none", "fp16"]


@checked_dataclass(frozen=True, config=STRICT)
class GradientSpec:
    """Operations on the gradient before the optimizer's step."""

    max_norm: Annotated[float, Gt(0)] | None = None
    """Maximum norm of the gradient, to which larger gradients are clipped; by default gradients are not clipped."""
    reduce: Reduction = "average"
    """Operation that combines the virtual workers' gradients. `average` is their mean over the step's samples. `sum` is this mean times the
    number of virtual workers, which equals Horovod's `Sum` over as many ranks. `adasum` is Adasum (arXiv:2006.02924); each rank then needs
    memory for one gradient of each of its virtual workers and one gradient of each rank."""
    compression: Compression = "none"
    """Format in which gradients are sent between workers: unchanged (none) or as 16-bit floats (fp16), whose rounding depends on the number
    of workers. With fp16, sums above 65,504 in absolute value become infinite, and a warning event says so; values below about 6e-8 become
    0."""
    noise_every_steps: Annotated[int, Ge(0)] = 0
    """Number of steps between measurements of the gradient noise scale (arXiv:1812.06162); 0 for none. The ledger records it as
    `noise_scale`, in samples. If schedule.batch_rule needs the noise scale, every step measures it."""
