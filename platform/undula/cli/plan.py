"""Command `undula plan`."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from undula.cli.options import (
    FILE,
    FiniteRange,
    json_option,
    positive_numbers,
    print_json,
    project_option,
    script_option,
)
from undula.cli.plan_options import job_or_model, size_options
from undula.cli.prices import prices_option

if TYPE_CHECKING:
    from undula.driver.plan_job import Planned

DEFAULT_GPUS = ("T4", "L4", "A10G", "L40S", "A100-40", "H100")


@click.command(short_help="Say what GPUs a job fits on, how fast it is there, and what it costs.")
@click.argument("arguments", nargs=-1, metavar="[JOB.yaml] [KEY.SUB=VALUE]...")
@size_options
@script_option
@project_option
@click.option(
    "--gpu", "gpus", multiple=True, metavar="TYPE", help=f"Kind of GPU.  [default: {', '.join(DEFAULT_GPUS)}]"
)
@click.option("--workers", default="1,2,4,8", show_default=True, metavar="N,N...", help="Numbers of workers.")
@click.option(
    "--gbit",
    type=FiniteRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="Rate of the network between two workers in Gbit/s.",
)
@click.option(
    "--latency-ms",
    type=FiniteRange(min=0),
    default=0.1,
    show_default=True,
    help="Duration of an empty message between two workers in milliseconds.",
)
@click.option(
    "--interruptions",
    type=FiniteRange(min=0),
    default=0.05,
    show_default=True,
    help="Number of times in an hour that a spot worker is taken.",
)
@click.option(
    "--rates",
    type=FILE,
    metavar="FILE",
    help="Also plan for a worker and a link that `undula doctor --measure FILE` has measured.",
)
@prices_option
@click.option(
    "--target",
    metavar="hours=N|dollars=N|samples/s=N|tokens/s=N",
    help="Choose the cheapest configuration that is fast enough, or the fastest one within a price.  [default: the cheapest one]",
)
@click.option("--apply", "copy", type=FILE, metavar="FILE", help="Write a copy of JOB.yaml with the choice to FILE.")
@click.option(
    "--page", type=FILE, metavar="FILE", help="Write a page with the table, bars and curves to FILE, as HTML."
)
@json_option
def plan(
    arguments: tuple[str, ...],
    script: Path | None,
    project: Path | None,
    gpus: tuple[str, ...],
    workers: str,
    gbit: float,
    latency_ms: float,
    interruptions: float,
    rates: Path | None,
    prices: Path | None,
    target: str | None,
    copy: Path | None,
    page: Path | None,
    as_json: bool,
    **size: Any,
) -> None:
    """Count the memory and the computation of a job on this machine, without a GPU, and show what it needs on kinds of GPUs.

    The script of JOB.yaml runs up to its steps. Its model and its batches have shapes but no memory. KEY.SUB=VALUE overrides a value of the
    YAML. Without a job, --parameters plans a decoder-only transformer (GPT) of this size.

    \b
    Examples:
      undula plan jobs/language_model.yaml
      undula plan --parameters 7e9 --optimizer adamw --gpu H100 --workers 8
      undula plan jobs/language_model.yaml --gpu L4 --gpu A10G --workers 1,2,4
      undula plan jobs/language_model.yaml --gpu L4 --target dollars=200 --apply cheap.yaml
    """
    from rich.console import Console

    from undula.cluster.prices import load_prices
    from undula.driver.plan_job import measured_in, plan_job, target_of

    wanted, counts = target_of(target) if target else None, positive_numbers(workers, "--workers")
    job, overrides, notes = job_or_model(arguments, size, counts, {"--script": script, "--apply": copy})
    measured = measured_in(rates) if rates else None
    with Console(file=sys.stderr, quiet=as_json).status("") as line:
        planned = plan_job(
            job,
            overrides,
            gpus or (() if measured else DEFAULT_GPUS),
            counts,
            (latency_ms / 1e3, gbit * 1e9 / 8),
            load_prices(prices),
            interruptions,
            script,
            project,
            measured,
            line.update,
        )
    _print(planned, notes, planned.choice(wanted), target, as_json)
    if page is not None:
        from undula.driver.plan_page import Conditions, write_page

        write_page(page, planned, notes, wanted, Conditions(latency_ms, gbit, interruptions))
        click.echo(f"page: {page}", err=as_json)
    if copy is not None:
        _write_copy(copy, job, overrides, planned, planned.choice(wanted))
        click.echo(f"undula run {copy} --script {script or job.with_suffix('.py')}", err=as_json)


def _print(planned: "Planned", notes: Sequence[str], choice: Any, target: str | None, as_json: bool) -> None:
    """Print a plan as a table or as JSON, with what was taken for the size of a model."""
    from undula.driver.plan_host import host_sentences, host_tree
    from undula.driver.plan_table import print_plan

    if as_json:
        counted, candidates = planned.counted, [_tree(each) for each in planned.candidates]
        tree = {"state": asdict(counted.state), "candidates": candidates, "left_out": dict(counted.left_out)}
        higher = planned.higher and {"stage": planned.higher.stage, **_tree(planned.higher.candidate)}
        chosen = None if choice is None else _tree(choice)
        print_json({"notes": notes, **tree, "host": host_tree(planned), "choice": chosen, "higher_stage": higher})
        return
    print_plan(planned, choice, notes, host_sentences(planned, choice))
    if choice is None and target:
        click.echo(f"No configuration that fits meets --target {target}.")


def _write_copy(copy: Path, job: Path, overrides: Sequence[str], planned: "Planned", choice: Any) -> None:
    """Write a copy of a job's YAML with a configuration.

    Raises:
        SpecError: There is none.
    """
    from undula.driver.plan_job import applied
    from undula.errors import SpecError
    from undula.storage import write_file

    if choice is None:
        raise SpecError("command line: --apply has nothing to write, because no configuration fits and meets --target")
    write_file(str(copy), applied(job, overrides, choice, planned).encode())


def _tree(candidate: Any) -> dict[str, Any]:
    return {
        "gpu": candidate.offer.gpu.title,
        "machine": candidate.offer.machine,
        "workers": candidate.workers,
        **asdict(candidate.setting),
        "needed_bytes": candidate.needed_bytes,
        "room_bytes": candidate.room_bytes,
        "fits": candidate.fits,
        "memory": asdict(candidate.memory),
        "step": asdict(candidate.step),
        "samples_per_s": candidate.samples_per_s,
        "tokens_per_s": candidate.tokens_per_s,
        "efficiency": candidate.efficiency,
        "mfu": candidate.mfu,
        "hours": candidate.hours,
        "dollars": candidate.dollars,
        "spot_dollars": candidate.spot_dollars,
    }
