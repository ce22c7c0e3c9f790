"""Self-test of studies and of what they compare: the shipped rules, schedules, optimizers and estimator of the noise scale, and the fits.

Each is checked against closed forms, published numbers or sampling. All random draws are seeded.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from undula.study.checks.noise import noise_scale
from undula.study.checks.optimizers import optimizers
from undula.study.checks.quadratic import expected_losses, noisy_quadratic
from undula.study.checks.rows import Row
from undula.study.checks.rules import adam_sde, rules, surge
from undula.study.checks.schedules import schedules


@dataclass(frozen=True)
class SelfTestResult:
    """Comparison of a computed number with a known one."""

    topic: str
    what: str
    expected: float
    got: float
    tolerance: float
    """Tolerance relative to the known number."""

    @property
    def passed(self) -> bool:
        return bool(abs(self.got - self.expected) <= self.tolerance * abs(self.expected))


def self_test() -> Iterator[SelfTestResult]:
    """Run all checks, which take a few seconds, and yield each result as it arrives."""
    for topic, checks in TOPICS.items():
        for what, expected, got, tolerance in checks():
            yield SelfTestResult(topic, what, float(expected), float(got), tolerance)


def table(results: Sequence[SelfTestResult]) -> str:
    """Return the results as a table of text."""
    rows = [("", "expected", "got", "within", "")]
    rows += [
        (
            check.what,
            _figure(check.expected),
            _figure(check.got),
            f"{check.tolerance:.1%}" if check.tolerance > 1e-9 else "exact",
            "pass" if check.passed else "FAIL",
        )
        for check in results
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines, topic = [], ""
    for row, result in zip(rows, [None, *results], strict=True):
        if result and result.topic != topic:
            topic = result.topic
            lines.append(topic)
        cells = [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(f"  {row[0].ljust(widths[0])}  {'  '.join(cells)}".rstrip())
    return "\n".join(lines)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


TOPICS: dict[str, Callable[[], Iterator[Row]]] = {
    "Noisy quadratic (Zhang 2019)": noisy_quadratic,
    "Expected loss, sampled with the optimizer sgd": expected_losses,
    "Optimizers": optimizers,
    "Schedules": schedules,
    "Gradient noise scale (McCandlish 2018)": noise_scale,
    "Rules": rules,
    "Surge (Li 2024)": surge,
    "Adam's SDE (Malladi 2022), sampled": adam_sde,
}
