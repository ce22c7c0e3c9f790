"""Command `undula doctor`."""

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import click

from undula.cli.options import print_json
from undula.state.defaults import DEFAULT_RUNS


@click.command(short_help="Examine a running cluster before a job holds its GPUs.")
@click.option(
    "--cluster",
    default=lambda: os.environ.get("RAY_ADDRESS", "auto"),
    metavar="ADDRESS",
    help="HOST:PORT of the Ray cluster's head.  [default: RAY_ADDRESS, else the cluster of this machine]",
)
@click.option(
    "--runs",
    default=DEFAULT_RUNS,
    show_default=True,
    metavar="URL",
    help="Folder of the run directories, like a job's `runs`: a path or an s3:// URL.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the results and the facts on which they are based as JSON."
)
def doctor(cluster: str, runs: str, as_json: bool) -> int:
    """Examine the versions, GPUs, network, clocks, storage and token of a running cluster.

    This takes less than a minute and can be done while jobs run. Each problem is printed with its fix, and the exit status is 1 if a check
    fails.
    """
    from rich.console import Console

    from undula.cluster.doctor import judge
    from undula.cluster.examine import examine

    url = runs if "://" in runs else str(Path(runs).expanduser().absolute())
    started = time.monotonic()
    with Console(file=sys.stderr).status("starting ...") as line:
        facts = examine(cluster, url, line.update)
    results = judge(facts)
    count = {verdict: sum(each.verdict == verdict for each in results) for verdict in ("pass", "warn", "fail")}
    if as_json:
        print_json({"results": [asdict(each) for each in results], "facts": asdict(facts)})
    else:
        for each in results:
            click.echo(f"{each.verdict}  {each.check:<10}  {each.message}")
        nodes = f"{len(facts.nodes)} node{'s' if len(facts.nodes) != 1 else ''} in {time.monotonic() - started:.0f} s"
        click.echo(f"{count['pass']} passed, {count['warn']} to look at, {count['fail']} to fix; {nodes}")
    return int(count["fail"] > 0)
