"""Submission of a script to a Ray cluster, or to a new local cluster, for `undula run` and `undula study`.

The module imports Ray only when the cluster is up, because Ray reads the cluster's token when it is imported.
"""

import math
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from undula.cluster.local import cluster_at_hand, local_cluster
from undula.cluster.room import refuse_what_never_fits
from undula.config.job import LoadedSpec, absolute_paths, script_of
from undula.elastic.pure.spec import WorkersSpec
from undula.telemetry.live import LiveScreen

KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit statuses of a script that was killed: as its parent sees it, and as a shell reports it."""


@dataclass(frozen=True)
class Submission:
    """Script to submit, its arguments, and properties of the job that it trains."""

    script: Path
    arguments: tuple[str, ...]
    workers: WorkersSpec
    origins: Mapping[str, str]
    """Origin of each value of the job that was set, by dotted key."""
    continuing: str
    """Text for a user whose job was interrupted: the directory of the run, and how to continue it."""
    packed: int = 1
    """Number of trainings that share the resources of one worker."""

    @property
    def num_cpus(self) -> int:
        """Number of CPUs of a local cluster: those of this machine, or more if the workers need more."""
        return max(os.cpu_count() or 1, math.ceil(self.workers.max * self.workers.cpus))


def submission_of_job(
    file: Path, loaded: LoadedSpec, overrides: Sequence[str], script: Path | None, fresh: bool
) -> Submission:
    """Return the submission of a job.

    Args:
        file: YAML file of the job.
        loaded: Job with its overrides.
        overrides: Overrides of the YAML, as the user gave them.
        script: Script of the job; by default the file beside the YAML with the same name.
        fresh: Whether the job starts over.

    Raises:
        SpecError: The script does not exist.
    """
    script = script_of(file, script)
    options = ["--config", name_in_submission(script, file), *(["--fresh"] if fresh else [])]
    return Submission(
        script=script,
        arguments=(*options, *overrides, *absolute_paths(loaded.spec)),
        workers=loaded.spec.workers,
        origins=loaded.origins,
        continuing=how_to_continue("run", loaded.spec.run_url, loaded.spec.name),
    )


def how_to_continue(kind: str, url: str, name: str) -> str:
    """Return a text for the user about how to continue an interrupted job."""
    return f"{kind} directory: {url}\nsubmit it again under the name {name} to continue"


def name_in_submission(script: Path, file: Path) -> str:
    """Return the path under which a submitted script finds a file: relative in the uploaded folder of the script, absolute elsewhere."""
    return file.name if file.absolute().parent == script.parent else str(file.absolute())


def submit_and_follow(submission: Submission, address: str | None, screen: LiveScreen) -> int:
    """Submit a script, show what it prints, and return its exit status.

    The script runs on the cluster at `address` (the URL of its job API). By default, it runs on the cluster at
    RAY_API_SERVER_ADDRESS or on this machine; if there is none, it runs on a new local cluster that is stopped after the job.

    Raises:
        SpecError: A new local cluster would be too small for the job's workers.
        ClusterError: The cluster does not accept the job, or the local cluster did not start.
        KeyboardInterrupt, SystemExit: The job was stopped by Ctrl-C or SIGTERM.
    """
    if dashboard := address or cluster_at_hand():
        screen.show(f"submitting the job to the cluster at {dashboard} ...")
        return _follow(submission, dashboard, screen)
    fix = ", or submit it to a larger cluster with --address http://HOST:8265"
    refuse_what_never_fits(
        submission.workers,
        submission.origins,
        submission.num_cpus,
        submission.workers.min,
        node="this machine",
        fix=fix,
        share=submission.packed,
    )
    screen.show("starting a local Ray cluster ...")
    with local_cluster(submission.num_cpus) as cluster:
        os.environ.update(cluster.env)
        return _follow(submission, cluster.dashboard, screen)


def _follow(submission: Submission, dashboard: str, screen: LiveScreen) -> int:
    from undula.driver.submit import submit  # imports Ray, which reads the token from the environment

    try:
        status = submit(dashboard, submission.script, submission.arguments, screen.show)
    except (KeyboardInterrupt, SystemExit):
        screen.close()
        screen.show(submission.continuing)
        raise
    finally:
        screen.close()
    if status in KILLED:  # a killed driver cannot print this itself
        screen.show(f"the job's driver was killed\n{submission.continuing}")
    return status
