"""Optimizers by name. Their parameters are in two groups: matrices, which have weight decay, and all others, which have none."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, assert_never

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
"""Settings of each optimizer except weight decay, with their defaults. The defaults of lars and lamb are those of the papers."""


@checked_dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """Name and settings of an optimizer, except the learning rate, which belongs to the schedule."""

    name: Name = "adamw"
    """Name of the optimizer. sgd, adam and adamw are torch's SGD, Adam and AdamW. lars (You et al. 2017, arXiv:1708.03888) and lamb (You
    et al. 2020, arXiv:1904.00962) are for large batches."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """Weight decay of parameters with two or more dimensions; other parameters have none. The product of weight decay and parameter is
    added to the gradient (sgd, adam, lars) or to Adam's direction (lamb); adamw subtracts it, times the learning rate, from the
    parameter."""
    momentum: Fraction | None = None
    """Momentum of sgd and lars; 0.9 by default. The momentum buffer accumulates gradients without the learning rate, which multiplies the
    buffer when the parameter is updated."""
    nesterov: bool | None = None
    """Whether sgd and lars use Nesterov momentum; false by default."""
    betas: tuple[Fraction, Fraction] | None = None
    """Decay factors per step of the averages of the gradient and of its square, for adam, adamw and lamb; 0.9 and 0.999 by default."""
    eps: Annotated[float, Gt(0)] | None = None
    """Term added to the square root of the average of squared gradients, for adam, adamw and lamb; by default 1e-8, or 1e-6 for lamb."""
    trust_coefficient: Annotated[float, Gt(0)] | None = None
    """Norm of a matrix's update by lars as a fraction of the norm of the matrix, at a learning rate of 1 and without momentum; 0.001 by
    default."""

    def __post_init__(self) -> None:
        for key in ("momentum", "nesterov", "betas", "eps", "trust_coefficient"):
            value = getattr(self, key)
            if value is not None and key not in SETTINGS[self.name]:
                owners = " or ".join(name for name, settings in SETTINGS.items() if key in settings)
                given = str(value).lower() if isinstance(value, bool) else value
                raise ValueError(
                    f"{key} is {given}, but name: {self.name} has no such setting; remove it or use name: {owners}"
                )
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov is true, but momentum is 0; set momentum above 0 or remove nesterov")

    def settings(self) -> dict[str, Any]:
        """Return all settings of the optimizer except weight decay and the learning rate."""
        given = {key: getattr(self, key) for key in SETTINGS[self.name]}
        return {key: default if given[key] is None else given[key] for key, default in SETTINGS[self.name].items()}


def make_optimizer(model: nn.Module, config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
    """Make an optimizer of all parameters of a model, which `fully_shard` may have sharded.

    Parameters with fewer than two dimensions, which are biases and the gains of norms, have no weight decay (Goyal et al. 2017,
    arXiv:1706.02677, section 5.1) and no trust ratio in LARS and LAMB. Embeddings count as matrices, as in the code of BERT's and LAMB's
    authors, which excludes only norms and biases.

    Args:
        model: Model whose parameters are optimized.
        config: Name and settings of the optimizer.
        lr: Learning rate of both groups at the peak of the schedule, which is run.base_lr.

    Raises:
        SpecError: LAMB was chosen for a model with complex parameters.
    """
    settings = config.settings()
    groups = _groups(model, config.weight_decay)
    # LARS and LAMB are imported here because their modules import DTensor, which would slow down the start of every driver.
    match config.name:
        case "sgd":
            return torch.optim.SGD(groups, lr=lr, **settings)
        case "adam":
            return torch.optim.Adam(groups, lr=lr, **settings)
        case "adamw":
            return torch.optim.AdamW(groups, lr=lr, **settings)
        case "lars":
            from undula.optim.lars import LARS

            return LARS(groups, lr=lr, **settings)
        case "lamb":
            from undula.optim.lamb import Lamb

            if complex_names := [name for name, parameter in model.named_parameters() if parameter.is_complex()]:
                raise SpecError(
                    f"optimizer.name is lamb, which supports real parameters only, but {complex_names[0]} is complex; use adamw"
                )
            return Lamb(groups, lr=lr, **settings)
        case _:
            assert_never(config.name)


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
