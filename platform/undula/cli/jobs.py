"""Commands `undula logs` and `undula stop`, for jobs that were submitted to a cluster."""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from undula.cli.options import address_option, json_option, print_json, runs_option
from undula.errors import INTERRUPTED, ClusterError, RunError, StorageError

if TYPE_CHECKING:
    from undula.driver.submit import JobApi
    from undula.report.data.summary import State

STOP_LIMIT_S = 60.0
"""Maximum time in seconds to wait until a job has stopped."""


@click.command(short_help="Show what a submitted job has printed.")
@click.argument("run", metavar="RUN")
@runs_option
@address_option
@click.option("--follow", is_flag=True, help="Also show what the job will print, and end with its exit status.")
def logs(run: str, runs: str | None, address: str | None, follow: bool) -> int:
    """Show what the current job of a run or study has printed: the newest one that has not ended, or else the newest one.

    RUN is the name of a run or study that was submitted to the cluster, or its directory as a path or an s3:// URL. Ctrl-C does not stop
    the job. Where no cluster has the job any more, this command shows what the run has kept of it.
    """
    from undula.driver.follow import exit_status, follow_to_the_end, lines_of
    from undula.driver.submit import current, jobs_of, log_of
    from undula.telemetry.live import LiveScreen

    try:
        api = _connected(address)
        job = current(jobs_of(api, run, runs)).submission_id
    except (ClusterError, RunError) as error:
        if follow or not (kept := _kept_output(run, runs)):
            raise
        click.echo(f"from the run directory, because no cluster has the log: {error}", err=True)
        click.echo(kept, nl=False)
        return 0
    assert job is not None
    if not follow:
        click.echo("\n".join(lines_of(log_of(api, job))))
        return 0
    screen = LiveScreen(sys.stdout)
    try:
        details = follow_to_the_end(api, job, screen.show)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        screen.close()
    if details is None:
        raise ClusterError(f"the cluster at {api.get_address()} has lost the job {job}, because its head was replaced")
    return exit_status(details, screen.show)


@click.command(short_help="Stop a submitted job, which can be continued later.")
@click.argument("run", metavar="RUN")
@runs_option
@address_option
@json_option
def stop(run: str, runs: str | None, address: str | None, as_json: bool) -> None:
    """Stop the jobs of a run or study, and wait until they have ended. Submit the run again to continue it.

    RUN is the name of a run or study that was submitted to the cluster, or its directory as a path or an s3:// URL. Jobs of other runs that
    have the same name in other folders train on.
    """
    from undula.driver import submit

    api = _connected(address)
    running = [job for job in submit.jobs_of(api, run, runs) if not job.status.is_terminal()]
    if not running:
        raise RunError(f"no job of {run} is running on the cluster at {api.get_address()}")
    for job in running:
        assert job.submission_id is not None
        if not submit.stop(api, job.submission_id, STOP_LIMIT_S):
            raise ClusterError(
                f"the job {job.submission_id} has not ended within {STOP_LIMIT_S:.0f} s; run the command again"
            )
    stopped = [job.submission_id for job in running]
    if as_json:
        print_json({"stopped": stopped})
    else:
        click.echo(f"stopped {', '.join(map(str, stopped))}; submit {run} again to continue")


def states_of_jobs(runs: str, address: str | None) -> "dict[str, State]":
    """Return the states of the jobs that a cluster runs now, by the folder of their run below the folder of the runs.

    Without an address, the result is empty if no cluster is at hand, or if the one of this machine cannot be asked.

    Raises:
        ClusterError: The cluster at the address, or that of RAY_API_SERVER_ADDRESS, cannot be reached.
    """
    from undula.cluster.local import DEFAULT_DASHBOARD, cluster_at_hand

    if not (dashboard := address or cluster_at_hand()):
        return {}
    from undula.driver.submit import connect, current, directory, jobs_by_run

    try:
        by_run = jobs_by_run(connect(dashboard))
    except ClusterError:
        if address or dashboard != DEFAULT_DASHBOARD:
            raise
        return {}
    states: dict[str, State] = {}
    for url, jobs in by_run.items():
        parent, _, folder = url.rpartition("/")
        status = current(jobs).status
        if parent == directory(runs) and not status.is_terminal():
            states[folder] = "pending" if status == "PENDING" else "running"
    return states


def _kept_output(run: str, runs: str | None) -> str:
    """Return what a run has kept of its output; an empty text if there is no such run, or if it has kept nothing."""
    from undula.driver.kept_output import kept_output
    from undula.state.locate import locate_run

    with suppress(RunError, StorageError):
        return kept_output(locate_run(run, runs))
    return ""


def _connected(address: str | None) -> "JobApi":
    from undula.cluster.local import cluster_at_hand
    from undula.driver.submit import connect

    dashboard = address or cluster_at_hand()
    if dashboard is None:
        raise ClusterError(
            "no Ray cluster runs on this machine; give --address http://HOST:8265, or set UNDULA_ADDRESS"
        )
    return connect(dashboard)
