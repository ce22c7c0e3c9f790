"""What LARS and LAMB share: steps on batches of parameters, norms of whole tensors, and the check for sparse gradients."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from undula.errors import RunError
from undula.state.pieces import local_part
from undula.state.squares import square_sums


class LayerwiseOptimizer(Optimizer):
    """Optimizer that updates batches of parameters of one kind.

    Attributes:
        settled: Ratios that the next step takes, as `settle` computes them; None to compute them in the step.
    """

    settled: list[Tensor] | None = None

    @torch.no_grad()
    def settle(self) -> None:
        """Compute the ratios of the next step, for which ranks with shards need each other. The step itself then needs no other rank."""
        self.settled = [self.ratios(params, group) for group, params in self._batches() if params[0].ndim > 1]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        settled, self.settled = self.settled, None
        ratios = iter(settled or ())
        for group, params in self._batches():
            self.update(params, group, next(ratios) if settled and params[0].ndim > 1 else None)
        return loss

    def _batches(self) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
        for group in self.param_groups:
            for params in batches(group["params"], type(self).__name__.upper()):
                yield group, params

    @abstractmethod
    def ratios(self, params: list[Tensor], group: dict[str, Any]) -> Tensor:
        """Return the ratio of each matrix of a batch in the next update; shape [parameters]. All ranks with shards must call this."""

    @abstractmethod
    def update(self, params: list[Tensor], group: dict[str, Any], ratios: Tensor | None) -> None:
        """Update a batch of parameters, given the settings of its parameter group and, if they are known already, its ratios."""


def batches(params: Iterable[Tensor], optimizer: str) -> list[list[Tensor]]:
    """Group the parameters that have a gradient into batches that foreach operations can process.

    The tensors of a batch have the same device, dtype and device mesh, and either all or none of them are matrices (two dimensions or
    more). The order is the same on all ranks.

    Raises:
        RunError: A gradient is sparse.
    """
    by_kind: dict[object, list[Tensor]] = {}
    for parameter in params:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            raise RunError(
                f"{optimizer} does not support sparse gradients; create the embedding with sparse=False or use SGD"
            )
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        key = (parameter.device, parameter.dtype, mesh, parameter.ndim > 1)
        by_kind.setdefault(key, []).append(parameter)
    return list(by_kind.values())


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each whole tensor, even if ranks hold shards of it. All ranks must call this together.

    The norms of all sharded tensors take one collective. They do not depend on how the tensors are sharded.
    """
    return square_sums([[tensor] for tensor in tensors]).sqrt()


def gradients(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of the parameters of a batch, which all have one."""
    return [parameter.grad for parameter in params if parameter.grad is not None]


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the part of each tensor that this rank holds, without copying. A tensor that is not sharded is returned as it is."""
    return list(map(local_part, tensors))
