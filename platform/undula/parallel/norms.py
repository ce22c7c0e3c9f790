"""Norm of a step's gradient, and clipping of the gradient to a maximum norm."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from undula.state.pieces import as_real, is_sharded_tensor


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the 2-norm of all gradients together, as a scalar tensor.

    If ranks have shards of the gradients, it is the norm of the whole gradients, and all ranks must call this. It does not wait for the
    device.
    """
    gradients = [real_values(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.tensor(0.0, device="cpu")
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_type.setdefault(gradient.dtype, []).append(gradient)
    norms = [norm for of_type in by_type.values() for norm in _norms(of_type)]
    norm = torch.linalg.vector_norm(
        torch.stack(norms) if len(by_type) == 1 else torch.stack([value.float() for value in norms])
    )
    return norm.full_tensor() if is_sharded_tensor(norm) else norm  # type: ignore[no-any-return]


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale all gradients so that their norm becomes `max_norm`, if their present norm `norm` is larger."""
    dense = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        else:
            dense.append(parameter)
    torch.nn.utils.clip_grads_with_norm_(dense, max_norm, norm)


def real_values(gradient: Tensor) -> Tensor:
    """Return the stored values of a gradient, which may be sparse or complex, as real numbers."""
    return as_real(gradient.coalesce().values() if gradient.is_sparse else gradient)


def _norms(gradients: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the norm of each gradient, in float32 for bfloat16 and float16 gradients."""
    dtype = torch.float32 if gradients[0].dtype in (torch.bfloat16, torch.float16) else None
    return tuple(torch._foreach_norm(gradients, 2, dtype=dtype))
