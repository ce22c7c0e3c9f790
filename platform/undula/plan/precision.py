"""Precision of a run: the number format in which the model computes, and the scale of its loss. It is part of the logical run."""

import math
from typing import Annotated, Literal

from annotated_types import Gt
from pydantic.dataclasses import dataclass as checked_dataclass

from undula.errors import STRICT

Compute = Literal["fp32", "bf16", "fp16"]


@checked_dataclass(frozen=True, config=STRICT)
class PrecisionSpec:
    """Number format in which the model computes. Parameters, gradients and the optimizer's state are fp32 in any case."""

    compute: Compute = "fp32"
    """Format of the forward and the backward pass. With bf16 and fp16, the model runs under torch.autocast, in training and in validation,
    and returns fp32. With `sharding.gather: compute`, a sharded model gets FSDP2's mixed precision instead."""
    loss_scale: Literal["dynamic"] | Annotated[float, Gt(0)] = "dynamic"
    """Factor on the loss with `compute: fp16`, which keeps small gradients from becoming 0: `dynamic` for torch.amp.GradScaler's rule, or a
    fixed power of two. A step whose gradient overflows is skipped on all workers: it counts with its samples, but the weights stay."""

    def __post_init__(self) -> None:
        if self.loss_scale == "dynamic":
            return
        if self.compute != "fp16":
            raise ValueError(
                f"loss_scale is {self.loss_scale:g}, but compute is {self.compute}, and only compute=fp16 scales the loss; "
                "remove loss_scale"
            )
        if math.frexp(self.loss_scale)[0] != 0.5:
            raise ValueError(
                f"loss_scale is {self.loss_scale:g}, which is not a power of two, so that scaling would round the gradients; "
                f"set it to {2.0 ** round(math.log2(self.loss_scale)):g} or to dynamic"
            )


FP32 = PrecisionSpec()
