"""Command `undula ls`."""

import click

from undula.cli.jobs import states_of_jobs
from undula.cli.options import address_option, json_option, runs_option
from undula.errors import ClusterError, SpecError
from undula.state.defaults import default_runs


@click.command(short_help="List runs.")
@click.argument("folder", metavar="[RUNS]", required=False)
@runs_option
@address_option
@click.option(
    "--where",
    multiple=True,
    metavar="CONDITION",
    help="Only runs with this value, such as state=finished, 'steps>=100' or schedule.base_lr=0.1; can be given several times.",
)
@click.option(
    "--sort",
    metavar="KEY",
    help="Order of the runs, such as last_validation_loss, or -steps for the largest first.  [default: the newest first]",
)
@json_option
def ls(
    folder: str | None,
    runs: str | None,
    address: str | None,
    where: tuple[str, ...],
    sort: str | None,
    as_json: bool,
) -> None:
    """List the runs in the folder RUNS, which is short for --runs RUNS.

    If a cluster is at hand, the states of the runs that it trains now are those of its jobs. If the cluster of UNDULA_ADDRESS cannot be
    reached, a note says so.

    The keys of --where and --sort are those of --json, such as best_validation_loss or validation_metrics.accuracy, and the settings of the
    jobs, such as plan.global_batch. The list shows their values.
    """
    from undula.report.data.selection import selection
    from undula.report.render.terminal import print_runs
    from undula.storage import open_store

    if folder and runs:
        raise SpecError(f"command line: RUNS is {folder} and --runs is {runs}; give one of them")
    url = folder or runs or default_runs()
    wanted = selection(where, sort)
    try:
        jobs = states_of_jobs(url, address)
    except ClusterError as error:
        source = click.get_current_context().get_parameter_source("address")
        if source is click.core.ParameterSource.COMMANDLINE:
            raise
        jobs = {}
        click.echo(f"note: {error}; the states are those of the run directories", err=True)
    print_runs(open_store(url), as_json, wanted, jobs=jobs)
