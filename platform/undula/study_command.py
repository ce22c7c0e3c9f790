"""`undula study`: its commands, and what they print."""

import argparse
import difflib
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undula.errors import RunError, SpecError, needs_extra
from undula.run_command import add_submission_arguments, as_seen_from, submit_and_follow
from undula.state.directory import STUDY_FILE, held
from undula.storage import Store, open_store

if TYPE_CHECKING:
    from undula.study.load import LoadedStudy
    from undula.study.spec import StudySpec

COMMANDS = ("run", "status", "report", "self-test")
INTERVAL_S = 5.0


def with_study_command(arguments: Sequence[str]) -> list[str]:
    """`study STUDY.yaml` as `study run STUDY.yaml`."""
    first, *rest = [*arguments, ""]
    is_short = first == "study" and rest[0] not in (*COMMANDS, "-h", "--help", "")
    return ["study", "run", *arguments[1:]] if is_short else list(arguments)


def add_study_commands(commands: Any, runs: str) -> None:
    """Of the command line; `runs` is where a study that is given by name lies."""
    run = commands.add_parser("run", help="submit a study to the Ray cluster at hand, or to a local one, and follow it")
    run.add_argument("study", type=Path, metavar="STUDY.yaml")
    text = "override a value of the study's YAML; overrides.KEY=value is one of its job"
    run.add_argument("overrides", nargs="*", metavar="key=value", help=text)
    add_submission_arguments(run)
    run.add_argument("--fresh", action="store_true", help="forget what the study's directory holds and start over")
    run.set_defaults(command=_run)

    status = commands.add_parser("status", help="say how far a study is")
    status.add_argument("study", metavar="STUDY", help="a study's name, or its directory")
    status.add_argument(
        "--follow", action="store_true", help="draw it anew every few seconds, until the study has ended"
    )
    status.add_argument("--json", action="store_true", help="every trial")
    status.set_defaults(command=_status, runs=runs)

    report = commands.add_parser("report", help="write the report of a study, as far as it is")
    report.add_argument("study", metavar="STUDY", help="a study's name, or its directory")
    text = "what a worker costs in an hour, in place of the study's worker_hour"
    report.add_argument("--worker-hour", type=price, metavar="DOLLARS", help=text)
    report.set_defaults(command=_report, runs=runs)

    text = "check the arithmetic of studies against known numbers and sampling; exit status 1 where one is off"
    test = commands.add_parser("self-test", help=text)
    test.add_argument("--json", action="store_true")
    test.set_defaults(command=_self_test)


def price(text: str) -> float:
    if not 0 <= (value := float(text)) < math.inf:
        raise ValueError(text)  # argparse makes a sentence of it
    return value


def _run(options: argparse.Namespace) -> int:
    from undula.cluster.local import cluster_at_hand
    from undula.config.job import absolute_paths, script_of
    from undula.study.load import load_study

    _refuse_no_file(options.study)
    loaded = load_study(options.study, options.overrides)
    # A cluster that is there may see other files than this machine does.
    if not (options.address or cluster_at_hand()) and _is_done(loaded, options.fresh):
        return 0
    script = script_of(loaded.file, options.script)
    job = loaded.job.spec
    paths = [f"overrides.{path}" for path in absolute_paths(job)]
    study, job_file = files_of(script, options.study, loaded.file)
    arguments = [
        "--study",
        study,
        *(["--fresh"] if options.fresh else []),
        f"job={job_file}",
        *options.overrides,
        *paths,
    ]
    url = f"{job.runs.rstrip('/')}/{loaded.spec.name}"
    mend = f"study directory: {url}\nsubmit it again under the name {loaded.spec.name} to go on"
    cpus = math.ceil(job.workers.max * job.workers.cpus)
    return submit_and_follow(options.address, cpus, script, arguments, mend)


def _refuse_no_file(study: Path) -> None:
    """What is neither a file nor looks like the name of one may be meant as a command."""
    if not study.exists() and not study.suffix:
        close = difflib.get_close_matches(str(study), COMMANDS, n=1)
        mend = f"did you mean {close[0]}?" if close else f"give a study's YAML, or one of {', '.join(COMMANDS)}"
        raise SpecError(f"there is no file {study}, and no such command of `undula study`: {mend}")


def _is_done(loaded: "LoadedStudy", fresh: bool) -> bool:
    """Look at a study from here, before a cluster is started for it. Where all its trials have ended, its report is written.

    Raises:
        UndulaError: what is wrong with its trials.
    """
    from undula.study.job import Study
    from undula.study.progress import Progress, known

    study = Study(loaded)
    progress = Progress(study.spec) if fresh else known(study.store, study.spec)
    study.check(progress.wanted(), fresh, knows_defaults=False)
    if not progress.is_done:
        return False
    with held(study.store):
        study.begin()
        print(f"all {len(progress.records)} trials have ended: --fresh starts over\n")
        _publish(study.store, study.spec)
    return True


def files_of(script: Path, study: Path, job: Path) -> tuple[str, str]:
    """A study's YAML and its job's, as a submitted script finds them: the job's is looked for beside the study's."""
    seen = as_seen_from(script, study)
    return seen, str(job.absolute()) if Path(seen).is_absolute() else as_seen_from(script, job)


def _status(options: argparse.Namespace) -> int:
    from undula.study.live_table import study_table
    from undula.study.progress import known
    from undula.study.records import read_spec
    from undula.study.trials import trial_row
    from undula.study.under_way import is_under_way
    from undula.telemetry.live import LiveScreen

    store = study_store(options.study, options.runs)
    screen = LiveScreen(sys.stdout)
    while True:
        spec, is_there = read_spec(store), is_under_way(store)
        records = list(known(store, spec).records.values())
        if not is_there:
            records = [replace(each, state="waiting") if each.state == "running" else each for each in records]
        if options.json:
            print(json.dumps([trial_row(record, spec.target) for record in records], indent=1))
            return 0
        is_over = not is_there or all(record.has_ended for record in records)
        for line in study_table(spec, records, is_over, is_there).split("\n"):
            screen.show(line)
        if is_over and not all(record.has_ended for record in records):
            print("its driver is not there, or is still starting: the command that began the study goes on with it")
        if is_over or not options.follow:
            screen.close()
            return 0
        time.sleep(INTERVAL_S)


def study_store(study: str, runs: str) -> Store:
    """The directory of a study: its path, or its name where it lies with the runs.

    Raises:
        RunError: there is none of that name, and no such path.
    """
    beside, there = open_store(f"{runs}/{study}"), open_store(study)
    if "/" in study or there.exists(STUDY_FILE) or (not beside.exists() and there.exists()):
        return there
    if not beside.exists():
        raise RunError(f"there is no study {study} in {runs}, and no folder {study} here: give the study's directory")
    return beside


def _report(options: argparse.Namespace) -> int:
    from undula.study.records import read_spec

    store = study_store(options.study, options.runs)
    spec = read_spec(store)
    _publish(store, spec if options.worker_hour is None else replace(spec, worker_hour=options.worker_hour))
    return 0


def _publish(store: Store, spec: "StudySpec") -> None:
    with needs_extra("study"):
        from undula.study.render.page import publish
    from undula.study.progress import known

    print("\n".join(publish(store, spec, list(known(store, spec).records.values()))))


def _self_test(options: argparse.Namespace) -> int:
    with needs_extra("study"):
        from undula.study.self_test import self_test, table

    checks = list(self_test())
    failed = sum(not check.passed for check in checks)
    if options.json:
        print(json.dumps([{**asdict(check), "passed": check.passed} for check in checks], indent=1))
    else:
        print(table(checks))
        print(f"{len(checks) - failed} passed, {failed} failed")
    return int(failed > 0)
