"""`undula run`: submits a job's script and follows it; and what `undula study` shares with it."""

import argparse
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit status of a process that was killed, and a shell's of one."""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("job", type=Path, metavar="JOB.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    add_submission_arguments(parser)
    parser.add_argument("--fresh", action="store_true", help="delete the run in the run directory and start over")
    text = "print the resolved job, with where each value came from, and exit"
    parser.add_argument("--print", action="store_true", help=text)
    parser.set_defaults(command=_run)


def add_submission_arguments(parser: argparse.ArgumentParser) -> None:
    """Of a command that submits a script."""
    parser.add_argument("--script", type=Path, help="the job's script (default: beside JOB.yaml, with its name)")
    parser.add_argument("--address", help="URL of a cluster's job API, as for `ray job submit`")


def _run(options: argparse.Namespace) -> int:
    from undula.config.job import absolute_paths, load_spec, script_of

    loaded = load_spec(options.job, options.overrides)
    if options.print:
        print(loaded.to_yaml(), end="")
        return 0
    script = script_of(options.job, options.script)
    overrides = [*options.overrides, *absolute_paths(loaded.spec)]
    arguments = ["--config", as_seen_from(script, options.job), *(["--fresh"] if options.fresh else []), *overrides]
    cpus = math.ceil(loaded.spec.workers.max * loaded.spec.workers.cpus)
    mend = f"run directory: {loaded.spec.run_url}\nsubmit it again under the name {loaded.spec.name} to go on"
    return submit_and_follow(options.address, cpus, script, arguments, mend)


def as_seen_from(script: Path, file: Path) -> str:
    """The name of a file in a submitted script's working directory: the script's folder travels, with what lies in it."""
    return file.name if file.absolute().parent == script.parent else str(file.absolute())


def submit_and_follow(address: str | None, cpus: int, script: Path, arguments: Sequence[str], mend: str) -> int:
    """Submit a script to the cluster at an address, or at hand, or to a new local one, and show what it prints; its exit status.

    Args:
        cpus: that a local cluster has at least.
        mend: what to say where it is interrupted.
    """
    from undula.cluster.local import running_or_local
    from undula.telemetry.live import LiveScreen

    screen = LiveScreen(sys.stdout)
    print("starting ...", flush=True)
    with running_or_local(address, max(os.cpu_count() or 1, cpus)) as dashboard:
        from undula.cluster.submit import submit  # Ray reads its token settings when it is imported

        try:
            status = submit(dashboard, script, arguments, screen.show)
        except KeyboardInterrupt:
            screen.close()
            print(mend)
            raise
        finally:
            screen.close()
    if status in KILLED:  # it could say nothing itself
        print(f"the job's driver was killed\n{mend}")
    return status
