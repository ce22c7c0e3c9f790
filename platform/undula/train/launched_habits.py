"""Habits of scripts that a launcher such as torchrun starts: they read its environment variables, make the process group, and parse a
command line. In a run, such a line fails with an error that does not say why, in whose place a sentence names the line and the fix."""

import re
import sys
import traceback
from pathlib import Path

from undula.errors import UsageError

_INSTEAD = {
    "RANK": "run.rank",
    "WORLD_SIZE": "run.virtual_workers, which stays the same while the number of workers changes,",
    "LOCAL_RANK": "run.device",
}
"""What a train function has in place of an environment variable of torchrun."""
_MAKES_GROUP = (
    "the script calls torch.distributed.init_process_group(), but a run makes its process group itself; remove the call"
)
SHARDS_STATE = (
    "shards its state over the ranks itself, so that a run could not restore it; pass the optimizer that it wraps, and set "
    "sharding.stage: 1 in the job's YAML, which does the same"
)
"""What is wrong with an optimizer such as ZeroRedundancyOptimizer, and the fix."""
_READS = re.compile(
    r"(?:environ(?:\.get)?|getenv)\W+(\w*RANK|\w*WORLD_SIZE|\w*PROCID|\w*LOCALID|MASTER_ADDR|MASTER_PORT)\b"
)
"""Statement that reads an environment variable of a launcher."""
_PARSERS = re.compile(r"/argparse\.py$|/site-packages/")
"""Path of a file that can be one of a parser of command lines."""
_USAGE_STATUS = 2
"""Status with which a parser of a command line ends the process."""


def refusal_of(error: BaseException) -> UsageError | None:
    """Return what to say of an error of a script that expects to have been started by a launcher, or to have a command line of its own;
    None for another error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    named = [(frame.f_code.co_name, frame.f_code.co_filename) for frame in frames]
    reason = None
    if isinstance(error, SystemExit):
        if error.code == _USAGE_STATUS and named and _PARSERS.search(named[-1][1]):
            reason = _reason_of_command_line()
    elif isinstance(error, KeyError | TypeError) and (read := _READS.search(_last_line(error))):
        instead = _INSTEAD.get(read[1])
        fix = f"use {instead} in the train function, or remove it" if instead else "remove it"
        if _is_of_adapter():
            fix = "use what the Accelerator or the Trainer has instead, or remove it"
        reason = f"the script reads the environment variable {read[1]}, which launchers such as torchrun set and a run does not; {fix}"
    elif any(name == "init_process_group" for name, _ in named):
        reason = _MAKES_GROUP
    elif "process group has not been initialized" in str(error):
        if any(Path(file).name == "zero_redundancy_optimizer.py" for _, file in named):
            reason = f"ZeroRedundancyOptimizer {SHARDS_STATE}"
        else:
            reason = (
                "the script uses torch.distributed where no run has made its process group; remove what a launcher's script did there, or "
                "do it in the loop over the steps"
            )
    return _with_place(reason, error) if reason else None


def refuse_process_group() -> None:
    """Refuse a script that has made torch's process group before it calls `undula.main`.

    Raises:
        UsageError: It has.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or sys.argv[0])
    lines = script.read_text(errors="replace").splitlines() if script.is_file() else []
    calls = [number for number, line in enumerate(lines, 1) if "init_process_group(" in line]
    if calls:
        raise UsageError(f"{_MAKES_GROUP} ({script.name}:{calls[0]})")
    raise UsageError(
        "a library has made torch's process group before the run, which makes its own, as TrainingArguments at the top level of a script "
        "do under a launcher; make such objects in the function that trains"
    )


def _reason_of_command_line() -> str:
    if _is_of_adapter():
        return (
            "the script parses a command line outside of the function that launch() gets, where it finds that of the job; parse it in that "
            "function, which gets config.arguments of the job's YAML"
        )
    return (
        "the script parses a command line of its own, but gets that of the job; move its arguments to the section config of the job's "
        "YAML, which run.config has"
    )


def _is_of_adapter() -> bool:
    return "undula.adapters.script" in sys.modules


def _last_line(error: BaseException) -> str:
    """Return the source of the line of the script in which an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    of_files = [frame for frame in frames if not frame.filename.startswith("<frozen ")]
    return (of_files[-1].line or "") if of_files else ""


def _with_place(reason: str, error: BaseException) -> UsageError:
    from undula.train.tracebacks import with_place  # whose import of torch may be the first one

    return with_place(UsageError(reason), "".join(traceback.format_exception(error)))
