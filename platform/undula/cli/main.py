"""The command `undula`. Each subcommand has a module of its own, which imports heavy modules only when the subcommand runs."""

import sys
from collections.abc import Sequence

import click

from undula.cli.bench import bench
from undula.cli.build_horovod import build_horovod
from undula.cli.chaos import chaos
from undula.cli.cluster import cluster
from undula.cli.compare import compare
from undula.cli.convert import convert
from undula.cli.data import data
from undula.cli.doctor import doctor
from undula.cli.export import export
from undula.cli.jobs import logs, stop
from undula.cli.ls import ls
from undula.cli.options import Commands
from undula.cli.plan import plan
from undula.cli.report import report
from undula.cli.run import run
from undula.cli.schema import schema
from undula.cli.show import show
from undula.cli.spot import spot
from undula.cli.study import study
from undula.cli.verify import verify
from undula.errors import INTERRUPTED, TERMINATED, WRONG_INPUT, end_on_sigterm, one_sentence
from undula.masking.output import mask_output


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Elastic training on Ray: nodes may come and go, and the trained model is that of a fixed cluster.

    \b
    First steps:
      undula data stdlib-text --out ~/undula/data/stdlib-text
      undula run jobs/language_model.yaml
      undula ls
    """


for command in (
    plan,
    run,
    logs,
    stop,
    data,
    ls,
    show,
    verify,
    report,
    compare,
    export,
    convert,
    study,
    bench,
    chaos,
    cluster,
    doctor,
    spot,
    build_horovod,
    schema,
):
    cli.add_command(command)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status, or with that of the error with which it ended (`undula.errors`)."""
    # SIGTERM raises an exception as Ctrl-C does, so that the command stops everything that it has started.
    mask_output()
    end_on_sigterm(TERMINATED)
    try:
        with one_sentence():
            status = cli.main(argv, prog_name="undula", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        status = WRONG_INPUT
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        place = f" (see {context.command_path} --help)" if context else ""
        print(f"undula: {error.format_message().rstrip('.')}{place}", file=sys.stderr, flush=True)
        status = WRONG_INPUT
    except click.Abort:  # click has ended the line that shows ^C
        print("stopped", file=sys.stderr)
        status = INTERRUPTED
    sys.exit(status)
