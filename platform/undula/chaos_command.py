"""`undula chaos`: its arguments, and what it prints."""

import argparse
import json
import sys
from pathlib import Path

from undula.errors import SpecError
from undula.storage import open_store


def add_chaos_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("job", type=Path, metavar="JOB.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    parser.add_argument("--script", type=Path, help="the job's script (default: beside JOB.yaml, with its name)")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="recorded counts of spot nodes: nodes come and go as it says"
    )
    parser.add_argument("--speedup", type=float, default=60.0, metavar="X", help="of the trace (default: 60)")
    parser.add_argument(
        "--changes", type=int, metavar="N", help="the stretch of the trace with so many changes and the fewest zeros"
    )
    parser.add_argument(
        "--notice", type=float, default=20.0, metavar="S", help="seconds of notice that a node gets (default: 20)"
    )
    parser.add_argument(
        "--no-notice-share", type=float, default=0.0, metavar="P", help="share of nodes that get none (default: 0)"
    )
    parser.add_argument(
        "--faults", type=Path, metavar="FILE", help="a schedule instead, a line each: `at step 40: sigkill worker 1`"
    )
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="at first, under a schedule, of one worker each (default: workers.max)"
    )
    parser.add_argument(
        "--limit", type=float, default=3600.0, metavar="S", help="seconds for a job under a schedule (default: 3600)"
    )
    parser.add_argument(
        "--baseline",
        choices=["ray"],
        help="run it with Ray Train's own trainer and a checkpoint every 10 steps, to compare",
    )
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command=chaos)


def chaos(options: argparse.Namespace) -> int:
    """Run the job through what is asked for, and print what became of it; the exit status.

    Raises:
        SpecError: of the job, the schedule or the trace.
    """
    # Not at the top: most commands need none of it, and it takes a second.
    from undula.config.job import absolute_paths, load_spec
    from undula.report.data.certificate import certify, data_of
    from undula.report.data.run_record import read_run
    from undula.testing.study import from_faults, from_trace, script_command, undergo

    loaded = load_spec(options.job, options.overrides)
    script = (options.script or options.job.with_suffix(".py")).absolute()
    if not script.is_file():
        raise SpecError(f"there is no script {script}: give it with --script, or lay it beside {options.job}")
    if (options.trace is None) == (options.faults is None):
        raise SpecError("command line: give either --trace FILE or --faults FILE")
    workers = loaded.spec.workers
    ordeal = (
        from_trace(
            options.trace, options.speedup, workers.max, options.changes, options.notice, options.no_notice_share
        )
        if options.trace
        else from_faults(options.faults, options.nodes or workers.max, loaded.spec.plan.max_steps)
    )
    as_ray = ["checkpoint.every_steps=10", "checkpoint.snapshot_every_steps=0"] if options.baseline else []
    name = f"{loaded.spec.name}-chaos{f'-{options.baseline}' if options.baseline else ''}"  # never the run of that name itself
    overrides = [*options.overrides, *absolute_paths(loaded.spec), *as_ray, f"name={name}"]
    loaded = load_spec(options.job, overrides)
    command = script_command(script, str(options.job.absolute()), overrides, options.baseline or "undula")
    store = open_store(loaded.spec.run_url)
    log = sys.stderr if options.json else sys.stdout
    if store.exists("job.json"):
        print(f"chaos: replacing the run in {store.url}", file=log)
    found = undergo(
        ordeal, command, script.parent, store, workers.min, options.limit, lambda line: print(line, file=log)
    )
    if found.problem and not store.exists("job.json"):
        print(f"undula: {found.problem}", file=sys.stderr)
        return 1
    run = read_run(store)
    certificate = certify(run, data_of(run))
    if options.json:
        print(json.dumps({**found.as_json(), "certificate": certificate.as_json()}, indent=1))
    else:
        print("\n".join(found.lines()))
        print(f"certificate: {'holds' if certificate.holds else certificate.difference}; undula verify {store.url}")
    if found.problem:
        print(f"undula: {found.problem}", file=sys.stderr)
    return 0 if certificate.holds and not found.problem else 1
