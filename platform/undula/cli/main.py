"""The command `undula`. Each subcommand has a module of its own, which imports heavy modules only when the subcommand runs.

Other packages add commands by entry points in the group `undula.commands`.
"""

import sys
from collections.abc import Sequence

import click

from undula import extensions
from undula.errors import INTERRUPTED, TERMINATED, WRONG_INPUT, end_on_sigterm, one_sentence
from undula.masking.output import mask_output

GROUP = "undula.commands"
"""Group of the entry points by which other packages add commands."""
COMMANDS = {
    "plan": "undula.cli.plan:plan",
    "run": "undula.cli.run:run",
    "logs": "undula.cli.jobs:logs",
    "stop": "undula.cli.jobs:stop",
    "data": "undula.cli.data:data",
    "ls": "undula.cli.ls:ls",
    "show": "undula.cli.show:show",
    "verify": "undula.cli.verify:verify",
    "report": "undula.cli.report:report",
    "compare": "undula.cli.compare:compare",
    "export": "undula.cli.export:export",
    "convert": "undula.cli.convert:convert",
    "study": "undula.cli.study:study",
    "bench": "undula.cli.bench:bench",
    "chaos": "undula.cli.chaos:chaos",
    "cluster": "undula.cli.cluster:cluster",
    "doctor": "undula.cli.doctor:doctor",
    "spot": "undula.cli.spot:spot",
    "build-horovod": "undula.cli.build_horovod:build_horovod",
    "schema": "undula.cli.schema:schema",
}
"""The library's own commands, in the order in which they are listed."""


class AllCommands(click.Group):
    """Group of the library's own commands and of those of other packages. Each is imported when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return extensions.names(GROUP, COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command: click.Command | None = extensions.load(GROUP, COMMANDS, cmd_name)
        if command is None:
            self.commands = dict.fromkeys(self.list_commands(ctx), self)  # of whose names click suggests similar ones
        return command


@click.group(cls=AllCommands, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Elastic training on Ray: nodes may come and go, and the trained model is that of a fixed cluster.

    \b
    First steps:
      undula data stdlib-text --out ~/undula/data/stdlib-text
      undula run jobs/language_model.yaml
      undula ls
    """


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
