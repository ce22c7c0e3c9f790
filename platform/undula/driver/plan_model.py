"""Job of a model that is known by its size alone, as overrides of the YAML beside `gpt_job.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import get_args, get_type_hints

from undula import OptimizerConfig
from undula.config.job import as_overrides
from undula.errors import SpecError
from undula.plan.gpt import TOKENS_A_PARAMETER, Gpt, gpt_of, nearest

GPT_JOB = Path(str(files("undula.driver"))) / "gpt_job.yaml"
"""YAML of the job, beside its script."""


@dataclass(frozen=True)
class ModelSize:
    """What a user knows of a model. None stands for what is usual."""

    parameters: float
    optimizer: str
    layers: int | None
    width: int | None
    context: int
    """Tokens of a sequence."""
    vocabulary: int
    global_batch: int | None
    """Number of sequences per step."""
    steps: int | None
    tokens: float | None
    """Number of tokens of the run."""


@dataclass(frozen=True)
class ModelJob:
    """Job of such a model."""

    shape: Gpt
    overrides: list[str]
    """Overrides of GPT_JOB."""
    sentences: tuple[str, ...]
    """What was taken, and by which rule."""


def model_job(size: ModelSize, workers: Sequence[int]) -> ModelJob:
    """Return the job of a model, with as many virtual workers as the largest number of workers.

    Raises:
        SpecError: There is no such model, optimizer or batch.
    """
    names = get_args(get_type_hints(OptimizerConfig)["name"])
    if size.optimizer not in names:
        raise SpecError(f"command line: --optimizer {size.optimizer} is not one of {', '.join(names)}")
    if size.steps and size.tokens:
        raise SpecError("command line: --steps and --tokens both say how long the run is; remove one of them")
    shape = gpt_of(size.parameters, size.layers, size.width, size.context, size.vocabulary)
    known, most = nearest(size.parameters), max(workers)
    batch = size.global_batch or max(round(known.batch_tokens / size.context / most), 1) * most
    if batch % most:
        raise SpecError(
            f"command line: --global-batch {batch} cannot be divided among {most} workers; give a multiple of {most}, such as "
            f"{-(-batch // most) * most}, or fewer --workers"
        )
    tokens = size.tokens or TOKENS_A_PARAMETER * shape.parameters
    steps = size.steps or max(round(tokens / (batch * size.context)), 1)
    values = {
        "plan.global_batch": batch,
        "plan.virtual_workers": most,
        "config.layers": shape.layers,
        "config.width": shape.width,
        "config.heads": shape.heads,
        "config.context": shape.context,
        "config.vocabulary": shape.vocabulary,
        "config.sequences": steps * batch,
        "config.optimizer.name": size.optimizer,
    }
    return ModelJob(shape, as_overrides(values), (_shape_text(size, shape), _length_text(size, shape, batch, steps)))


def _shape_text(size: ModelSize, shape: Gpt) -> str:
    """Return the sentence about the shape, with the source of what was not given."""
    known = nearest(size.parameters)
    text = (
        f"A GPT with {count_text(shape.parameters)} parameters: {shape.layers} layers, width {shape.width:,}, {shape.heads} heads, context "
        f"{shape.context:,}, vocabulary {shape.vocabulary:,}, {size.optimizer}"
    )
    sources = [] if size.layers or size.width else [f"layers as {known.title} (Brown et al. 2020)"]
    sources += (
        [] if size.layers and size.width else ["parameters = 12 x layers x width^2 + embeddings (Kaplan et al. 2020)"]
    )
    return f"{text}; {', '.join(sources)}." if sources else f"{text}."


def _length_text(size: ModelSize, shape: Gpt, batch: int, steps: int) -> str:
    """Return the sentence about the batch and the length of the run, with the source of what was not given."""
    tokens = steps * batch * shape.context
    text = f"{batch:,} sequences per step, {steps:,} steps, {count_text(tokens)} tokens"
    sources = [] if size.global_batch else [f"a batch as {nearest(size.parameters).title} has it (Brown et al. 2020)"]
    sources += (
        [] if size.steps or size.tokens else [f"{TOKENS_A_PARAMETER} tokens per parameter (Hoffmann et al. 2022)"]
    )
    return f"{text}; {', '.join(sources)}." if sources else f"{text}."


def count_text(count: float) -> str:
    """Return a large count, such as `354.8 M` or `7.07 B`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:.4g}"
