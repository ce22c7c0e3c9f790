"""Command `undula schema`."""

import click

from undula.cli.options import print_json


@click.command(short_help="Print the JSON schema of JOB.yaml, for editors.")
@click.option("--study", is_flag=True, help="Print the JSON schema of STUDY.yaml instead.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the reference of the keys of both in Markdown.")
def schema(study: bool, as_markdown: bool) -> None:
    """Print the JSON schema of JOB.yaml, which editors use to complete and check its keys."""
    from undula.cli.reference import markdown, study_spec
    from undula.config.job import JobSpec, json_schema

    if as_markdown:
        click.echo(markdown(), nl=False)
    else:
        print_json(json_schema(study_spec() if study else JobSpec))
