"""Table of the configurations in which a job could train, for the terminal."""

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from undula.driver.plan_job import Higher, overrides_of
from undula.plan.candidates import Candidate, cheapest, fastest
from undula.plan.gpus import GIB
from undula.report.text import DASH, counted
from undula.train.dry_run.counting import Setting

COLUMNS = ("", "GPU", "W", "setting", "GiB", "step", "smp/s", "time", "cost", "spot")
LEGEND = (
    "Y the job's own setting, C the cheapest, F the fastest, * the choice; W workers; setting: number format, activations.keep and "
    "micro-batch; GiB needed and there; smp/s samples or tok/s tokens per second; time and cost of the whole run, on demand and on spot "
    "nodes"
)
NONE_FITS = "No configuration fits; give --gpu a kind with more memory, or lower plan.virtual_workers."
Found = Sequence[Candidate[Setting]]
"""Configurations of a job."""


def print_plan(
    found: Found,
    own: Setting,
    is_fake: bool,
    choice: Candidate[Setting] | None,
    about_hosts: Iterable[str] = (),
    higher: Higher | None = None,
    console: Console | None = None,
) -> None:
    """Print for each kind of GPU and number of workers the fastest configuration that fits, and that of the job's YAML.

    Args:
        found: All configurations.
        own: Setting of the YAML.
        is_fake: Whether they were counted without values.
        choice: Configuration that meets the user's target; None if none does.
        about_hosts: Sentences about the memory of the hosts.
        higher: What fits with a higher stage of sharding, if nothing fits as the job is.
        console: Console of the output.
    """
    console = console or Console()
    marks = marks_of(found, own, choice)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    has_tokens = all(candidate.tokens_per_s for candidate in found)
    for name in COLUMNS:
        name = "tok/s" if name == "smp/s" and has_tokens else name
        table.add_column(name, justify="left" if name in ("", "GPU", "setting") else "right", no_wrap=True)
    for candidate in shown_of(found, own, choice):
        style = "" if candidate.fits else "dim"
        table.add_row(*(Text(cell, style) for cell in (marks.get(id(candidate), ""), *cells_of(candidate))))
    console.print(table)
    console.print(LEGEND, highlight=False)
    for sentence in (*sentences(found, own, is_fake), *about_hosts):
        console.print(sentence, highlight=False)
    if not any(candidate.fits for candidate in found):
        console.print(text_of_none(higher), highlight=False)


def text_of_none(higher: Higher | None) -> str:
    """Return the sentence about a plan in which nothing fits, with what fits with a higher stage of sharding."""
    if higher is None:
        return NONE_FITS
    each, offer = higher.candidate, higher.candidate.offer
    changes = [f"sharding.stage={higher.stage}", *overrides_of(each.setting, higher.own)]
    return (
        f"No configuration fits as the job is sharded; with {' '.join(changes)}, each of {counted(each.workers, 'worker')} needs "
        f"{gib_text(each.needed_bytes)} of the {gib_text(each.room_bytes)} of {offer.gpu.title}."
    )


def sentences(found: Found, own: Setting, is_fake: bool) -> Iterator[str]:
    """Yield what the user should know about the table, in sentences."""
    for name, group in by_gpu([each for each in found if each.setting == own]).items():
        least = min(group, key=lambda each: each.needed_bytes)
        if least.fits:
            continue
        short = least.needed_bytes - least.room_bytes
        nearest = [each for each in found if each.offer.gpu.title == name and each.fits]
        text = f"The job as it is needs {gib_text(least.needed_bytes)} on {name}, {gib_text(short)} more than there are"
        if nearest:
            best = min(nearest, key=lambda each: each.hours * each.workers)
            text += f"; with {_difference(best, own)} it needs {gib_text(best.needed_bytes)}"
        yield f"{text}."
    if own.activations.offload:
        yield "What activations.offload moves to the host is counted as if it stayed on the GPU, which needs less than the table says."
    if not is_fake:
        yield (
            "The script needs values of tensors, or has a layer whose fake results lack a size, so a few samples ran through the model on "
            "this machine, and larger micro-batches are extrapolated."
        )


def marks_of(found: Found, own: Setting, choice: Candidate[Setting] | None) -> dict[int, str]:
    """Return the letters that mark configurations, by their identity."""
    cheap, fast = cheapest(found), fastest(found)
    return {
        id(each): "Y" * (each.setting == own) + "C" * (each is cheap) + "F" * (each is fast) + "*" * (each is choice)
        for each in found
    }


def shown_of(found: Found, own: Setting, choice: Candidate[Setting] | None) -> list[Candidate[Setting]]:
    """Return the configurations that are shown, in the order of the table."""
    best: dict[tuple[str, int], Candidate[Setting]] = {}
    for each in found:
        key = (each.offer.gpu.title, each.workers)
        if each.fits and (key not in best or each.hours < best[key].hours):
            best[key] = each
    wanted = [*best.values(), cheapest(found), fastest(found), choice]
    shown = {id(each) for each in wanted if each is not None}
    return [each for each in found if id(each) in shown or each.setting == own]


def by_gpu(candidates: Sequence[Candidate[Setting]]) -> dict[str, list[Candidate[Setting]]]:
    """Return the configurations of each kind of GPU, by its title."""
    groups: dict[str, list[Candidate[Setting]]] = {}
    for each in candidates:
        groups.setdefault(each.offer.gpu.title, []).append(each)
    return groups


def cells_of(candidate: Candidate[Setting]) -> tuple[str, ...]:
    """Return the cells of a row, one for each of COLUMNS after the marks."""
    setting = candidate.setting
    keep = setting.activations.keep + ("+offload" if setting.activations.offload else "")
    return (
        candidate.offer.gpu.title.removesuffix(" GB"),
        str(candidate.workers),
        f"{setting.compute} {keep} {candidate.samples}",
        f"{candidate.needed_bytes / GIB:.1f}/{candidate.room_bytes / GIB:.0f}",
        seconds_text(candidate.step.total),
        rate_text(candidate.tokens_per_s or candidate.samples_per_s),
        hours_text(candidate.hours),
        dollars_text(candidate.dollars),
        dollars_text(candidate.spot_dollars),
    )


def _difference(candidate: Candidate[Setting], own: Setting) -> str:
    """Return the settings that differ from the job's, as the job's YAML writes them."""
    return " ".join(overrides_of(candidate.setting, own)) or f"{candidate.workers} workers"


def gib_text(size: float) -> str:
    """Return a number of bytes in GiB."""
    return f"{size / GIB:.1f} GiB"


def seconds_text(seconds: float) -> str:
    """Return the duration of a step, such as `240 ms`, `12.45 s` or `222 s`."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s" if seconds < 100 else f"{seconds:,.0f} s"


def hours_text(hours: float) -> str:
    """Return the duration of a run, such as `12 min`, `41.9 h`, `162 h` or `75 d`."""
    if hours < 1:
        return f"{hours * 60:.0f} min"
    return f"{hours:.1f} h" if hours < 100 else f"{hours:.0f} h" if hours < 1000 else f"{hours / 24:,.0f} d"


def dollars_text(dollars: float | None) -> str:
    """Return the price of a run, such as `<$0.01`, `$72.19`, `$1,288` or `$112k`; a dash if it is not known."""
    if dollars is None:
        return DASH
    if dollars < 0.005:
        return "<$0.01"
    return f"${dollars:.2f}" if dollars < 100 else f"${dollars:,.0f}" if dollars < 10_000 else f"${dollars / 1e3:,.0f}k"


def rate_text(per_s: float) -> str:
    """Return a rate per second, such as `0.52`, `7.3`, `1,864`, `31.2k` or `1.25M`."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if per_s >= 10 * size or (unit == "M" and per_s >= size):
            return f"{per_s / size:.3g}{unit}"
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"
