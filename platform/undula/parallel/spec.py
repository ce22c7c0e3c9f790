"""Specs of the gradient and of the activations: the parts of a job's settings that decide how a model computes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from annotated_types import Ge, Gt, MinLen
from pydantic import StringConstraints
from pydantic.dataclasses import dataclass as checked_dataclass

from undula import extensions
from undula.errors import STRICT
from undula.plan.precision import Compute

LIBRARIES = "undula.engines"
"""Group of the entry points of libraries that reduce gradients, by the value of `engine`."""
OWN_LIBRARIES: Mapping[str, str] = {"horovod": "undula.elastic.ray.horovod_trainer:LIBRARY"}
if TYPE_CHECKING:
    EngineName: TypeAlias = str
else:
    EngineName = Literal[("torch", *extensions.names(LIBRARIES, OWN_LIBRARIES))]
Reduction = Literal["average", "sum", "adasum"]
Compression = Literal["none", "fp16", "bf16"]
UnitNames = Literal["auto"] | Annotated[tuple[Annotated[str, MinLen(1)], ...], MinLen(1)]
"""Names of modules, in which each part between dots can be a pattern; `auto` for the repeated blocks."""


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
    """Format to which sums of gradients are rounded, and in which they are sent between workers: unchanged (none), or 16-bit floats (fp16,
    bf16). The sums of virtual workers are rounded at any number of workers, also at one. With fp16, sums above 65,504 in absolute value
    become infinite, and a warning event says so; values below about 6e-8 become 0. With bf16, numbers have 8 significant bits."""
    noise_every_steps: Annotated[int, Ge(0)] = 0
    """Number of steps between measurements of the gradient noise scale (arXiv:1812.06162); 0 for none. The ledger records it as
    `noise_scale`, in samples. If schedule.batch_rule needs the noise scale, every step measures it."""


@checked_dataclass(frozen=True, config=STRICT)
class ShardingSpec:
    """Sharding of a model over the workers, with torch's `fully_shard` (FSDP2). Only `gather` and `offload` change bits of the result."""

    stage: Literal[0, 1, 2, 3] = 0
    """Parts of a step of which no worker has the whole, as ZeRO numbers them (arXiv:1910.02054): nothing (0), the optimizer's state (1),
    also the gradient (2), also the parameters (3). Between steps, stages 1, 2 and 3 shard the parameters as well."""
    units: UnitNames = "auto"
    """Modules that are gathered one at a time: a list of names in which each part between dots can be a pattern, such as `[encoder.*]`.
    `auto` takes the repeated blocks, as `activations.units` does. The rest of the model is one more unit."""
    gather: Literal["fp32", "compute"] = "fp32"
    """Format in which parameters are gathered: their own (fp32), or that of `precision.compute`, which halves the bytes. `compute` has
    other bits than the unsharded model, because whole units then compute in 16 bits, and not only the operations that autocast chooses."""
    copies: Literal["head", "none"] = "head"
    """Where copies of the shards are kept beside the nodes that train: in the memory of the head, where the copies of all workers need room
    twice, or nowhere, so that the loss of a node costs the steps since the last checkpoint."""
    offload: Literal["none", "all"] = "none"
    """Shards that are kept in host memory: none, or those of the parameters and of the optimizer's state (all), so that a GPU has only what
    is gathered of them. The optimizer then steps on the CPU, whose results can have other last bits than those of a GPU."""

    def __post_init__(self) -> None:
        given = (self.units, self.gather, self.copies, self.offload)
        if not self.stage and given != ("auto", "fp32", "head", "none"):
            raise ValueError(
                "units, gather, copies and offload have no effect with stage=0; set stage to 1, 2 or 3, or remove them"
            )

    @property
    def interleaves(self) -> bool:
        """Whether workers take the virtual workers in turn, so that each round of them can be added up at once."""
        return self.stage >= 2


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a job that decide which engine trains it, and how the engine combines gradients."""

    virtual_workers: int
    """Number of virtual workers of the plan."""
    engine: EngineName = "torch"
    deterministic: bool = False
    gradient: GradientSpec = field(default_factory=GradientSpec)
    measures_noise: bool = False
    """Whether the job measures the gradient noise scale."""
    compute: Compute = "fp32"
    sharding: ShardingSpec = field(default_factory=ShardingSpec)


Keep = Annotated[str, StringConstraints(pattern=r"^(all|none|selective|sqrt|every_[1-9][0-9]*)$")]


@checked_dataclass(frozen=True, config=STRICT)
class ActivationsSpec:
    """Activations that the forward pass keeps for the backward pass. No setting changes any bit of the result."""

    keep: Keep = "all"
    """Activations of the units that are kept; the others are recomputed in the backward pass, which takes up to a third more computation.
    `all`; `none` (only the input of each unit); `selective` (also the results of matrix products, convolutions and attention);
    `every_N`, such as `every_4` (only the input of every N-th unit, so that N units are recomputed together); or `sqrt`, which is
    `every_N` for the square root of the number of units."""
    units: UnitNames = "auto"
    """Modules whose activations are recomputed or offloaded: a list of names in which each part between dots can be a pattern, such as
    `[encoder.*, decoder.*]`. `auto` takes the repeated blocks: the modules of the longest ModuleList or Sequential of one class, and of
    all others of this class."""
    offload: bool = False
    """Whether the kept activations of the units wait in host memory for the backward pass, pinned if the model is on a GPU."""

    def __post_init__(self) -> None:
        if self.offload and self.keep == "selective":
            raise ValueError(
                "offload=true cannot be combined with keep=selective, which keeps results of operations on the device; set keep to all, "
                "none or sqrt"
            )
        if self.keep == "all" and not self.offload and self.units != "auto":
            raise ValueError("units has no effect if everything is kept; set keep or offload, or remove units")

    @property
    def is_default(self) -> bool:
        """Whether autograd keeps the activations as usual."""
        return self.keep == "all" and not self.offload

    def segment(self, units: int) -> int:
        """Return the number of units that are recomputed together, given the number of units of the model."""
        if self.keep == "sqrt":
            return max(round(math.sqrt(units)), 1)
        return int(self.keep.removeprefix("every_")) if self.keep.startswith("every_") else 1
