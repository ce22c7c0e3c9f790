"""Environment variables that the user gives to a job, by `--env`, `--secret`, `--secret-file`, and `${env:NAME}` in its YAML."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from undula.config.secrets import has_secret
from undula.errors import SpecError
from undula.masking import values
from undula.masking.output import mask_output

OVERRIDES = "UNDULA_OVERRIDES"
"""Environment variable of a job's driver with overrides that its command line must not show, as a JSON list."""
PLACE = "(hidden)"
"""Argument of a driver in place of an override that its command line must not show. Overrides are applied in the order of the arguments."""
_NAME = r"[A-Za-z_]\w*"
_REFERENCE = re.compile(r"\$\{env:(.*?)\}")
_SECTIONS = ("config", "trackers")
"""Sections of a job in which a reference may stand. The others say what is trained and where, which every record of the run shows."""


def job_environment(
    env: Sequence[str],
    secrets: Sequence[str],
    files: Sequence[Path],
    env_vars: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Return the environment variables of a job, with the note which of them are secrets: all but those of `env` and `env_vars` that are
    harmless by their names and values.

    Args:
        env: Variables as NAME=VALUE.
        secrets: Names of variables of this process.
        files: Files with a line NAME=VALUE for each variable, as Docker and dotenv read them.
        env_vars: Variables of the job's runtime environment. The others replace those of the same names.

    Raises:
        SpecError: A name is invalid, or a variable or a file does not exist. The message shows no value.
    """
    secret: dict[str, str] = {}
    for file in files:
        secret.update(_read(file))
    for name in secrets:
        if name not in os.environ:
            raise SpecError(f"command line: --secret {name}: the environment has no such variable; export it first")
        secret[name] = os.environ[name]
    variables = {name: value for name, value in env_vars.items() if name not in secret}
    for variable in env:
        name, equals, value = variable.partition("=")
        if not equals or not re.fullmatch(_NAME, name):
            fix = f"write NAME=VALUE, or --secret {name} to pass on a variable" if not equals else "write NAME=VALUE"
            raise SpecError(f"command line: --env {name}: {fix}")
        if name == "PYTHONPATH":
            raise SpecError(
                "command line: --env PYTHONPATH: Python reads it before a process takes the variables of its job; set it in env_vars of "
                "--runtime-env, or name the folder of the packages with --project"
            )
        variables[name] = value
    given = {**secret, **variables}
    return values.with_declared(
        variables, {name: given[name] for name in given if name not in variables or has_secret(f"{name}={given[name]}")}
    )


@contextmanager
def having(variables: Mapping[str, str]) -> Iterator[None]:
    """Have the environment variables of a job during a block, and mask those that are secrets from then on.

    A cluster that this process starts must not inherit them.
    """
    before = dict(os.environ)
    os.environ.update(variables)
    mask_output()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def with_variables(tree: Any, where: Callable[[Sequence[str]], str]) -> tuple[Any, dict[str, str]]:
    """Return a tree with the values of variables in place of ${env:NAME}, and these variables, which are secrets from now on.

    Args:
        tree: Content of a YAML file.
        where: Function that returns the origin of a value from its keys, for messages.

    Raises:
        SpecError: A reference has no value that could be masked, or stands where none may.
    """
    variables: dict[str, str] = {}

    def filled(value: Any, *keys: str) -> Any:
        if isinstance(value, Mapping):
            return {key: filled(item, *keys, str(key)) for key, item in value.items()}
        if isinstance(value, list):
            return [filled(item, *keys) for item in value]
        if not isinstance(value, str):
            return value
        for name in _REFERENCE.findall(value):
            key = ".".join(keys)
            if problem := _problem_of_reference(name, key.removeprefix("overrides.")):
                raise SpecError(f"{where(keys)}: {key} refers to ${{env:{name}}}, {problem}")
            variables[name] = os.environ[name]
        return _REFERENCE.sub(lambda match: os.environ[match[1]], value)

    tree = filled(tree)
    values.declare(variables)
    return tree, variables


def _problem_of_reference(name: str, key: str) -> str | None:
    if not key.startswith(tuple(f"{section}." for section in _SECTIONS)):
        return f"but a secret can stand only below {' and '.join(_SECTIONS)}; write the value itself"
    if name not in os.environ:
        return "but the environment has no such variable; export it first, or give it with --secret-file"
    if not values.forms_of(os.environ[name]):
        return (
            f"whose value cannot be masked, because it has fewer than {values.MIN_CHARS} characters, or fewer than "
            f"{values.MIN_DIFFERENT_CHARS} different ones; write the value itself"
        )
    return None


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
