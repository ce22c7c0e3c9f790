"""The LAMB optimizer: algorithm 2 of You et al. 2020, arXiv:1904.00962."""

from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from undula.optim.layerwise import LayerwiseOptimizer, gradients, local, norms


class Lamb(LayerwiseOptimizer):
    """Adam with the update of each matrix scaled to the norm of the matrix.

    With the bias-corrected averages m of the gradient and v of its square, the update of a parameter x is

        r = m / (sqrt(v) + eps) + weight_decay * x
        x -= lr * (|x| / |r|) * r

    The norms are those of whole parameters, even if ranks hold shards of them. The trust ratio |x| / |r| is 1 if either norm is 0, and for
    parameters with fewer than two dimensions.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decay factors per step of the averages of the gradient and of its square.
        eps: Term added to the square root of the second average.
        weight_decay: Factor of the parameter in the update.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def ratios(self, params: list[Tensor], group: dict[str, Any]) -> Tensor:
        updates: list[Tensor] = []
        for parameter in params:  # one after another, so that the copies take little memory
            state = self.state.get(parameter) or _initial_state(parameter)
            averages = [state["exp_avg"].clone()], [state["exp_avg_sq"].clone()]
            updates += _updates([parameter], *averages, [state["step"].item() + 1], group)
        return _ratios(params, updates)

    def update(self, params: list[Tensor], group: dict[str, Any], ratios: Tensor | None) -> None:
        states = [self._initialized_state(parameter) for parameter in params]
        averages = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        updates = _updates(params, *averages, [state["step"].add_(1).item() for state in states], group)
        local_updates = local(updates)
        if params[0].ndim > 1:
            ratios = _ratios(params, updates) if ratios is None else ratios
            torch._foreach_mul_(local_updates, list(ratios.unbind()))
        torch._foreach_add_(local(params), local_updates, alpha=-group["lr"])

    def _initialized_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state.update(_initial_state(parameter))
        return state


def _initial_state(parameter: Tensor) -> dict[str, Tensor]:
    averages = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.tensor(0.0, device="cpu"), **averages}


def _updates(
    params: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[float],
    group: dict[str, Any],
) -> list[Tensor]:
    """Add the gradients to the averages, and return the updates r of parameters after so many steps."""
    beta1, beta2 = group["betas"]
    grads = gradients(params)
    torch._foreach_mul_(exp_avgs, beta1)
    torch._foreach_add_(exp_avgs, grads, alpha=1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1 - beta2)

    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, [sqrt(1 - beta2**step) for step in steps])
    torch._foreach_add_(denominators, group["eps"])
    updates: list[Tensor] = list(torch._foreach_div(exp_avgs, [1 - beta1**step for step in steps]))
    torch._foreach_div_(updates, denominators)
    torch._foreach_add_(updates, params, alpha=group["weight_decay"])
    return updates


def _ratios(params: list[Tensor], updates: list[Tensor]) -> Tensor:
    weight_norms, update_norms = norms(params), norms(updates)
    return torch.where((weight_norms > 0) & (update_norms > 0), weight_norms / update_norms, 1.0)
