"""Options of `undula plan` for a model that is known by its size, in place of a job."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from undula.cli.options import FiniteRange
from undula.errors import SpecError

F = TypeVar("F", bound=Callable[..., Any])

POSITIVE = click.IntRange(min=1)


def size_options(command: F) -> F:
    """Add the options with the size of a model, its batch and the length of its run to a command."""
    options = (
        click.option(
            "--parameters",
            type=FiniteRange(min=0, min_open=True),
            metavar="N",
            help="Plan a decoder-only transformer with about so many parameters, such as 7e9, in place of a job.",
        ),
        click.option("--optimizer", metavar="NAME", help="Its optimizer.  [default: adamw]"),
        click.option(
            "--layers", type=POSITIVE, metavar="N", help="Its layers.  [default: as GPT-3 of about this size]"
        ),
        click.option("--width", type=POSITIVE, metavar="N", help="Its width.  [default: by parameters and layers]"),
        click.option("--context", type=POSITIVE, metavar="N", help="Tokens of a sequence.  [default: 2048]"),
        click.option("--vocabulary", type=POSITIVE, metavar="N", help="Tokens that it knows.  [default: 50257]"),
        click.option(
            "--global-batch",
            type=POSITIVE,
            metavar="N",
            help="Sequences per step.  [default: as GPT-3 of about this size]",
        ),
        click.option("--steps", type=POSITIVE, metavar="N", help="Steps of the run.  [default: by the tokens]"),
        click.option(
            "--tokens",
            type=FiniteRange(min=0, min_open=True),
            metavar="N",
            help="Tokens of the run.  [default: 20 for each parameter]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def job_or_model(
    arguments: Sequence[str], size: Mapping[str, Any], workers: Sequence[int], of_jobs: Mapping[str, object]
) -> tuple[Path, tuple[str, ...], tuple[str, ...]]:
    """Return the YAML of a job, its overrides, and sentences about what was taken for the size of a model.

    Args:
        arguments: Arguments of the command: JOB.yaml unless the size of a model is given, and overrides.
        size: Values of `size_options`.
        workers: Numbers of workers.
        of_jobs: Values of options that only a job can have.

    Raises:
        SpecError: There are both a job and the size of a model, or neither; or the model is impossible.
    """
    job = arguments[0] if arguments and (size["parameters"] is None or "=" not in arguments[0]) else None
    if size["parameters"] is None:
        if job is None:
            raise SpecError(
                "command line: there is nothing to plan; give JOB.yaml, or --parameters N for a model by its size"
            )
        if given := next((name for name in _ALONE if size[name] is not None), None):
            raise SpecError(
                f"command line: --{given.replace('_', '-')} describes a model by its size; give --parameters instead of {job}, or change "
                "the job"
            )
        return Path(job), tuple(arguments[1:]), ()
    if job is not None:
        raise SpecError(f"command line: {job} and --parameters cannot be planned together; give one of them")
    if given := next((name for name, value in of_jobs.items() if value is not None), None):
        raise SpecError(f"command line: {given} belongs to a job, and --parameters has none; remove one of them")
    from undula.driver.plan_model import GPT_JOB, ModelSize, model_job

    filled: dict[str, Any] = {name: _DEFAULTS.get(name) if value is None else value for name, value in size.items()}
    made = model_job(ModelSize(**filled), workers)
    return GPT_JOB, (*made.overrides, *arguments), made.sentences


_DEFAULTS = {"optimizer": "adamw", "context": 2048, "vocabulary": 50257}
_ALONE = ("layers", "width", "global_batch", "steps", "tokens", *_DEFAULTS)
"""Options of the size of a model, which are refused beside a job."""
