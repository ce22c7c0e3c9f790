"""Submits a script to a Ray cluster, or to a new one on this machine, and follows it to its end.

`undula run` and `undula study` share it. The module imports Ray only once the cluster is there, as Ray reads a cluster's token when it is
imported.
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
    """A script with its arguments, and what must be known about the job that it trains."""

    script: Path
    arguments: tuple[str, ...]
    workers: WorkersSpec
    origins: Mapping[str, str]
    """Place of each of the job's values, by dotted key."""
    continuing: str
    """Text for a user whose job was interrupted: where its directory is, and how the job continues."""
    packed: int = 1
    """Number of trainings that share what one worker needs."""

    @property
    def num_cpus(self) -> int:
        """Number of CPUs of a local cluster: those of this machine, or more, so that all workers find room."""
        return max(os.cpu_count() or 1, math.ceil(self.workers.max * self.workers.cpus))


def submission_of_job(
    file: Path, loaded: LoadedSpec, overrides: Sequence[str], script: Path | None, fresh: bool
) -> Submission:
    """Submission of a job.

    Args:
        file: YAML of the job.
        loaded: The job, with its overrides.
        overrides: Overrides of the YAML, as the user gave them.
        script: Script of the job. By default it lies beside the YAML and has its name.
        fresh: Whether the job starts over.

    Raises:
        SpecError: there is no script.
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
    """Text for a user whose job was interrupted."""
    return f"{kind} directory: {url}\nsubmit it again under the name {name} to continue"


def name_in_submission(script: Path, file: Path) -> str:
    """Name of a file in the working directory of a submitted script. The script's folder travels, with all that lies in it."""
    return file.name if file.absolute().parent == script.parent else str(file.absolute())


def submit_and_follow(submission: Submission, address: str | None, screen: LiveScreen) -> int:
    """Submit a script and show what it prints; returns its exit status.

    The cluster is the one at `address` (URL of its job API), else the one that this machine's settings name or that runs on it, else a
    new one that lives as long as the job.

    Raises:
        SpecError: a new cluster would have no room for the job's workers.
        ClusterError: the cluster does not take the job, or none came up.
        KeyboardInterrupt, SystemExit: the job was stopped by Ctrl-C or SIGTERM.
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
    from undula.cluster.submit import submit  # the token must be in the environment by now

    try:
        status = submit(dashboard, submission.script, submission.arguments, screen.show)
    except (KeyboardInterrupt, SystemExit):
        screen.close()
        screen.show(submission.continuing)
        raise
    finally:
        screen.close()
    if status in KILLED:  # the driver could not say it itself
        screen.show(f"the job's driver was killed\n{submission.continuing}")
    return status
