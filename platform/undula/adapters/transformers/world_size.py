"""The number of processes that TrainingArguments tell a script before its trainer exists.

Hugging Face's TrainingArguments ask the environment as soon as they are made, and find one process. A script that computes its learning
rate from `args.world_size` would train with another rate than under torchrun.
"""

import dis
from dataclasses import dataclass
from math import inf
from traceback import walk_stack
from types import CodeType, FrameType, FunctionType
from typing import Any

import transformers

from undula.adapters.script import place
from undula.errors import UsageError

_Base: Any = object  # so that a type checker does not look for what Hugging Face's classes have


class PlannedArguments(_Base):  # type: ignore[misc]
    """Makes training arguments know the number of virtual workers: `class MyConfig(PlannedArguments, TheirConfig)`."""

    @property
    def world_size(self) -> int:
        return place().virtual_workers


@dataclass
class TrainingArguments(PlannedArguments, transformers.TrainingArguments):  # type: ignore[misc]
    """TrainingArguments of Hugging Face whose `world_size` is the number of virtual workers from the beginning."""


@dataclass
class Seq2SeqTrainingArguments(PlannedArguments, transformers.Seq2SeqTrainingArguments):  # type: ignore[misc]
    """The same for a Seq2SeqTrainer."""


def refuse_early_world_size(args: object) -> None:
    """Refuse a script that has read `args.world_size` before its trainer, as far as the functions show that are running or beside them.

    Raises:
        UsageError: It has.
    """
    if isinstance(args, PlannedArguments):
        return
    frames = [frame for frame, _ in walk_stack(None) if _library_of(frame) not in ("transformers", "undula")]
    running = {frame.f_code for frame in frames}
    for frame in frames:
        names = {name for name, value in frame.f_locals.items() if value is args}
        others = (
            [value.__code__ for value in frame.f_globals.values() if isinstance(value, FunctionType)] if names else []
        )
        codes = [(frame.f_code, frame.f_lasti), *((code, inf) for code in others if code not in running)]
        for code, end in codes:
            line = _line_of_read(code, names, end)
            if line is not None:
                raise UsageError(
                    f"{code.co_filename}:{line}: world_size of the TrainingArguments is 1 until the Trainer is made; import "
                    "TrainingArguments from undula.adapters.transformers, whose world_size is plan.virtual_workers from the beginning"
                )


def _library_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _line_of_read(code: CodeType, names: set[str], end: float) -> int | None:
    """Return the line at which code reads `world_size` of one of the names before an offset; None if it does not."""
    before, line = None, 0
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line
        if instruction.offset >= end:
            return None
        if instruction.argval == "world_size" and instruction.opname == "LOAD_ATTR" and before in names:
            return line
        before = instruction.argval
    return None
