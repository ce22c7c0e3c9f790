"""The norm of a step's gradient, and clipping by it."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from undula.state.pieces import is_sharded_tensor


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients together, a scalar: of whole gradients, where each rank has shards of them.

    Every rank calls it if gradients are sharded. Does not wait for the device.
    """
    gradients = [real_values(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_type.setdefault(gradient.dtype, []).append(gradient)
    norms = [norm for of_type in by_type.values() for norm in _norms(of_type)]
    norm = torch.linalg.vector_norm(
        torch.stack(norms) if len(by_type) == 1 else torch.stack([each.float() for each in norms])
    )
    return norm.full_tensor() if is_sharded_tensor(norm) else norm  # type: ignore[no-any-return]


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale all gradients so that their norm, which is `norm`, becomes `max_norm` where it is larger."""
    dense = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        else:
            dense.append(parameter)
    torch.nn.utils.clip_grads_with_norm_(dense, max_norm, norm)


def real_values(gradient: Tensor) -> Tensor:
    """The stored numbers of a gradient that may be sparse or complex, as real ones."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def _norms(gradients: list[Tensor]) -> tuple[Tensor, ...]:
    """The norm of each gradient, in float32 for types that have fewer bits."""
    dtype = torch.float32 if gradients[0].dtype in (torch.bfloat16, torch.float16) else None
    return tuple(torch._foreach_norm(gradients, 2, dtype=dtype))
