"""LARS and LAMB of pytorch-optimizer as a run needs them; imported only where a job names one, which nothing else needs.

Both of the library's count steps in a number of their groups. Snapshots lay out their memory anew when a value beside the tensors
changes, so that what counts is a tensor here, or is not kept.
"""

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import pytorch_optimizer
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class LARS(pytorch_optimizer.LARS):
    """Layer-wise adaptive rate scaling: You et al. 2017, arXiv:1708.03888, algorithm 1, with torch's momentum.

    The library's step. The paper has the learning rate in the momentum buffer, this after it: the same while the rate stays.
    """

    def _can_use_foreach(self, group: dict[str, Any]) -> bool:
        # DTensor has no _foreach_copy_, which the library's batched step takes.
        return super()._can_use_foreach(group) and not any(isinstance(each, DTensor) for each in group["params"])

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = super().step(closure)
        _forget_steps(self.param_groups)
        return loss


class Lamb(pytorch_optimizer.Lamb):
    """Layer-wise adaptive moments: You et al. 2020, arXiv:1904.00962, algorithm 2, its bias corrections included.

    The library's state and groups, with a step of its own, as the library's
    - divides by 1 - beta1^t after the trust ratio, which makes the first step ten times that of the paper, and leaves out beta2's part;
    - takes weights of a norm above 10 for ones of 10, which the paper does not;
    - lets weights decay outside of the trust ratio by default;
    - clamps norms in place, which sharded parameters refuse, and keeps each step's norms in the state, of which checkpoints are made.

    A parameter with fewer than two dimensions moves by Adam's direction.
    """

    def init_group(self, group: dict[str, Any], **kwargs: Any) -> None:
        super().init_group(group, **kwargs)
        for parameter in group["params"]:
            if parameter.grad is not None:
                self.state[parameter].setdefault("step", torch.tensor(0.0))

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = super().step(closure)
        _forget_steps(self.param_groups)
        return loss

    def _can_use_foreach(self, group: dict[str, Any]) -> bool:
        return True

    def _step_foreach(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        grad_norm: Tensor | float,
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        step_size: float | Tensor,
    ) -> None:
        beta1, beta2 = group["betas"]
        counts = [self.state[parameter]["step"].add_(1).item() for parameter in params]
        torch._foreach_mul_(exp_avgs, beta1)
        torch._foreach_add_(exp_avgs, grads, alpha=1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1 - beta2)

        roots = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_div_(roots, [sqrt(1 - beta2**count) for count in counts])
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(exp_avgs, [1 - beta1**count for count in counts])
        torch._foreach_div_(updates, roots)
        torch._foreach_add_(updates, params, alpha=group["weight_decay"])

        # Each rank has its part of a sharded tensor, and what is left is element by element.
        weights, steps = [_local(each) for each in params], [_local(each) for each in updates]
        adapted = [place for place, parameter in enumerate(params) if parameter.ndim > 1]
        if adapted:
            norms = _norms([params[place] for place in adapted])
            lengths = _norms([updates[place] for place in adapted])
            ratios = torch.where((norms > 0) & (lengths > 0), norms / lengths, 1.0)
            torch._foreach_mul_([steps[place] for place in adapted], list(ratios.unbind()))
        torch._foreach_add_(weights, steps, alpha=-group["lr"])


def _norms(tensors: list[Tensor]) -> Tensor:
    """Of each, all of it where it is sharded: one reduction for all of them. Every rank calls it."""
    norms = torch.stack(torch._foreach_norm(tensors))
    return norms.full_tensor() if isinstance(norms, DTensor) else norms


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _forget_steps(groups: Sequence[dict[str, Any]]) -> None:
    for group in groups:
        group.pop("step", None)
