"""Command `undula run`."""

import sys
from pathlib import Path

import click

from undula.cli.options import address_option, job_arguments, script_option


@click.command(short_help="Train a job on a Ray cluster and follow it.")
@job_arguments
@script_option
@address_option
@click.option("--fresh", is_flag=True, help="Delete the run of this name and start over.")
@click.option("--print", "prints", is_flag=True, help="Print every value of the job with its origin, and exit.")
def run(
    job: Path, overrides: tuple[str, ...], script: Path | None, address: str | None, fresh: bool, prints: bool
) -> int:
    """Submit the script of JOB.yaml to a Ray cluster, and follow it until it ends.

    KEY.SUB=VALUE overrides a value of the YAML. A job with the name of an earlier run continues that run.

    \b
    Examples:
      undula run jobs/language_model.yaml name=first plan.max_steps=100
      undula run jobs/language_model.yaml workers.max=8 --address http://HEAD:8265
    """
    from undula.config.job import load_spec
    from undula.driver.submission import submission_of_job, submit_and_follow
    from undula.telemetry.live import LiveScreen

    loaded = load_spec(job, overrides)
    if prints:
        click.echo(loaded.to_yaml(), nl=False)
        return 0
    submission = submission_of_job(job, loaded, overrides, script, fresh)
    return submit_and_follow(submission, address, LiveScreen(sys.stdout))
