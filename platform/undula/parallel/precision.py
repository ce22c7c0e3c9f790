"""Mixed precision of a model that is not sharded: autocast around its forward pass, and gradients without the loss scale.

Parameters stay in fp32, so the pieces of the state remain the master copy of the weights.
"""

from collections.abc import Iterable
from typing import Any, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from undula.plan.precision import Compute
from undula.state.pieces import as_real, local_part


def dtype_of(compute: Compute) -> torch.dtype | None:
    """Return the dtype in which matrix products and convolutions compute; None for that of the parameters."""
    match compute:
        case "fp32":
            return None
        case "bf16":
            return torch.bfloat16
        case "fp16":
            return torch.float16
        case _:
            assert_never(compute)


class Autocast:
    """Runs the forward pass of a module under torch.autocast, and returns its 16-bit outputs in fp32.

    Each forward pass has a context of its own. The cache of autocast is off, so that each use of a weight has its own copy in 16 bits:
    with the cache, the gradients of a weight that is used several times would be added up in 16 bits, and recomputed activations would
    get other gradients than kept ones.

    Args:
        module: Module that the script calls.
        device: Device of the module.
        dtype: Dtype of the 16-bit operations.
    """

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype):
        self._device_type = device.type
        self._dtype = dtype
        self._open: list[torch.autocast] = []
        self._hooks = [
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks from the module."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        context = torch.autocast(self._device_type, dtype=self._dtype, cache_enabled=False)
        context.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(context)

    def _leave(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        if self._open:  # empty if a hook before `_enter` has failed
            self._open.pop().__exit__(None, None, None)
        return tree_map_only(Tensor, self._as_fp32, outputs)

    def _as_fp32(self, output: Tensor) -> Tensor:
        return output.float() if output.dtype == self._dtype else output


def unscale(parameters: Iterable[nn.Parameter], scale: float) -> Tensor:
    """Divide all gradients by the loss scale, in place.

    The elements are tested and not their norm, because the norm of finite elements can overflow.

    Returns:
        A scalar on the device: 1 if an element of this rank's gradients is infinite or NaN, else 0. This does not wait for the device.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            values = _stored_values(parameter)
            by_kind.setdefault((values.device, values.dtype), []).append(values)
    flags = []
    for (device, _), gradients in by_kind.items():
        flag, inverse = torch.zeros((), device=device), torch.full((), 1.0 / scale, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, inverse)
        flags.append(flag)
    return torch.stack(flags).max() if flags else torch.zeros((), device="cpu")


def _stored_values(parameter: nn.Parameter) -> Tensor:
    """Return the memory that holds this rank's elements of a gradient, which may be sharded, sparse or complex."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        parameter.grad = gradient = gradient.coalesce()
        gradient = gradient._values()
    return as_real(local_part(gradient))


def cpu_problem(compute: Compute) -> str | None:
    """Return the reason why this machine's CPU cannot compute in a format, as a sentence; None if it can."""
    dtype = dtype_of(compute)
    if dtype is None:
        return None
    # The weights are not drawn, because the script's random numbers must not depend on this check.
    kernel = torch.ones(2, 1, 3, requires_grad=True, device="cpu")
    weight = torch.ones(2, 12, requires_grad=True, device="cpu")
    try:
        with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
            outputs = F.linear(F.conv1d(torch.ones(1, 1, 8, device="cpu"), kernel).flatten(1), weight)
        outputs.float().sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        return (
            f"precision.compute is {compute}, but torch cannot train in {compute} on this CPU ({reason}); "
            "set precision.compute to fp32, or train on GPUs"
        )
    return None
