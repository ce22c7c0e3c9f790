"""Optimizers by name, with the parameters in two groups: matrices, which decay, and all others, which do not."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Lt
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import nn

from undula.errors import STRICT, SpecError

Name = Literal["sgd", "adam", "adamw", "lars", "lamb"]
Fraction = Annotated[float, Ge(0), Lt(1)]

SETTINGS: Mapping[Name, Mapping[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": False},
    "adam": {"betas": (0.9, 0.999), "eps": 1e-8},
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8},
    "lars": {"momentum": 0.9, "nesterov": False, "trust_coefficient": 1e-3},
    "lamb": {"betas": (0.9, 0.999), "eps": 1e-6},
}
"""Settings of each optimizer beside weight decay, with their defaults; those of lars and lamb are from the papers."""


@checked_dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """Name and settings of an optimizer. The learning rate is not among them: it belongs to the schedule."""

    name: Name = "adamw"
    """Optimizer: SGD, Adam and AdamW are those of torch; LARS (You et al. 2017, arXiv:1708.03888) and LAMB (You et al. 2020,
    arXiv:1904.00962) are for large batches."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """Weight decay of parameters with two dimensions or more; all others have none. It is added to the gradient (sgd, adam, lars), to
    Adam's direction (lamb), or, times the learning rate, to the step (adamw)."""
    momentum: Fraction | None = None
    """Momentum of sgd and lars; 0.9 by default. The momentum buffer holds gradients, and the learning rate is applied after it."""
    nesterov: bool | None = None
    """Whether sgd and lars use Nesterov momentum; false by default."""
    betas: tuple[Fraction, Fraction] | None = None
    """Decay per step of the averages of the gradient and of its square, in adam, adamw and lamb; 0.9 and 0.999 by default."""
    eps: Annotated[float, Gt(0)] | None = None
    """Term added to the root of the second average, in adam, adamw and lamb; by default 1e-8, and 1e-6 in lamb."""
    trust_coefficient: Annotated[float, Gt(0)] | None = None
    """Norm of the gradient's part in a step of lars at a learning rate of 1, as a fraction of the norm of the matrix; 0.001 by default."""

    def __post_init__(self) -> None:
        for key in ("momentum", "nesterov", "betas", "eps", "trust_coefficient"):
            value = getattr(self, key)
            if value is not None and key not in SETTINGS[self.name]:
                owners = " or ".join(name for name, settings in SETTINGS.items() if key in settings)
                given = str(value).lower() if isinstance(value, bool) else value
                raise ValueError(
                    f"{key} is {given}, but name: {self.name} has no such setting: remove it, or use name: {owners}"
                )
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov is true, but momentum is 0: remove one of them")

    def settings(self) -> dict[str, Any]:
        """All settings of the optimizer beside weight decay and the learning rate."""
        given = {key: getattr(self, key) for key in SETTINGS[self.name]}
        return {key: default if given[key] is None else given[key] for key, default in SETTINGS[self.name].items()}


def make_optimizer(model: nn.Module, config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
    """The optimizer of all of a model's parameters, whole or sharded by `fully_shard`.

    Parameters with fewer than two dimensions, which are biases and the gains of norms, have no weight decay (Goyal et al. 2017,
    arXiv:1706.02677, section 5.1) and no trust ratio in LARS and LAMB. Embeddings are treated as matrices, as the authors of BERT and
    LAMB do: their code excludes only norms and biases.

    Args:
        model: Model whose parameters are optimized.
        config: Name and settings of the optimizer.
        lr: Learning rate of both groups at the top of the schedule: run.base_lr.

    Raises:
        SpecError: LAMB was chosen for a model with complex parameters.
    """
    settings = config.settings()
    groups = _groups(model, config.weight_decay)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=lr, **settings)
    if config.name == "adam":
        return torch.optim.Adam(groups, lr=lr, **settings)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, **settings)
    from undula.optim.lamb import Lamb  # DTensor, which both import, would slow the start of every driver
    from undula.optim.lars import LARS

    if config.name == "lars":
        return LARS(groups, lr=lr, **settings)
    if complex_names := [name for name, parameter in model.named_parameters() if parameter.is_complex()]:
        raise SpecError(
            f"optimizer.name is lamb, which supports real parameters only, but {complex_names[0]} is complex: use adamw"
        )
    return Lamb(groups, lr=lr, **settings)


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
