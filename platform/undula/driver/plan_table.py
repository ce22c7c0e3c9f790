"""Table of the configurations in which a job could train, for the terminal."""

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from undula.driver.plan_job import Higher, Planned, overrides_of
from undula.plan.candidates import Candidate, cheapest, fastest
from undula.plan.gpus import GIB
from undula.report.text import DASH
from undula.train.dry_run.counting import Setting

COLUMNS = ("", "GPU", "W", "setting", "GiB", "step", "smp/s", "time", "cost", "spot")
LEGEND = (
    "Y the job's own setting, C the cheapest, F the fastest, * the choice; W workers; setting: number format, activations.keep and "
    "micro-batch; GiB needed and there; smp/s samples or tok/s tokens per second; time and cost of the whole run, on demand and on spot "
    "nodes"
)
HIGHER_LEGEND = "; S{0} what fits with sharding.stage={0}"
UNPRICED_LEGEND = f"; {DASH} no price is known, give --prices"
NONE_FITS = "No configuration fits; give --gpu a kind with more memory, or lower plan.virtual_workers."
Found = Sequence[Candidate[Setting]]
"""Configurations of a job."""


def print_plan(
    planned: Planned,
    choice: Candidate[Setting] | None,
    notes: Iterable[str] = (),
    about_hosts: Iterable[str] = (),
    console: Console | None = None,
) -> None:
    """Print for each kind of GPU and number of workers the fastest configuration that fits, and that of the job's YAML.

    Args:
        planned: The plan.
        choice: Configuration that meets the user's target; None if none does.
        notes: Sentences about what was taken for the size of a model.
        about_hosts: Sentences about the memory of the hosts.
        console: Console of the output.
    """
    console = console or Console()
    for note in notes:
        console.print(note, highlight=False)
    if (text := text_of_small(planned)) is None:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        has_tokens = all(candidate.tokens_per_s for candidate in planned.candidates)
        for name in COLUMNS:
            name = "tok/s" if name == "smp/s" and has_tokens else name
            table.add_column(name, justify="left" if name in ("", "GPU", "setting") else "right", no_wrap=True)
        rows = [*rows_of(planned, choice)]
        for marks, cells, fits in rows:
            table.add_row(*(Text(cell, "" if fits else "dim") for cell in (marks, *cells)))
        console.print(table)
        text = LEGEND + (HIGHER_LEGEND.format(planned.higher.stage) if planned.higher else "")
        text += UNPRICED_LEGEND * any(DASH in cells for _, cells, _ in rows)
    for sentence in (text, *sentences(planned), *about_hosts):
        console.print(sentence, highlight=False)
    if not any(candidate.fits for candidate in planned.candidates):
        console.print(text_of_none(planned.higher), highlight=False)


def text_of_small(planned: Planned) -> str | None:
    """Return the sentence about a job that each kind of GPU on which it fits trains in less than a minute; None if it is none."""
    best = [each for group in by_gpu(planned.candidates).values() if (each := fastest(group))]
    if not best or (longest := max(best, key=lambda each: each.hours)).hours >= 1 / 60:
        return None
    return (
        f"The job is too small for kinds of GPUs and numbers of workers to differ: all steps take about {hours_text(longest.hours)} and "
        f"{gib_text(longest.needed_bytes)} of a GPU's memory, so one worker is enough."
    )


def text_of_none(higher: Higher | None) -> str:
    """Return the sentence about a plan in which nothing fits, with what fits with a higher stage of sharding."""
    if higher is None:
        return NONE_FITS
    each, offer = higher.candidate, higher.candidate.offer
    who = f"each of {each.workers} workers" if each.workers > 1 else "a worker"
    changes = [f"sharding.stage={higher.stage}", *overrides_of(each.setting, higher.own)]
    return (
        f"No configuration fits as the job is sharded; with {' '.join(changes)}, {who} needs "
        f"{gib_text(each.needed_bytes)} of the {gib_text(each.room_bytes)} of {offer.gpu.title}."
    )


def sentences(planned: Planned) -> Iterator[str]:
    """Yield what the user should know about the table, in sentences."""
    found, own = planned.candidates, planned.own
    for override, error in planned.counted.left_out.items():
        yield f"{override} is left out, because the model failed with it ({error})."
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
    if not planned.counted.is_fake:
        yield (
            "The script needs values of tensors, or has a layer whose fake results lack a size, so a few samples ran through the model on "
            "this machine, and larger micro-batches are extrapolated."
        )


def rows_of(planned: Planned, choice: Candidate[Setting] | None) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Yield the rows of the table: the letters that mark a configuration, its cells, and whether it fits."""
    found, own = planned.candidates, planned.own
    cheap, fast = cheapest(found), fastest(found)
    best: dict[tuple[str, int], Candidate[Setting]] = {}
    for each in found:
        key = (each.offer.gpu.title, each.workers)
        if each.fits and (key not in best or each.hours < best[key].hours):
            best[key] = each
    shown = {id(each) for each in (*best.values(), cheap, fast, choice)}
    for each in found:
        if id(each) in shown or each.setting == own:
            marks = "Y" * (each.setting == own) + "C" * (each is cheap) + "F" * (each is fast) + "*" * (each is choice)
            yield marks, _cells_of(each), each.fits
    if higher := planned.higher:
        yield f"S{higher.stage}", _cells_of(higher.candidate), True


def by_gpu(candidates: Sequence[Candidate[Setting]]) -> dict[str, list[Candidate[Setting]]]:
    """Return the configurations of each kind of GPU, by its title."""
    groups: dict[str, list[Candidate[Setting]]] = {}
    for each in candidates:
        groups.setdefault(each.offer.gpu.title, []).append(each)
    return groups


def _cells_of(candidate: Candidate[Setting]) -> tuple[str, ...]:
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
    """Return the duration of a run, such as `0.4 s`, `12 min`, `41.9 h`, `162 h` or `75 d`."""
    if hours < 1 / 60:
        return f"{hours * 3600:.2g} s"
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
