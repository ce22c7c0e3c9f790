"""What `undula bench scaling` prints: tables of the sizes, and sentences that the page also has."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from undula.plan.scaling import CONFIDENCE
from undula.report.data.sameness import Sameness, workers_text
from undula.report.data.scaling import CLASSES, Fit, Round, Scaling, Size, Throughput
from undula.report.text import DASH, counted, duration, number, printable

UNSTEADY = 0.1
"""Relative difference between rounds above which a sentence warns."""
BUSY = 0.25
"""Load of a core before the first training from which on a sentence warns."""
LEAST_SHARE = 0.0005
"""Smallest share that a sentence names."""


def round_line(found: Round, rounds: int, wall_s: float) -> str:
    """Return a line about a training that has ended."""
    other = "" if found.seconds else ", the command of --against"
    return (
        f"round {found.number} of {rounds}, {workers_text([found.workers])}{other}: {number(found.samples_per_s)} samples/s, "
        f"{duration(wall_s)} in all"
    )


def left_text(wall_s: Sequence[float], count: int) -> str:
    """Return how long the rest of so many trainings takes, after the seconds of those that have ended; nothing if none is left."""
    left = count - len(wall_s)
    return f", about {duration(left * fmean(wall_s))} left" if left else ""


def load_warning(load: float, cores: int) -> str | None:
    """Return the warning about other programs on this machine, given its load before the first training; None if they take little."""
    if load < cores * BUSY:
        return None
    return (
        f"The load of this machine is {load:.1f} on {counted(cores, 'core')} before the first training; the figures also depend on "
        "other programs."
    )


def print_scaling(report: Scaling, same: Sameness | None, against: str | None, console: Console | None = None) -> None:
    """Print the measurements.

    Args:
        report: The measurements.
        same: Whether the runs are the same training; None if that cannot be expected.
        against: Command of the other training; None for none.
        console: Console to print on.
    """
    console = console or Console(highlight=False)
    console.print(Text.assemble((printable(report.name), "bold"), f": {title(report)}"))
    for head, rows in (throughput_table(report), seconds_table(report)):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for text in head:
            table.add_column(text, justify="right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for sentence in sentences(report, same, against):
        console.print(sentence, markup=False)


def title(report: Scaling) -> str:
    """Return what was measured, in one line."""
    work = "the YAML's plan for each worker" if report.is_weak else "the same plan on each number of workers"
    return f"{counted(report.rounds, 'round')} of {counted(report.steps, 'step')}, {work}"


def throughput_table(report: Scaling) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and the rows of the table with the throughput of each size."""
    has_other = any(size.baseline for size in report.sizes)
    is_expected = any(size.expected for size in report.sizes)
    rows = []
    for size in report.sizes:
        other = (_rate(size.baseline), DASH if size.ratio is None else f"{size.ratio:.3f}") if has_other else ()
        expected = (number(size.expected),) if is_expected else ()
        rows.append((_workers(size), *_figures(size), *expected, *other))
    more = (*(("expected",) if is_expected else ()), *(("other", "ratio") if has_other else ()))
    return ("workers", "samples/s", "range", "speedup", "efficiency", *more), rows


def seconds_table(report: Scaling) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and the rows of the table with the shares of a step of each size."""
    rows = []
    for size in report.sizes:
        step_s = sum(size.seconds.values())
        shares = (f"{size.seconds[name] / step_s:.1%}" for name in CLASSES)
        rows.append((_workers(size), f"{number(1e3 * step_s)} ms", *shares))
    return ("workers", "step", *CLASSES), rows


def _workers(size: Size) -> str:
    return f"{size.workers}{'*' if size.is_oversubscribed else ''}"


def _figures(size: Size) -> tuple[str, ...]:
    rate = size.throughput
    spread = f"{number(rate.low)} – {number(rate.high)}"
    return number(rate.median), spread, f"{size.speedup:.2f}", f"{size.efficiency:.1%}"


def _rate(rate: Throughput | None) -> str:
    return DASH if rate is None else number(rate.median)


def sentences(report: Scaling, same: Sameness | None, against: str | None) -> Iterator[str]:
    """Yield sentences about the measurements."""
    for size in report.sizes[1:]:
        if not size.is_oversubscribed:
            yield _lost(size, report.sizes[0].workers)
    if report.fit:
        yield fit_sentence(report.fit)
    else:
        yield f"No law of scaling is fitted: {report.no_fit}."
    if same:
        yield same.sentence
    if offs := [size.expected / size.throughput.median - 1 for size in report.sizes if size.expected]:
        yield (
            "The expected throughput follows from what the script was counted to do and from the rates of --rates; it is off by "
            f"{', '.join(f'{off:+.0%}' for off in offs)}."
        )
    if against is not None:
        yield (
            "The ratio is the throughput of this job divided by that of the other training in the same round. The other training is: "
            f"{printable(against, 1000)}"
        )
    apart = max(size.throughput.high / size.throughput.low - 1 for size in report.sizes)
    if apart > UNSTEADY:
        yield (
            f"The slowest and the fastest round differ by up to {apart:.0%}, perhaps because other programs use the machines: differences "
            "below that mean little."
        )
    if crowded := [size.workers for size in report.sizes if size.is_oversubscribed]:
        yield (
            f"* Oversubscribed: the workers need more cores than a machine has ({report.environment.get('cores', 'unknown')}), so "
            f"{workers_text(crowded)} take no part in fits, and their efficiency says nothing about machines with enough cores."
        )
    if report.environment:
        facts = (f"{name}: {printable(value, 200)}" for name, value in report.environment.items())
        yield f"Measured with {'; '.join(facts)}."


def _lost(size: Size, first: int) -> str:
    """Return where a size loses efficiency, and where it gains."""
    than = f"the efficiency of {workers_text([first])}"
    lost, gained = (_parts({name: sign * part for name, part in size.lost.items()}) for sign in (1, -1))
    gains = f"; gained: {gained}" if gained else ""
    total = 1 - size.efficiency
    if total < LEAST_SHARE:
        return f"On {workers_text([size.workers])}, nothing of {than} is lost{gains}."
    return f"On {workers_text([size.workers])}, {total:.1%} of {than} is lost: {lost}{gains}."


def fit_sentence(fit: Fit) -> str:
    """Return a fitted law as one or two sentences."""
    share = fit.share
    whose = "time of one worker" if fit.law == "Amdahl" else "time of several workers"
    parts = _parts(fit.serial)
    text = (
        f"{fit.law}'s law: {1 - share.value:.1%} of the {whose} is serial ({CONFIDENCE:.0%} interval {1 - share.high:.1%} to "
        f"{1 - share.low:.1%}){f', namely {parts}' if parts else ''}."
    )
    if fit.law == "Amdahl" and share.value < 1:
        text += f" No number of workers is more than {number(share.most, 3)} times as fast as one."
    return text


def _parts(shares: Mapping[str, float]) -> str:
    """Return the shares that matter, the largest first, such as `communication 3.1%, boundary 1.0%`."""
    kept: Sequence[tuple[str, float]] = [(name, share) for name, share in shares.items() if share >= LEAST_SHARE]
    return ", ".join(f"{name} {share:.1%}" for name, share in sorted(kept, key=lambda pair: -pair[1]))
