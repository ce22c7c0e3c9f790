"""`undula study`: its commands, and what they print."""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from undula.errors import needs_extra
from undula.run_command import add_submission_arguments, as_seen_from, submit_and_follow
from undula.storage import Store, open_store

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
    run.add_argument("overrides", nargs="*", metavar="key=value", help="override a value of the study's YAML")
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
    text = "what a worker costs in an hour, for the report's costs"
    report.add_argument("--worker-hour", type=float, metavar="DOLLARS", help=text)
    report.set_defaults(command=_report, runs=runs)

    text = "check the arithmetic of studies against known numbers and sampling; exit status 1 where one is off"
    test = commands.add_parser("self-test", help=text)
    test.add_argument("--json", action="store_true")
    test.set_defaults(command=_self_test)


def _run(options: argparse.Namespace) -> int:
    from undula.spec import absolute_paths, load_study, script_of

    loaded = load_study(options.study, options.overrides)
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


def files_of(script: Path, study: Path, job: Path) -> tuple[str, str]:
    """A study's YAML and its job's, as a submitted script finds them: the job's is looked for beside the study's."""
    seen = as_seen_from(script, study)
    return seen, str(job.absolute()) if Path(seen).is_absolute() else as_seen_from(script, job)


def _status(options: argparse.Namespace) -> int:
    from undula.live import LiveScreen
    from undula.study.live_table import as_rows, study_table
    from undula.study.progress import known
    from undula.study.records import read_spec

    store = _study_store(options.study, options.runs)
    screen = LiveScreen(sys.stdout)
    while True:
        spec = read_spec(store)
        records = list(known(store, spec).records.values())
        if options.json:
            print(json.dumps(as_rows(records, spec.target), indent=1))
            return 0
        for line in study_table(spec, records).split("\n"):
            screen.show(line)
        if not options.follow or all(record.has_ended for record in records):
            screen.close()
            return 0
        time.sleep(INTERVAL_S)


def _study_store(study: str, runs: str) -> Store:
    """The directory of a study: its path, or its name where it lies with the runs."""
    beside = open_store(f"{runs}/{study}")
    return beside if "/" not in study and not Path(study).exists() and beside.exists() else open_store(study)


def _report(options: argparse.Namespace) -> int:
    with needs_extra("study"):
        from undula.study.page import verdict_lines, write_report
    from undula.study.progress import known
    from undula.study.records import read_spec

    store = _study_store(options.study, options.runs)
    spec = read_spec(store)
    records = list(known(store, spec).records.values())
    page = write_report(store, spec, records, dollars_per_worker_hour=options.worker_hour)
    print("\n".join([*verdict_lines(spec, records), "", page]))
    return 0


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
