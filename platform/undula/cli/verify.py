"""Command `undula verify`."""

import click

from undula.cli.options import json_option, print_json, runs_option, tolerance_option


@click.command(short_help="Prove from its ledger that a run followed its plan.")
@click.argument("run", metavar="RUN")
@runs_option
@click.option("--against", metavar="RUN", help="Another run of the same plan, with which RUN is compared.")
@tolerance_option
@json_option
def verify(run: str, runs: str | None, against: str | None, tolerance: float, as_json: bool) -> int:
    """Prove from a run's ledger and the manifest of its data that the run consumed the samples of its plan.

    RUN is a name that `undula ls` lists, or the run's directory as a path or an s3:// URL. If something differs, the command names the
    first difference and exits with status 1.
    """
    from undula.report.data.certificate import certify, data_of
    from undula.report.data.run_record import read_run
    from undula.state.locate import locate_run

    recorded = read_run(locate_run(run, runs))
    other = read_run(locate_run(against, runs)) if against else None
    certificate = certify(recorded, data_of(recorded), other, tolerance)
    if as_json:
        print_json(certificate.as_json())
        return 0 if certificate.holds else 1
    verdicts = [("proved", text) for text in certificate.proved]
    verdicts += [("not proved", text) for text in certificate.not_proved]
    verdicts += [("DIFFERENT", certificate.difference)] if certificate.difference else []
    for verdict, text in verdicts:
        click.echo(f"{verdict:>10}  {text}")
    return 0 if certificate.holds else 1
