"""The LARS optimizer: algorithm 1 of You et al. 2017, arXiv:1708.03888."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from undula.optim.layerwise import LayerwiseOptimizer, gradients, local, norms


class LARS(LayerwiseOptimizer):
    """SGD with momentum and with the gradient of each matrix scaled by the norms of the matrix and of the gradient.

    The update of a parameter x with the gradient g and the momentum buffer b is

        ratio = trust_coefficient * |x| / (|g| + weight_decay * |x|)
        b = momentum * b + ratio * (g + weight_decay * x)
        x -= lr * b

    As in torch's SGD, the momentum buffer does not contain the learning rate. In the paper it does, which makes a difference only while
    the learning rate changes. The norms are those of whole parameters, even if ranks hold shards of them. The ratio is 1 if |x| or the
    denominator is 0. Parameters with fewer than two dimensions are updated as in plain SGD, without ratio and weight decay.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        momentum: Factor of the momentum buffer per step; 0 disables the buffer.
        weight_decay: Factor of the parameter in the update.
        trust_coefficient: Norm of the update of a matrix as a fraction of the norm of the matrix, at a learning rate of 1 and without
            momentum.
        nesterov: Whether to use Nesterov momentum.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        nesterov: bool = False,
    ):
        settings = {"weight_decay": weight_decay, "trust_coefficient": trust_coefficient, "nesterov": nesterov}
        super().__init__(params, {"lr": lr, "momentum": momentum, **settings})

    def ratios(self, params: list[Tensor], group: dict[str, Any]) -> Tensor:
        weight_norms = norms(params)
        denominators = norms(gradients(params)) + group["weight_decay"] * weight_norms
        scales = group["trust_coefficient"] * weight_norms / denominators
        return torch.where((weight_norms > 0) & (denominators > 0), scales, 1.0)

    def update(self, params: list[Tensor], group: dict[str, Any], ratios: Tensor | None) -> None:
        momentum, weight_decay = group["momentum"], group["weight_decay"]
        local_params, updates = local(params), local(gradients(params))
        if params[0].ndim > 1:
            ratios = self.ratios(params, group) if ratios is None else ratios
            updates = list(torch._foreach_add(updates, local_params, alpha=weight_decay))
            torch._foreach_mul_(updates, list(ratios.unbind()))
        if momentum > 0:
            buffers = local(self._momentum_buffer(parameter) for parameter in params)
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, updates)
            updates = list(torch._foreach_add(updates, buffers, alpha=momentum)) if group["nesterov"] else buffers
        torch._foreach_add_(local_params, updates, alpha=-group["lr"])

    def _momentum_buffer(self, parameter: Tensor) -> Tensor:
        state: dict[str, Tensor] = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]
