"""Rules by which the learning rate follows the batch size, the optimizers that each rule is known for, and the re-warmup. Pure.

A rule is a function of `kappa`, the batch size as a multiple of the base batch that base_lr was tuned for, and, if the rule uses it, the
gradient noise scale in base batches. It returns the changes to a step as `Scaled`. A new rule is one entry of `RULES`, from which
settings, studies, figures and the self-test take all that they know about it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log, sqrt
from typing import TYPE_CHECKING, Any, Literal

from undula.errors import SpecError


@dataclass(frozen=True)
class Scaled:
    """Changes to a step because of its batch size."""

    lr: float = 1.0
    """Factor on the learning rate."""
    one_minus_beta: float | None = None
    """Factor on 1 - beta of each of the optimizer's exponential averages; None keeps them as the script set them."""
    eps: float = 1.0
    """Factor on the optimizer's eps; only used together with `one_minus_beta`."""
    warmup: float = 1.0
    """Factor on the length of the warmup."""
    gain: float | None = None
    """Number of base batches by which the step advances the schedule; None advances it by the step's samples."""


def none(kappa: float, noise: float | None = None) -> Scaled:
    """Keep the learning rate."""
    return Scaled()


def linear(kappa: float, noise: float | None = None) -> Scaled:
    """Scale the learning rate in proportion to the batch: Goyal et al. 2017, arXiv:1706.02677, section 2.1, for SGD with gradual warmup.

    Chen et al. 2020, arXiv:2002.05709, use it with LARS; You et al. 2017, arXiv:1708.03888, tuned the rate for each batch size instead.

    Goyal et al.'s momentum correction (remark 3, equation 10) applies to updates whose momentum buffer contains the learning rate.
    PyTorch's SGD accumulates plain gradients and multiplies them by the current rate, as in their equation 9, so it needs no correction.
    """
    return Scaled(kappa)


def square_root(kappa: float, noise: float | None = None) -> Scaled:
    """Scale the learning rate with the square root of the batch, which preserves the variance of an update.

    The rule is from Krizhevsky 2014, arXiv:1404.5997, section 5, and Hoffer et al. 2017, arXiv:1705.08741. You et al. 2020,
    arXiv:1904.00962, section 4, use it with LAMB, and Chen et al. 2020, arXiv:2002.05709, appendix B.1, with LARS.
    """
    return Scaled(sqrt(kappa))


def legw(kappa: float, noise: float | None = None) -> Scaled:
    """Scale with the square root and warm up for `kappa` times as many epochs: You et al. 2019, arXiv:1901.08256.

    Their table 4 covers LARS; You et al. 2020, arXiv:1904.00962, section 4, covers LAMB.
    """
    return Scaled(sqrt(kappa), warmup=kappa)


def adam_sde(kappa: float, noise: float | None = None) -> Scaled:
    """Scale with the square root and keep the averages' length in samples: Malladi et al. 2022, arXiv:2205.10287, for Adam and RMSprop.

    The settings lr * sqrt(kappa), 1 - kappa * (1 - beta) for each beta, and eps / sqrt(kappa) preserve the optimizer's stochastic
    differential equation.
    """
    return Scaled(sqrt(kappa), one_minus_beta=kappa, eps=1 / sqrt(kappa))


def adascale(kappa: float, noise: float | None = None) -> Scaled:
    """Multiply the learning rate and the schedule's progress by the gain r of a step: Johnson et al. 2020, arXiv:2007.05105, for SGD.

    The gain is r = (v + m) / (v / kappa + m), which lies between 1 and kappa. Here v is the variance of a base batch's gradient and m the
    squared norm of the expected gradient, so v / m is the noise scale in base batches. Before the first measurement, r is 1.
    """
    gain = _saturating(kappa, noise)
    return Scaled(gain, gain=gain)


def noise_scale(kappa: float, noise: float | None = None) -> Scaled:
    """Scale in proportion to 1 / (1 + B_noise / B), the best rate of SGD on a quadratic: McCandlish et al. 2018, arXiv:1812.06162.

    Relative to the base batch, this factor is AdaScale's gain; the schedule still advances by samples.
    """
    return Scaled(_saturating(kappa, noise))


def surge(kappa: float, noise: float | None = None) -> Scaled:
    """Scale in proportion to 2 / (sqrt(B_noise / B) + sqrt(B / B_noise)): Li et al. 2024, arXiv:2405.14578, for Adam-style optimizers.

    The factor rises with the square root of the batch up to B_noise and falls beyond it. We use McCandlish's simple noise scale in place
    of theirs, which weights coordinates as the signs of the gradients do.
    """
    if noise is None:
        return Scaled()
    return Scaled(sqrt(kappa) if noise == inf else sqrt(kappa) * (1 + noise) / (kappa + noise))


def _saturating(kappa: float, noise: float | None) -> float:
    """Return (1 + noise) / (1 + noise / kappa): 1 without noise, and `kappa` for infinite noise."""
    if noise is None:
        return 1.0
    return kappa if noise == inf else kappa * (1 + noise) / (kappa + noise)


@dataclass(frozen=True)
class Mark:
    """Look of a rule in figures."""

    color: str
    dark: str
    """Colour on a dark page."""
    dash: str
    """Lengths of the dashes and gaps of its line in pixels, as in SVG."""
    shape: Literal["circle", "square", "up", "down", "diamond", "plus", "cross", "pentagon"]
    """Shape of its points; `up` and `down` are triangles."""


@dataclass(frozen=True)
class Rule:
    """A rule and its properties."""

    scaled: Callable[[float, float | None], Scaled]
    """Function that returns the changes to a step, given kappa and the noise scale in base batches (None before it is measured)."""
    known: Scaled
    """Changes to a step of 4 base batches with a noise scale of 2 base batches, worked out by hand from the source of the rule. The
    self-test compares `scaled` with them."""
    mark: Mark
    holds_for: frozenset[str] | None = None
    """Class names of the optimizers in torch.optim and undula.optim that the rule's derivation or experiments cover; None for all."""
    is_measured: bool = False
    """Whether the rule needs the gradient noise scale."""

    @property
    def exponent(self) -> float | None:
        """Power of the batch by which the rule scales the learning rate; None for a measured rule."""
        # 4 has an exact square root, and rounding hides the error of the logarithm of other powers.
        return None if self.is_measured else round(log(self.factor(4.0), 4.0), 12)

    def factor(self, kappa: float) -> float:
        """Return the factor on the learning rate at `kappa` base batches. The rule must not be measured."""
        return self.scaled(kappa, None).lr

    def changes_rate_alone(self, warmup: int) -> bool:
        """Return whether the rule only changes the learning rate, so that results with and without it lie on one curve over the rate.

        Args:
            warmup: Length of the warmup before scaling, in samples. A rule that only scales the warmup changes nothing without one.
        """
        scaled = self.scaled(2.0, None)
        return not self.is_measured and replace(scaled, lr=1.0, warmup=scaled.warmup if warmup else 1.0) == Scaled()


_SGD = frozenset({"SGD"})
_ADAPTIVE = frozenset({"Adam", "AdamW", "RMSprop", "Adagrad", "Adafactor"})
RULES: Mapping[str, Rule] = {
    "none": Rule(none, Scaled(), Mark("#7c8795", "#a3aebb", "2 3", "circle")),
    "linear": Rule(linear, Scaled(4.0), Mark("#d55e00", "#f58a3c", "9 3", "square"), _SGD | {"LARS"}),
    "sqrt": Rule(
        square_root,
        Scaled(2.0),
        Mark("#0072b2", "#56aee8", "6 3 2 3", "up"),
        _SGD | _ADAPTIVE | {"LARS", "Lamb"},
    ),
    "legw": Rule(
        legw,
        Scaled(2.0, warmup=4.0),
        Mark("#009e73", "#35c79b", "10 3 2 3 2 3", "diamond"),
        _SGD | {"LARS", "Lamb"},
    ),
    "adam_sde": Rule(
        adam_sde,
        Scaled(2.0, one_minus_beta=4.0, eps=1 / 2),
        Mark("#b3579b", "#de8cc6", "5 3", "down"),
        frozenset({"Adam", "AdamW", "RMSprop"}),
    ),
    "adascale": Rule(
        adascale, Scaled(2.0, gain=2.0), Mark("#c58a00", "#e8b13c", "3 2", "plus"), _SGD, is_measured=True
    ),
    "noise_scale": Rule(
        noise_scale, Scaled(2.0), Mark("#3d9bd4", "#7cc4f0", "8 2 4 2", "cross"), _SGD, is_measured=True
    ),
    "surge": Rule(surge, Scaled(1.0), Mark("#6a45a8", "#b797ec", "2 2", "pentagon"), _ADAPTIVE, is_measured=True),
}
"""Rules by name. Their colours are from the palette of Okabe and Ito for colour-blind readers, some slightly darker for lines on white."""
if TYPE_CHECKING:
    RuleName = str
else:
    RuleName = Literal[tuple(RULES)]


def powers() -> dict[RuleName, float]:
    """Return the exponents of the rules that only change the learning rate, the largest first. A study tests them without own trials."""
    plain = [name for name, rule in RULES.items() if rule.changes_rate_alone(warmup=1)]
    exponents = {name: exponent for name in plain if (exponent := RULES[name].exponent) is not None}
    return dict(sorted(exponents.items(), key=lambda item: -item[1]))


def warning(name: RuleName, optimizer: Sequence[str]) -> str | None:
    """Return a warning if the rule is not known to hold for an optimizer, else None.

    Args:
        name: Name of the rule.
        optimizer: Names of the optimizer's class and its base classes, in method resolution order.
    """
    holds_for = RULES[name].holds_for
    # torch's AdamW derives from Adam, so the first class that any rule knows decides.
    known = {family for rule in RULES.values() for family in rule.holds_for or ()}
    kind = next((family for family in optimizer if family in known), optimizer[0])
    if holds_for is None or kind in holds_for:
        return None
    others = [other for other, rule in RULES.items() if rule.holds_for and kind in rule.holds_for]
    fix = f"for {kind}, use one of {', '.join(others)}" if others else "compare the run with one at the base batch"
    return f"schedule.batch_rule={name} is only known to hold for {', '.join(sorted(holds_for))}, but the optimizer is {kind}; {fix}"


def scaled_beta(beta: float, factor: float) -> float:
    """Return the decay of an exponential average after multiplying 1 - beta by `factor`.

    Raises:
        SpecError: The new decay would not be positive.
    """
    if factor * (1 - beta) >= 1:
        raise SpecError(
            f"schedule.batch_rule=adam_sde with a beta of {beta:g} requires batches below {1 / (1 - beta):g} times schedule.base_batch, "
            f"but this run can reach {factor:g} times; raise schedule.base_batch, plan.batch_workers or the beta"
        )
    return 1 - factor * (1 - beta)


@dataclass(frozen=True)
class Ramp:
    """Transition of the batch size that the rule sees, in base batches. It rises linearly and falls at once."""

    begin: float
    """Batch size before the transition, in base batches."""
    end: float
    """Batch size after the transition, in base batches."""
    since: int = 0
    """Number of samples that the run had consumed when the transition began."""
    length: float = 0.0
    """Length of a rise in samples."""

    def at(self, samples: int) -> float:
        """Return the batch size, in base batches, for the step after which the run has consumed `samples` samples."""
        if self.end <= self.begin or samples >= self.since + self.length:
            return self.end
        return self.begin + (self.end - self.begin) * (samples - self.since) / self.length

    def towards(self, end: float, samples: int, length: float) -> "Ramp":
        """Return a transition to another batch size from the current one after `samples`, or this one if it already ends there."""
        return self if end == self.end else Ramp(self.at(samples), end, samples, length)

    def values(self) -> dict[str, Any]:
        """Return the fields to save in a checkpoint; `Ramp(**values)` restores them."""
        return {"begin": self.begin, "end": self.end, "since": self.since, "length": self.length}
