"""Command `undula cluster`."""

from pathlib import Path

import click

from undula.cli.options import FILE, Commands, json_option, print_findings


@click.group(cls=Commands, short_help="Check the configuration of a cluster.")
def cluster() -> None:
    """Check the configuration of a cluster, before `ray up` starts it."""


@cluster.command(short_help="Find mistakes in the configuration of a cluster.")
@click.argument("config", type=FILE, metavar="CLUSTER.yaml")
@click.option(
    "--job",
    type=FILE,
    metavar="JOB.yaml",
    help="Also check that this job's workers fit and its buckets are in the same region.",
)
@json_option
def check(config: Path, job: Path | None, as_json: bool) -> int:
    """Find mistakes in CLUSTER.yaml, a configuration of spot nodes for `ray up`. The exit status is 1 if there are errors."""
    from undula.cluster.check import check_cluster, load_cluster, region_of
    from undula.config.job import load_spec

    spec = load_spec(job).spec if job else None
    findings = check_cluster(
        load_cluster(config), spec.workers if spec else None, spec.buckets if spec else [], region_of
    )
    return print_findings(findings, as_json)
