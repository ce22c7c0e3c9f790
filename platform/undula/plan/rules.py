"""How the learning rate follows the batch: rules, for which optimizers each holds, and the way from one batch to the next. Pure.

A rule is given the batch in base batches (`kappa`: the batch that base_lr was tuned for is 1), and, where it measures, the gradient
noise scale in base batches; it says what changes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt
from typing import Any, Literal

from undula.errors import SpecError

RuleName = Literal["none", "linear", "sqrt", "legw", "adam_sde", "adascale", "noise_scale", "surge"]


@dataclass(frozen=True)
class Scaled:
    """What changes with the batch."""

    lr: float = 1.0
    """Factor on the learning rate."""
    forgetting: float | None = None
    """Factor on 1 - beta of each of the optimizer's averages; None where they stay as the script made them."""
    eps: float = 1.0
    """Factor on the eps of an optimizer whose averages change."""
    warmup: float = 1.0
    """Factor on the samples of a warmup."""
    gain: float | None = None
    """Base batches by which the step moves the schedule; None for the samples that it has."""


def none(kappa: float, noise: float | None = None) -> Scaled:
    """The learning rate stays."""
    return Scaled()


def linear(kappa: float, noise: float | None = None) -> Scaled:
    """In proportion to the batch: Goyal et al. 2017, arXiv:1706.02677, section 2.1. For SGD, with their gradual warmup.

    With LARS in Chen et al. 2020, arXiv:2002.05709; You et al. 2017, arXiv:1708.03888, tuned the rate of each batch.

    Their momentum correction (remark 3, equation 10) is for updates that have the learning rate in the momentum buffer. Torch's SGD
    keeps gradients alone there and multiplies by the present rate, as their equation 9 does, which needs none.
    """
    return Scaled(kappa)


def square_root(kappa: float, noise: float | None = None) -> Scaled:
    """With the square root of the batch, which keeps the variance of an update.

    Krizhevsky 2014, arXiv:1404.5997, section 5; Hoffer et al. 2017, arXiv:1705.08741. With LAMB in You et al. 2020, arXiv:1904.00962,
    section 4; with LARS in Chen et al. 2020, arXiv:2002.05709, appendix B.1.
    """
    return Scaled(sqrt(kappa))


def legw(kappa: float, noise: float | None = None) -> Scaled:
    """The square root, and warmup for `kappa` times as many epochs: You et al. 2019, arXiv:1901.08256.

    With LARS in their table 4, with LAMB in You et al. 2020, arXiv:1904.00962, section 4.
    """
    return Scaled(sqrt(kappa), warmup=kappa)


def adam_sde(kappa: float, noise: float | None = None) -> Scaled:
    """The square root, with averages over as many samples as before: Malladi et al. 2022, arXiv:2205.10287, for Adam and RMSprop.

    lr * sqrt(kappa), 1 - kappa * (1 - beta) for each beta, eps / sqrt(kappa): the same stochastic differential equation.
    """
    return Scaled(sqrt(kappa), forgetting=kappa, eps=1 / sqrt(kappa))


def adascale(kappa: float, noise: float | None = None) -> Scaled:
    """The gain r of a step, as a factor and as the schedule's clock: Johnson et al. 2020, arXiv:2007.05105. For SGD.

    r = (v + m) / (v / kappa + m), between 1 and kappa: v the variance of a base batch's gradient, m the squared norm of the expected
    one, so that v / m is the noise scale in base batches. Before there is a measurement r is 1.
    """
    gain = _saturating(kappa, noise)
    return Scaled(gain, gain=gain)


def noise_scale(kappa: float, noise: float | None = None) -> Scaled:
    """In proportion to 1 / (1 + B_noise / B): McCandlish et al. 2018, arXiv:1812.06162, the best rate of SGD on a quadratic.

    As a factor on the base batch's it is AdaScale's gain; the schedule's clock stays in samples.
    """
    return Scaled(_saturating(kappa, noise))


def surge(kappa: float, noise: float | None = None) -> Scaled:
    """In proportion to 2 / (sqrt(B_noise / B) + sqrt(B / B_noise)): Li et al. 2024, arXiv:2405.14578. For Adam and its like.

    It rises with the square root up to B_noise, and falls beyond. The noise scale measured here, McCandlish's simple one, stands in
    for theirs, which weighs coordinates as the signs of gradients do.
    """
    if noise is None:
        return Scaled()
    return Scaled(sqrt(kappa) if noise == inf else sqrt(kappa) * (1 + noise) / (kappa + noise))


def _saturating(kappa: float, noise: float | None) -> float:
    """(1 + noise) / (1 + noise / kappa): no factor without noise, `kappa` where there is nothing else."""
    if noise is None:
        return 1.0
    return kappa if noise == inf else kappa * (1 + noise) / (kappa + noise)


@dataclass(frozen=True)
class Rule:
    """A rule, and what is known of it."""

    scaled: Callable[[float, float | None], Scaled]
    holds_for: frozenset[str] | None
    """Class names of the optimizers, of torch.optim and undula.optim, that its derivation or its experiments cover; None for all."""
    is_measured: bool = False
    """Whether it needs the gradient noise scale."""


_SGD = frozenset({"SGD"})
_ADAPTIVE = frozenset({"Adam", "AdamW", "RMSprop", "Adagrad", "Adafactor"})
RULES: Mapping[RuleName, Rule] = {
    "none": Rule(none, None),
    "linear": Rule(linear, _SGD | {"LARS"}),
    "sqrt": Rule(square_root, _SGD | _ADAPTIVE | {"LARS", "Lamb"}),
    "legw": Rule(legw, _SGD | {"LARS", "Lamb"}),
    "adam_sde": Rule(adam_sde, frozenset({"Adam", "AdamW", "RMSprop"})),
    "adascale": Rule(adascale, _SGD, is_measured=True),
    "noise_scale": Rule(noise_scale, _SGD, is_measured=True),
    "surge": Rule(surge, _ADAPTIVE, is_measured=True),
}


def warning(name: RuleName, optimizer: Sequence[str]) -> str | None:
    """One sentence where a rule is not known to hold.

    Args:
        optimizer: the name of its class, and those of the classes that this derives from, nearest first.
    """
    holds_for = RULES[name].holds_for
    # torch's AdamW derives from Adam: the nearest class that any rule knows is the one that counts.
    known = {each for rule in RULES.values() for each in rule.holds_for or ()}
    kind = next((each for each in optimizer if each in known), optimizer[0])
    if holds_for is None or kind in holds_for:
        return None
    others = [other for other, rule in RULES.items() if rule.holds_for and kind in rule.holds_for]
    mend = f"for {kind} there are {', '.join(others)}" if others else "compare the run with one at the base batch"
    return f"schedule.batch_rule {name} is known to hold for {', '.join(sorted(holds_for))}, and the optimizer is {kind}: {mend}"


def scaled_beta(beta: float, forgetting: float) -> float:
    """The decay of an average that forgets `forgetting` times as much in a step.

    Raises:
        SpecError: it would forget more than there is.
    """
    if forgetting * (1 - beta) >= 1:
        raise SpecError(
            f"schedule.batch_rule adam_sde is for batches below {1 / (1 - beta):g} times schedule.base_batch where a beta is {beta:g}, and "
            f"this run can have {forgetting:g} times: raise schedule.base_batch, plan.batch_workers or that beta"
        )
    return 1 - forgetting * (1 - beta)


def changes_rate_alone(rule: RuleName, warmup: int) -> bool:
    """Whether a training with the rule is one without it at another learning rate, so that both are points of one curve."""
    scaled = RULES[rule].scaled(2.0, None)
    return not RULES[rule].is_measured and replace(scaled, lr=1.0, warmup=scaled.warmup if warmup else 1.0) == Scaled()


@dataclass(frozen=True)
class Ramp:
    """A batch, in base batches, on its way from one size to another as the rule is to see it."""

    begin: float
    end: float
    since: int = 0
    """Samples of the run when it set out."""
    length: float = 0.0
    """Samples that the way up takes."""

    def at(self, samples: int) -> float:
        """What the step that brings the run to `samples` is taken for: in a straight line up, and down at once."""
        if self.end <= self.begin or samples >= self.since + self.length:
            return self.end
        return self.begin + (self.end - self.begin) * (samples - self.since) / self.length

    def towards(self, end: float, samples: int, length: float) -> "Ramp":
        """Set out for another size, from where it is after `samples`; the same where it is on its way there."""
        return self if end == self.end else Ramp(self.at(samples), end, samples, length)

    def values(self) -> dict[str, Any]:
        """For a checkpoint; `Ramp(**values)` is the way back."""
        return {"begin": self.begin, "end": self.end, "since": self.since, "length": self.length}
