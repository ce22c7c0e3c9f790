"""`undula doctor`: its options and what it prints."""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console


def add_doctor_arguments(parser: argparse.ArgumentParser, default_runs: str) -> None:
    text = "the Ray cluster's head, HOST:PORT (default: RAY_ADDRESS, or the cluster of this machine)"
    parser.add_argument("--cluster", default=os.environ.get("RAY_ADDRESS", "auto"), metavar="ADDRESS", help=text)
    text = f"path or s3:// URL of the run directories, as a job's `runs` (default: {default_runs})"
    parser.add_argument("--runs", default=default_runs, metavar="URL", help=text)
    parser.add_argument("--json", action="store_true", help="results, and the facts that they rest on")
    parser.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from undula.cluster.doctor import judge
    from undula.cluster.examine import examine

    runs = options.runs if "://" in options.runs else str(Path(options.runs).expanduser().absolute())
    started = time.monotonic()
    with Console(file=sys.stderr).status("starting ...") as line:
        facts = examine(options.cluster, runs, line.update)
    results = judge(facts)
    count = {verdict: sum(each.verdict == verdict for each in results) for verdict in ("pass", "warn", "fail")}
    if options.json:
        print(json.dumps({"results": [asdict(each) for each in results], "facts": asdict(facts)}, indent=1))
    else:
        for each in results:
            print(f"{each.verdict}  {each.check:<10}  {each.message}")
        numbers = f"{count['pass']} passed, {count['warn']} to look at, {count['fail']} to mend"
        print(
            f"{numbers}; {len(facts.nodes)} node{'s' if len(facts.nodes) != 1 else ''} in {time.monotonic() - started:.0f} s"
        )
    return int(count["fail"] > 0)
