"""Optimizers by name, with the parameters in two groups: those that decay and those that do not."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Lt
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import nn

from undula.errors import SpecError
from undula.plan.plan import STRICT

Name = Literal["sgd", "adam", "adamw", "lars", "lamb"]
Fraction = Annotated[float, Ge(0), Lt(1)]

SETTINGS: Mapping[Name, Mapping[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": False},
    "adam": {"betas": (0.9, 0.999), "eps": 1e-8},
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8},
    "lars": {"momentum": 0.9, "nesterov": False, "trust_coefficient": 1e-3},
    "lamb": {"betas": (0.9, 0.999), "eps": 1e-6},
}
"""What each has beside weight decay, and where that stands when it is not given. The last two as in the papers."""


@checked_dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """Which optimizer, and its settings; the learning rate is the schedule's."""

    name: Name = "adamw"
    """SGD, Adam and AdamW of torch; LARS (You et al. 2017, arXiv:1708.03888) and LAMB (You et al. 2020, arXiv:1904.00962) need
    pytorch-optimizer."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """Of parameters with two dimensions or more; the others have none. Added to the gradient (sgd, adam, lars), to Adam's direction
    (lamb), or times the learning rate to the step (adamw)."""
    momentum: Fraction | None = None
    """Of sgd and lars, by default 0.9. The buffer holds gradients; the learning rate comes after it."""
    nesterov: bool | None = None
    """Of sgd and lars: whether momentum looks ahead; by default it does not."""
    betas: tuple[Fraction, Fraction] | None = None
    """Of adam, adamw and lamb: decay per step of the averages of the gradient and of its square, by default 0.9 and 0.999."""
    eps: Annotated[float, Gt(0)] | None = None
    """Of adam, adamw and lamb: added to the root of the second average, by default 1e-8, and 1e-6 for lamb."""
    trust_coefficient: Annotated[float, Gt(0)] | None = None
    """Of lars: the most that a gradient moves a matrix by at a learning rate of 1, as a fraction of its norm; by default 0.001."""

    def __post_init__(self) -> None:
        for key in ("momentum", "nesterov", "betas", "eps", "trust_coefficient"):
            value = getattr(self, key)
            if value is not None and key not in SETTINGS[self.name]:
                owners = " or ".join(name for name, settings in SETTINGS.items() if key in settings)
                given = str(value).lower() if isinstance(value, bool) else value
                raise ValueError(
                    f"{key} is {given}, which name: {self.name} does not have: leave it out, or give name: {owners}"
                )
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov is true, which looks ahead along momentum, and that is 0: leave out one of them")

    def settings(self) -> dict[str, Any]:
        """All that the named optimizer has beside weight decay and the learning rate."""
        given = {key: getattr(self, key) for key in SETTINGS[self.name]}
        return {key: default if given[key] is None else given[key] for key, default in SETTINGS[self.name].items()}


def make_optimizer(model: nn.Module, config: OptimizerConfig, lr: float) -> torch.optim.Optimizer:
    """The optimizer of all of a model's parameters, whole or sharded by `fully_shard`.

    Biases and the gains of norms, which is to say parameters with fewer than two dimensions, do not decay (Goyal et al. 2017,
    arXiv:1706.02677, section 5.1), nor have they a trust ratio with LARS and LAMB. Embeddings are matrices like others, as for the
    authors of BERT and LAMB, whose code leaves out norms and biases alone.

    Args:
        lr: at the top of the schedule, of both groups: run.base_lr.

    Raises:
        SpecError: the package that has it is not installed, or LAMB is to train complex numbers.
    """
    settings = config.settings()
    groups = _groups(model, config.weight_decay)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=lr, **settings)
    if config.name == "adam":
        return torch.optim.Adam(groups, lr=lr, **settings)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, **settings)
    try:
        from undula.optim.layerwise import LARS, Lamb
    except ModuleNotFoundError as error:
        if error.name != "pytorch_optimizer":
            raise
        raise SpecError(
            f"optimizer.name is {config.name}, which needs pytorch-optimizer, and that is not installed here: "
            "pip install 'undula[study]'"
        ) from None
    if config.name == "lars":
        return LARS(groups, lr=lr, **settings)
    if odd := [name for name, parameter in model.named_parameters() if parameter.is_complex()]:
        raise SpecError(f"optimizer.name is lamb, which is for real numbers, and {odd[0]} is complex: give adamw")
    return Lamb(groups, lr=lr, **settings)


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
