"""Command `undula plan`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from undula.cli.options import (
    FILE,
    FiniteRange,
    job_arguments,
    json_option,
    positive_numbers,
    print_json,
    project_option,
    script_option,
)
from undula.cli.prices import prices_option

DEFAULT_GPUS = ("T4", "L4", "A10G", "L40S", "A100-40", "H100")


@click.command(short_help="Say what GPUs a job fits on, how fast it is there, and what it costs.")
@job_arguments
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
@prices_option
@click.option(
    "--target",
    metavar="hours=N|dollars=N|samples/s=N",
    help="Choose the cheapest configuration that is fast enough, or the fastest one within a price.  [default: the cheapest one]",
)
@click.option("--apply", "copy", type=FILE, metavar="FILE", help="Write a copy of JOB.yaml with the choice to FILE.")
@json_option
def plan(
    job: Path,
    overrides: tuple[str, ...],
    script: Path | None,
    project: Path | None,
    gpus: tuple[str, ...],
    workers: str,
    gbit: float,
    latency_ms: float,
    interruptions: float,
    prices: Path | None,
    target: str | None,
    copy: Path | None,
    as_json: bool,
) -> None:
    """Count the memory and the computation of a job on this machine, without a GPU, and show what it needs on kinds of GPUs.

    The script of JOB.yaml runs up to its steps. Its model and its batches have shapes but no memory. KEY.SUB=VALUE overrides a value of the
    YAML.

    \b
    Examples:
      undula plan jobs/language_model.yaml
      undula plan jobs/language_model.yaml --gpu L4 --gpu A10G --workers 1,2,4
      undula plan jobs/language_model.yaml --gpu L4 --target dollars=200 --apply cheap.yaml
    """
    from undula.cluster.prices import load_prices
    from undula.config.job import load_spec
    from undula.driver.plan_job import applied, plan_job, target_of
    from undula.driver.plan_table import print_plan
    from undula.errors import SpecError
    from undula.storage import write_file

    wanted = target_of(target) if target else None
    loaded = load_spec(job, overrides)
    planned = plan_job(
        job,
        loaded,
        overrides,
        gpus or DEFAULT_GPUS,
        positive_numbers(workers, "--workers"),
        (latency_ms / 1e3, gbit * 1e9 / 8),
        load_prices(prices),
        interruptions,
        script,
        project,
    )
    choice = planned.choice(wanted)
    if as_json:
        tree = {"state": asdict(planned.counted.state), "candidates": [_tree(each) for each in planned.candidates]}
        print_json({**tree, "choice": None if choice is None else _tree(choice)})
    else:
        print_plan(planned.candidates, planned.own, planned.counted.is_fake, choice)
        if choice is None and target:
            click.echo(f"No configuration that fits meets --target {target}.")
    if copy is not None:
        if choice is None:
            raise SpecError(
                "command line: --apply has nothing to write, because no configuration fits and meets --target"
            )
        write_file(str(copy), applied(job, overrides, choice, planned).encode())
        click.echo(f"undula run {copy} --script {script or job.with_suffix('.py')}", err=as_json)


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
        "efficiency": candidate.efficiency,
        "mfu": candidate.mfu,
        "hours": candidate.hours,
        "dollars": candidate.dollars,
        "spot_dollars": candidate.spot_dollars,
    }
