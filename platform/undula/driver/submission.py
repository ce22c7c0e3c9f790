"""Submission of a script to a Ray cluster, or to a new local cluster, for `undula run` and `undula study`.

A job on a cluster that was there before does not need the process that has submitted it: Ctrl-C ends only this process.

The module imports Ray only to talk to a cluster's job API: the import takes a while, and a script on a cluster of its own does not need it.
"""

import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from undula import extensions
from undula.cluster.local import cluster_at_hand, job_api_answers
from undula.cluster.room import refuse_what_never_fits
from undula.config.environment import having, without_secrets
from undula.config.job import LoadedSpec, absolute_paths, script_of
from undula.config.yaml_file import files_for_job
from undula.driver.early_checks import check_before_cluster
from undula.driver.local_job import run_on_own_cluster
from undula.driver.project import importable, project_modules
from undula.driver.script import run_submitted
from undula.elastic.pure.spec import WorkersSpec
from undula.errors import INTERRUPTED, ClusterError, SpecError
from undula.masking.values import declared_in
from undula.state.defaults import default_runs
from undula.storage import open_store
from undula.telemetry.live import LiveScreen
from undula.train.left_out import left_out

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

    from undula.driver.submit import JobApi

Mode: TypeAlias = Literal["follow", "detach", "keep-alive"]
"""What happens after the submission: the job is followed, left alone, or followed and submitted again whenever the cluster has lost it."""
LAUNCHERS = "undula.launchers"
"""Group of the entry points by which packages add launchers: functions of a job, each of which returns a context manager that starts a
cluster for the job, gives the URL of its job API, and stops it."""
FRESH = "--fresh"
"""Option of a script with which its job starts over."""
SMOKE = "--smoke"
"""Option of a script with which its job is only tested."""
KILLED = 128 + signal.SIGKILL
"""Exit status of a script that was killed."""
AWAIT_CLUSTER_S = 2.0
"""Seconds between two attempts to reach a cluster."""
MOST_REFUSALS = 30
"""Number of times in a row that a cluster may refuse a job that is kept alive."""


EVERYWHERE = {"config", "env_vars", "excludes"}
"""Keys of a runtime environment that need nothing of a cluster."""

_REFERENCE = r"\$(?:(\w+)|\{(\w+)\})"
"""Reference to another variable in a variable of a runtime environment. Ray leaves the first form of an unknown name as it is, and removes
the second one."""
MOST_NAMES = 8
"""Maximum number of files that are not sent and that a message names."""


@dataclass(frozen=True)
class Submission:
    """Script to submit, its arguments, and properties of the job that it trains."""

    script: Path
    arguments: tuple[str, ...]
    workers: WorkersSpec
    origins: Mapping[str, str]
    """Origin of each value of the job that was set, by dotted key."""
    kind: Literal["run", "study"]
    url: str
    """Directory of the run or study."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the job's processes, which no list, log or file shows."""
    modules: tuple[Path, ...] = ()
    """Packages and modules of the project that the script needs beside its folder."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray's runtime environment of the job, without what Undula sets itself."""
    packed: int = 1
    """Number of trainings that share the resources of one worker."""
    check_here: Callable[[Sequence[str]], bool] = lambda _arguments: False
    """Checks of the job's driver that this machine can make before it starts a cluster, with the environment of the job. Given the
    arguments of the script, it returns whether the driver needs no cluster, because the run is finished."""

    def with_environment(
        self, variables: Mapping[str, str], runtime_env: Mapping[str, Any] = MappingProxyType({})
    ) -> "Submission":
        """Return the submission with further environment variables for the job's processes, and with a runtime environment.

        Those of the runtime environment that are no secrets stay there too, because Ray sets them before a process starts.
        """
        secret = declared_in(variables)
        public = {name: variables[name] for name in runtime_env.get("env_vars", {}) if name not in secret}
        environment = {**self.environment, **variables}
        return replace(self, environment=environment, runtime_env={**runtime_env, "env_vars": public})

    def again(self) -> "Submission":
        """Return the submission that continues this one, which does not start over."""
        return replace(self, arguments=tuple(argument for argument in self.arguments if argument != FRESH))

    def as_smoke_test(self) -> "Submission":
        """Return the submission that only tests the job."""
        return replace(self, arguments=(*self.arguments, SMOKE))

    @property
    def name(self) -> str:
        """Name of the run or study."""
        return self.url.rpartition("/")[2]

    @property
    def is_in_default_folder(self) -> bool:
        """Whether commands find the run or study by its name."""
        return self.url == f"{default_runs().rstrip('/')}/{self.name}"

    @property
    def continuing(self) -> str:
        """Text for a user whose job was interrupted: the directory of the run, and how to continue it."""
        if SMOKE in self.arguments:
            return f"the smoke test has not ended; delete {self.url}-smoke-* if it is there"
        return f"{self.kind} directory: {self.url}\nsubmit it again under the name {self.name} to continue"

    @property
    def num_cpus(self) -> int:
        """Number of CPUs of a local cluster: those of this machine, or more if the workers need more."""
        return max(os.cpu_count() or 1, math.ceil(self.workers.max * self.workers.cpus))


def submission_of_job(
    file: Path,
    loaded: LoadedSpec,
    overrides: Sequence[str],
    script: Path | None,
    fresh: bool,
    project: Path | None = None,
) -> Submission:
    """Return the submission of a job.

    Args:
        file: YAML file of the job.
        loaded: Job with its overrides.
        overrides: Overrides of the YAML, as the user gave them.
        script: Script of the job; by default the file beside the YAML with the same name.
        fresh: Whether the job starts over.
        project: Root of the script's project; by default the nearest folder that looks like one.

    Raises:
        SpecError: The script or the root of its project does not exist.
    """
    script = script_of(file, script)
    options = ["--config", name_in_submission(script, file), *([FRESH] if fresh else [])]
    shown, private = without_secrets(overrides)
    return Submission(
        script=script,
        arguments=(*options, *shown, *absolute_paths(loaded.spec)),
        environment={**private, **files_for_job(script, [file])},
        modules=tuple(project_modules(script, project)),
        workers=loaded.spec.workers,
        origins=loaded.origins,
        kind="run",
        url=loaded.spec.run_url,
        check_here=partial(_check_here, loaded),
    )


def _check_here(loaded: LoadedSpec, arguments: Sequence[str]) -> bool:
    if loaded.spec.trackers:
        from undula.driver.trackers import checked_trackers  # most jobs need none of its imports

        checked_trackers(loaded, open_store(loaded.spec.run_url))
    return SMOKE not in arguments and check_before_cluster(loaded, FRESH in arguments)


def name_in_submission(script: Path, file: Path) -> str:
    """Return the path under which a submitted script finds a file: relative in the uploaded folder of the script, absolute elsewhere."""
    return file.name if file.absolute().parent == script.parent else str(file.absolute())


@contextmanager
def cluster_of(launcher: str, loaded: LoadedSpec) -> Iterator[str]:
    """Start a cluster for a job with a launcher, and yield the URL of its job API.

    Raises:
        SpecError: There is no launcher of that name, or it is none.
    """
    if (launch := extensions.load(LAUNCHERS, {}, launcher)) is None:
        known = ", ".join(extensions.names(LAUNCHERS, {})) or "none"
        raise SpecError(
            f"command line: --launcher is {launcher!r}, and the installed launchers are: {known}; correct the name, or install the "
            "package that adds it"
        )
    cluster = launch(loaded)
    if not isinstance(cluster, AbstractContextManager):
        raise SpecError(
            f"{launcher!r} of {LAUNCHERS} returned no context manager; decorate it with contextlib.contextmanager"
        )
    with cluster as dashboard:
        yield dashboard


def run_submission(submission: Submission, address: str | None, screen: LiveScreen, mode: Mode) -> int:
    """Submit a script, show what it prints, and return its exit status, or 0 if it was left alone.

    The script runs on the cluster at `address` (the URL of its job API). By default, it runs on the cluster at
    RAY_API_SERVER_ADDRESS or on this machine; if there is none, it runs on a new local cluster that is stopped after the job.

    Raises:
        SpecError: RAY_ADDRESS names a cluster, or a new local cluster would be too small for the job's workers, or would end before the
            job, or a tracker of the job lacks a library, a setting or credentials.
        ClusterError: The cluster does not accept the job, or the local cluster did not start.
        KeyboardInterrupt, SystemExit: Ctrl-C or SIGTERM ended this command. A job on a new local cluster was stopped.
    """
    if dashboard := address or cluster_at_hand():
        return _run_on_cluster(submission, dashboard, f" --address {address}" if address else "", screen, mode)
    if mode != "follow":
        raise SpecError(
            f"command line: --{mode} needs a cluster that stays when this command ends; start one with `ray start --head`, or give "
            "--address http://HOST:8265"
        )
    if (named := os.environ.get("RAY_ADDRESS") or "local") != "local":
        raise SpecError(
            f"environment: RAY_ADDRESS is {named}, but `undula run` submits jobs to a URL; give --address http://HOST:8265 for that "
            "cluster, or unset RAY_ADDRESS to train on this machine"
        )
    submission = _as_on_nodes(submission)
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
    with having(submission.environment):
        is_finished = submission.check_here(submission.arguments)
    if is_finished:
        return run_in_this_process(submission)
    screen.show("starting a local Ray cluster ...")
    return _run_here(submission, screen)


def run_in_this_process(submission: Submission, *options: str) -> int:
    """Run a script in this process, as `python SCRIPT ARGUMENTS OPTIONS` does, and return its exit status."""
    submission = _as_on_nodes(submission)
    os.environ.update(submission.environment)
    with importable(submission.modules) as path:
        sys.path += [text.partition(os.pathsep)[0] for text in path.values()]
        run_submitted(submission.script, [*submission.arguments, *options])
    return 0


def _as_on_nodes(submission: Submission) -> Submission:
    """Return the submission with the variables that Ray would set in the processes of a job, where it trains without a cluster of before.

    Raises:
        SpecError: Its runtime environment has more than variables, which Ray makes only on the nodes of such a cluster.
    """
    if keys := sorted(submission.runtime_env.keys() - EVERYWHERE):
        raise SpecError(
            f"command line: --runtime-env: {keys[0]} has an effect only on a cluster that has started before; remove it and install what "
            "the job needs on this machine, or give --address http://HOST:8265"
        )
    known, variables = dict(os.environ), submission.runtime_env.get("env_vars", {})
    for name, value in variables.items():  # each may refer to those before it, such as PATH: /opt/bin:${PATH}
        known[name] = re.sub(_REFERENCE, lambda it: known.get(it[1] or it[2], it[0] if it[1] else ""), value)
    variables = {name: known[name] for name in variables}
    environment = {**submission.environment, **variables}
    return replace(submission, environment=environment, runtime_env={**submission.runtime_env, "env_vars": variables})


def _run_here(submission: Submission, screen: LiveScreen) -> int:
    """Run a script on a cluster of its own. Ctrl-C stops both."""
    try:
        code = run_on_own_cluster(
            submission.script,
            submission.arguments,
            submission.environment,
            submission.runtime_env.get("env_vars", {}),
            submission.modules,
            submission.num_cpus,
            screen.show,
        )
    except (KeyboardInterrupt, SystemExit):
        screen.close()
        screen.show(submission.continuing)
        raise
    finally:
        screen.close()
    return _shown(code, submission, screen)


def _run_on_cluster(submission: Submission, dashboard: str, option: str, screen: LiveScreen, mode: Mode) -> int:
    """Run a script on a cluster that stays. Ctrl-C leaves it alone.

    Args:
        submission: The script.
        dashboard: URL of the cluster's job API.
        option: Option of commands that names the cluster.
        screen: Screen that shows what the script prints.
        mode: What happens after the submission.
    """
    from undula.driver import follow, submit

    run = submission.name if submission.is_in_default_folder else submission.url
    hints = f"undula logs {run} --follow{option}\nundula stop {run}{option}"
    screen.show(f"submitting the job to the cluster at {dashboard} ...")
    submission = _noting_what_is_left_out(submission, screen)
    refusals, job = 0, submit.new_job()
    while True:
        if mode == "keep-alive":
            _await_cluster(dashboard, screen)
        try:
            api = submit.connect(dashboard)
            _start(api, job, submission)
        except ClusterError:
            refusals += 1
            if mode != "keep-alive" or refusals > MOST_REFUSALS:
                raise
            time.sleep(AWAIT_CLUSTER_S)  # a head that has just started answers before it takes jobs
            continue
        refusals = 0
        if mode == "detach":
            screen.show(f"the job {job} trains on the cluster\n{hints}")
            return 0
        try:
            details = follow.follow_to_the_end(api, job, screen.show, forever=mode == "keep-alive")
        except (KeyboardInterrupt, SystemExit) as stop:
            screen.close()
            screen.show(f"the job trains on the cluster without this command\n{hints}")
            raise SystemExit(stop.code if isinstance(stop, SystemExit) else INTERRUPTED) from None
        finally:
            screen.close()
        if details is not None or mode != "keep-alive":
            return _ended(submission, details, screen)
        screen.show("the cluster has lost the job, because its head was replaced; submitting the job again ...")
        submission, job = submission.again(), submit.new_job()


def _noting_what_is_left_out(submission: Submission, screen: LiveScreen) -> Submission:
    """Show which files beside the script a .gitignore keeps from the cluster, and let errors about these files say so."""
    from undula.elastic.ray.ignored_files import SENDS_ALL, ignored_by_git

    folder, runtime_env = submission.script.parent, submission.runtime_env
    names = ignored_by_git(folder, runtime_env.get("excludes", ()))
    if names:
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        screen.show(
            f"not sent to other machines, because .gitignore names it: {', '.join(names[:MOST_NAMES])}{more} "
            f"({SENDS_ALL}=1 sends all but what .rayignore names)"
        )
    return replace(
        submission,
        runtime_env={**runtime_env, "env_vars": {**runtime_env.get("env_vars", {}), **left_out(folder, names)}},
    )


def _start(api: "JobApi", job: str, submission: Submission) -> None:
    from undula.driver import submit

    modules = [*map(str, submission.modules), *submission.runtime_env.get("py_modules", ())]
    runtime_env = {**submission.runtime_env, "py_modules": modules}
    public = runtime_env.get("env_vars", {})  # Ray adds to some, such as PYTHONPATH, which must not be set again
    private = {name: value for name, value in submission.environment.items() if name not in public}
    submit.start(api, job, submission.url, submission.script, submission.arguments, private, runtime_env)


def _ended(submission: Submission, details: "JobDetails | None", screen: LiveScreen) -> int:
    """Return the exit status of a job that has ended, or None in place of a job that the cluster has lost."""
    from undula.driver import follow

    screen.close()
    if details is None:
        raise ClusterError(
            f"the cluster has lost the job, because its head was replaced; submit it again under the name {submission.name} to continue, "
            "with --keep-alive to have this done for you"
        )
    return _shown(follow.exit_status(details, screen.show), submission, screen)


def _shown(status: int, submission: Submission, screen: LiveScreen) -> int:
    """Return the exit status of a job, after saying how to continue it if its driver was killed."""
    if status == KILLED:  # a killed driver cannot print this itself
        screen.show(f"the job's driver was killed\n{submission.continuing}")
    return status


def _await_cluster(dashboard: str, screen: LiveScreen) -> None:
    """Wait until a cluster's job API answers."""
    if not job_api_answers(dashboard):
        screen.show(f"waiting for the cluster at {dashboard} ...")
        while not job_api_answers(dashboard):
            time.sleep(AWAIT_CLUSTER_S)
