"""Arguments and options that several commands share."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from undula.state.defaults import DEFAULT_RUNS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(path_type=Path)
"""Type of an argument that is a path. The code that opens the path reports errors."""


class FiniteRange(click.FloatRange):
    """Type of an argument that is a finite number within limits. click's own type accepts NaN for any limits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class Commands(click.Group):
    """Group of commands that lists them in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def job_arguments(command: F) -> F:
    """Add the arguments JOB.yaml and its overrides to a command."""
    overrides = click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
    return click.argument("job", type=FILE, metavar="JOB.yaml")(overrides(command))


script_option = click.option(
    "--script",
    type=FILE,
    metavar="FILE",
    help="Script of the job.  [default: the file beside JOB.yaml with the same name]",
)
address_option = click.option(
    "--address",
    metavar="URL",
    help="Job API of the cluster, as for `ray job submit`.  [default: RAY_API_SERVER_ADDRESS, else the cluster of this machine, "
    "else a new local cluster that is stopped after the job]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


runs_option = click.option(
    "--runs",
    metavar="URL",
    help=f"Folder in which a name is looked up: a path or an s3:// URL, like a job's `runs`.  [default: the working directory, else "
    f"{DEFAULT_RUNS}]",
)


def print_json(document: object) -> None:
    """Print a document as JSON."""
    click.echo(json.dumps(document, indent=1))


def print_all_json(items: "Sequence[DataclassInstance]") -> None:
    """Print instances of dataclasses as JSON."""
    print_json([asdict(item) for item in items])


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as `no findings`, `1 finding` or `2 findings`."""
    return f"{count or 'no'} {noun}{'s' if count != 1 else ''}"
