"""Command `undula doctor`."""

import sys
import time
from dataclasses import asdict
from pathlib import Path

import click

from undula.cli.options import cluster_option, counted, json_option, print_json, runs_option
from undula.state.defaults import default_runs


@click.command(short_help="Examine a running cluster before a job holds its GPUs.")
@cluster_option
@runs_option
@json_option
def doctor(cluster: str, runs: str | None, as_json: bool) -> int:
    """Examine the versions, GPUs, network, clocks, storage and token of a running cluster.

    This takes less than a minute and can be done while jobs run. Each problem is printed with its fix, and the exit status is 1 if a check
    fails.
    """
    from rich.console import Console

    from undula.cluster.doctor import judge
    from undula.cluster.examine import examine

    url = runs or default_runs()
    url = url if "://" in url else str(Path(url).expanduser().absolute())
    started = time.monotonic()
    with Console(file=sys.stderr).status("starting ...") as line:
        facts = examine(cluster, url, line.update)
    results = judge(facts)
    count = {verdict: sum(result.verdict == verdict for result in results) for verdict in ("pass", "warn", "fail")}
    if as_json:
        print_json({"results": [asdict(result) for result in results], "facts": asdict(facts)})
    else:
        for result in results:
            click.echo(f"{result.verdict}  {result.check:<10}  {result.message}")
        nodes = f"{counted(len(facts.nodes), 'node')} in {time.monotonic() - started:.0f} s"
        click.echo(f"{count['pass']} passed, {count['warn']} to look at, {count['fail']} to fix; {nodes}")
    return int(count["fail"] > 0)
