"""Arguments and options that several commands share."""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from undula.errors import Finding, SpecError
from undula.state.defaults import DEFAULT_RUNS

if TYPE_CHECKING:
    from undula.driver.submission import Mode

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
project_option = click.option(
    "--project",
    type=FILE,
    metavar="FOLDER",
    help="Folder in which packages lie that the script imports.  [default: the nearest one with a pyproject.toml, setup.py or .git]",
)
address_option = click.option(
    "--address",
    metavar="URL",
    envvar="UNDULA_ADDRESS",
    help="Job API of the cluster, as for `ray job submit`.  [default: UNDULA_ADDRESS, else RAY_API_SERVER_ADDRESS, else the cluster of "
    "this machine]",
)


def environment_options(command: F) -> F:
    """Add the options with the environment variables of a job to a command."""
    env = click.option(
        "--env", multiple=True, metavar="NAME=VALUE", help="Environment variable of the job's processes."
    )
    secret = click.option(
        "--secret",
        "secrets",
        multiple=True,
        metavar="NAME",
        help="Environment variable of this terminal that the job's processes also get. Its value is masked in all they show.",
    )
    file = click.option(
        "--secret-file",
        "secret_files",
        multiple=True,
        type=FILE,
        metavar="FILE",
        help="File with environment variables of the job's processes, one NAME=VALUE a line. Their values are masked.",
    )
    runtime_env = click.option(
        "--runtime-env",
        type=FILE,
        metavar="FILE",
        help="YAML of a Ray runtime environment for the job's processes, as for `ray job submit`.",
    )
    return env(secret(file(runtime_env(command))))


def runtime_env_of(file: Path | None) -> dict[str, Any]:
    """Return the runtime environment of `--runtime-env`; an empty one if it is not given, without importing Ray.

    Raises:
        SpecError: The file has none that a job can have.
    """
    if file is None:
        return {}
    from undula.driver.runtime_env import load_runtime_env

    return load_runtime_env(file)


def mode_options(command: F) -> F:
    """Add the options that say what happens after the submission of a job to a command."""
    detach = click.option(
        "--detach", is_flag=True, help="Leave the job alone once it is submitted, and print how to follow and stop it."
    )
    keep_alive = click.option(
        "--keep-alive",
        is_flag=True,
        help="Submit the job again whenever the cluster has lost it, for example with its head.",
    )
    return detach(keep_alive(command))


def mode_of(detach: bool, keep_alive: bool) -> "Mode":
    """Return what happens after the submission of a job.

    Raises:
        SpecError: Both options are given.
    """
    if detach and keep_alive:
        raise SpecError("command line: --detach ends this command, which --keep-alive needs; give one of them")
    return "detach" if detach else "keep-alive" if keep_alive else "follow"


def positive_numbers(text: str, option: str) -> list[int]:
    """Return the numbers of a list such as `1,2,4`.

    Raises:
        click.BadParameter: The text is no such list; `option` has it.
    """
    try:
        numbers = [int(each) for each in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise click.BadParameter(f"{text} is not a list of positive numbers, such as 1,2,4", param_hint=option)
    return numbers


cluster_option = click.option(
    "--cluster",
    default=lambda: os.environ.get("RAY_ADDRESS", "auto"),
    metavar="HOST:PORT",
    help="Head of the Ray cluster.  [default: RAY_ADDRESS, else the cluster of this machine]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


runs_option = click.option(
    "--runs",
    metavar="URL",
    help=f"Folder of the run directories: a path or an s3:// URL, like a job's `runs`.  [default: UNDULA_RUNS, else {DEFAULT_RUNS}]",
)

tolerance_option = click.option(
    "--tolerance",
    type=FiniteRange(min=0),
    default=1e-5,
    show_default=True,
    metavar="X",
    help="Maximum relative difference of a step's loss. Deterministic runs must be equal.",
)


def with_runs(overrides: Sequence[str], runs: str | None, key: str = "runs") -> tuple[str, ...]:
    """Return overrides with the one that `--runs` stands for, if it is given."""
    return (*overrides, *([f"{key}={json.dumps(runs)}"] if runs else []))


def print_json(document: object) -> None:
    """Print a document as JSON."""
    click.echo(json.dumps(document, indent=1))


def print_findings(findings: Sequence[Finding], as_json: bool) -> int:
    """Print the problems that a check has found, and return the exit status of the command: 1 if one of them is an error."""
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            click.echo(f"{finding.severity}: {finding.message}")
        click.echo(counted(len(findings), "finding"))
    return int(any(finding.severity == "error" for finding in findings))


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as `no findings`, `1 finding` or `2 findings`."""
    return f"{count or 'no'} {noun}{'s' if count != 1 else ''}"
