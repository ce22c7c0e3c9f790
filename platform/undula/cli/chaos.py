"""Command `undula chaos`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from undula.cli.options import FILE, job_arguments, json_option, print_json, runs_option, script_option, with_runs
from undula.errors import SpecError

if TYPE_CHECKING:
    from undula.testing.chaos_job import Baseline


@click.command(short_help="Train a job on local nodes that come and go.")
@job_arguments
@script_option
@runs_option
@click.option(
    "--trace", type=FILE, metavar="FILE", help="Recorded numbers of spot nodes, which the local nodes follow."
)
@click.option("--speedup", default=60.0, show_default=True, metavar="X", help="Factor by which the trace is sped up.")
@click.option(
    "--changes", type=int, metavar="N", help="Use the part of the trace with N changes and the fewest counts of zero."
)
@click.option(
    "--notice", default=20.0, show_default=True, metavar="S", help="Seconds between a notice and the removal of a node."
)
@click.option(
    "--no-notice-share",
    default=0.0,
    show_default=True,
    metavar="P",
    help="Share of nodes that are removed without notice.",
)
@click.option(
    "--faults",
    type=FILE,
    metavar="FILE",
    help="Schedule with one fault per line, such as `at step 40: sigkill worker 1`.",
)
@click.option(
    "--nodes", type=int, metavar="N", help="Number of nodes at the start of a schedule.  [default: workers.max]"
)
@click.option(
    "--limit",
    default=3600.0,
    show_default=True,
    metavar="S",
    help="Seconds after which a job under a schedule is stopped.",
)
@click.option(
    "--baseline",
    type=click.Choice(["ray"]),
    help="Train with Ray Train's own trainer and a checkpoint every 10 steps, for comparison.",
)
@json_option
def chaos(
    job: Path,
    overrides: tuple[str, ...],
    script: Path | None,
    runs: str | None,
    trace: Path | None,
    speedup: float,
    changes: int | None,
    notice: float,
    no_notice_share: float,
    faults: Path | None,
    nodes: int | None,
    limit: float,
    baseline: "Baseline | None",
    as_json: bool,
) -> int:
    """Train JOB.yaml on a local cluster whose nodes come and go, and report outages, lost steps and the certificate.

    Each node has room for one worker. The nodes follow a recorded trace (--trace) or a schedule of faults (--faults). The run is stored
    under the job's name with the suffix -chaos.

    \b
    Example:
      echo 'at step 20: sigkill worker 1' > faults.txt
      undula chaos jobs/language_model.yaml --faults faults.txt plan.max_steps=100
    """
    from undula.report.data.certificate import certify, data_of
    from undula.report.data.run_record import read_run
    from undula.state.directory import JOB_FILE
    from undula.telemetry.live import LiveScreen
    from undula.testing.chaos_job import load_chaos_job
    from undula.testing.scenario import from_faults, from_trace, run_scenario

    loaded = load_chaos_job(job, with_runs(overrides, runs), script, baseline)
    spec, store = loaded.spec, loaded.store
    if trace and not faults:
        scenario = from_trace(trace, speedup, spec.workers.max, changes, notice, no_notice_share)
    elif faults and not trace:
        scenario = from_faults(faults, nodes or spec.workers.max, spec.plan.max_steps)
    else:
        raise SpecError("command line: give either --trace FILE or --faults FILE")
    log = sys.stderr if as_json else sys.stdout
    if store.exists(JOB_FILE):
        click.echo(f"chaos: replacing the run in {store.url}", file=log)

    screen = LiveScreen(log)
    screen.show("chaos: starting a local cluster ...")
    try:
        outcome = run_scenario(scenario, loaded.command, loaded.folder, store, spec.workers.min, limit, screen.show)
    finally:
        screen.close()
    if outcome.problem and not store.exists(JOB_FILE):
        click.echo(f"undula: {outcome.problem}", err=True)
        return 1
    run = read_run(store)
    certificate = certify(run, data_of(run))
    if as_json:
        print_json({"run": store.url, **outcome.as_json(), "certificate": certificate.as_json()})
    else:
        click.echo("\n".join(outcome.lines()))
        click.echo(
            f"certificate: {'holds' if certificate.holds else certificate.difference} (undula verify {store.url})"
        )
        click.echo(f"run directory: {store.url}")
    if outcome.problem:
        click.echo(f"undula: {outcome.problem}", err=True)
    return 0 if certificate.holds and not outcome.problem else 1
