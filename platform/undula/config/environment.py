"""Environment variables that the user of a command gives to a job, by `--env`, `--secret` and `--secret-file`."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from undula.config.secrets import has_secret
from undula.errors import SpecError

OVERRIDES = "UNDULA_OVERRIDES"
"""Environment variable of a job's driver with overrides that its command line must not show, as a JSON list."""
PLACE = "(hidden)"
"""Argument of a driver in place of an override that its command line must not show. Overrides are applied in the order of the arguments."""
_NAME = r"[A-Za-z_]\w*"


def job_environment(env: Sequence[str], secrets: Sequence[str], files: Sequence[Path]) -> dict[str, str]:
    """Return the environment variables of a job.

    Args:
        env: Variables as NAME=VALUE.
        secrets: Names of variables of this process.
        files: Files with a line NAME=VALUE for each variable, as Docker and dotenv read them.

    Raises:
        SpecError: A name is invalid, or a variable or a file does not exist. The message shows no value.
    """
    variables: dict[str, str] = {}
    for file in files:
        variables.update(_read(file))
    for name in secrets:
        if name not in os.environ:
            raise SpecError(f"command line: --secret {name}: the environment has no such variable; export it first")
        variables[name] = os.environ[name]
    for variable in env:
        name, equals, value = variable.partition("=")
        if not equals or not re.fullmatch(_NAME, name):
            fix = f"write NAME=VALUE, or --secret {name} to pass on a variable" if not equals else "write NAME=VALUE"
            raise SpecError(f"command line: --env {name}: {fix}")
        variables[name] = value
    return variables


def _read(file: Path) -> Mapping[str, str]:
    try:
        lines = file.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"command line: --secret-file {file} cannot be read: {type(error).__name__}") from error
    variables = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.fullmatch(rf"\s*(?:export\s+)?({_NAME})\s*=\s*(.*?)\s*", line)
        if match is None:
            raise SpecError(f"{file}:{number}: the line is not NAME=VALUE")
        name, value = match.groups()
        variables[name] = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value
    return variables


def without_secrets(arguments: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the arguments that the command line of a driver may show, and the environment variable that passes on the others."""
    private = [argument for argument in arguments if _is_private(argument)]
    shown = tuple(PLACE if _is_private(argument) else argument for argument in arguments)
    return shown, {OVERRIDES: json.dumps(private)} if private else {}


def with_secrets(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of this driver with the overrides that its command line does not show.

    Raises:
        SpecError: The overrides are missing, because the command line was copied.
    """
    private = json.loads(os.environ.get(OVERRIDES, "[]"))
    if arguments.count(PLACE) > len(private):
        raise SpecError(
            f"command line: {PLACE} stands for an override that a list of jobs must not show; give the override itself"
        )
    rest = iter(private)
    return [next(rest) if argument == PLACE else argument for argument in arguments]


def _is_private(argument: str) -> bool:
    return "=" in argument and has_secret(argument)
