"""Command `undula doctor`."""

import sys
import time
from dataclasses import asdict
from pathlib import Path

import click
from click.core import ParameterSource

from undula.cli.options import FILE, cluster_option, counted, json_option, print_json, runs_option
from undula.errors import SpecError
from undula.state.defaults import default_runs


@click.command(short_help="Examine a running cluster before a job holds its GPUs.")
@cluster_option
@runs_option
@click.option(
    "--measure",
    "rates",
    type=FILE,
    metavar="FILE",
    help="Measure instead how fast a worker computes and sends, and write it to FILE for `undula plan --rates`. No job may run.",
)
@click.option(
    "--cpus",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="CPUs of a worker that --measure measures, as workers.cpus.",
)
@json_option
def doctor(cluster: str, runs: str | None, rates: Path | None, cpus: float, as_json: bool) -> int:
    """Examine the versions, GPUs, network, clocks, storage and token of a running cluster.

    This takes less than a minute and can be done while jobs run. Each problem is printed with its fix, and the exit status is 1 if a check
    fails. With --measure, no job may run, and it takes one to three minutes.
    """
    if rates is None and click.get_current_context().get_parameter_source("cpus") is not ParameterSource.DEFAULT:
        raise SpecError("command line: --cpus says which workers --measure measures; give --measure FILE as well")
    if rates is not None:
        _measure(cluster, rates, cpus, as_json)
        return 0
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


def _measure(cluster: str, file: Path, cpus: float, as_json: bool) -> None:
    """Measure a worker of a cluster, and write and show its rates."""
    from rich.console import Console

    from undula.driver.measure import measure_cluster
    from undula.storage import write_file

    with Console(file=sys.stderr).status("connecting ...") as line:
        found = measure_cluster(cluster, cpus, line.update)
    write_file(str(file), found.as_json().encode())
    if as_json:
        print_json(asdict(found))
        return
    for compute, alone in found.rates.items():
        for workers, rates in {1: alone, found.workers_per_node: found.full[compute]}.items():
            figures = f"{rates.flops_per_s / 1e9:,.0f} GFLOP/s, {rates.bytes_per_s / 1e9:,.1f} GB/s"
            where = f"{found.device}, {counted(workers, 'worker')} on a node"
            click.echo(f"{where}, {compute}: {figures}, {rates.operation_s * 1e6:.0f} µs an operation")
    if found.link:
        click.echo(f"link: {found.link.latency_s * 1e3:.2f} ms, {found.link.bytes_per_s * 8e-9:.2f} Gbit/s")
    click.echo(f"undula plan JOB.yaml --rates {file}")
