"""A `break` in the loop over batches of a script: found in its source before it trains, because it ends a run only where the plan ends."""

import ast
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path


def warn_of_break(file: str) -> None:
    """Warn of the first `break` out of a loop with a backward pass in a Python file, if there is one."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError):  # of a function that was typed in, and has no file
        return
    line = min(
        (line for node in ast.walk(tree) if isinstance(node, ast.For) for line in _lines_of_breaks(node)), default=None
    )
    if line is not None:
        logging.getLogger("undula").warning(
            "%s:%d: a `break` in the loop over batches fails the job unless it comes at the end of an epoch or of the plan, as a script "
            "that continues does not know how many steps it has done; set plan.max_steps in the job's YAML to where it comes",
            Path(file).name,
            line,
        )


def _lines_of_breaks(loop: ast.For) -> list[int]:
    """Return the lines of the breaks out of a loop, if it has a backward pass of its own."""
    nodes = list(_own(loop.body))
    calls = (node.func for node in nodes if isinstance(node, ast.Call))
    trains = any(isinstance(call, ast.Attribute) and call.attr == "backward" for call in calls)
    return [node.lineno for node in nodes if trains and isinstance(node, ast.Break)]


def _own(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield nodes and those below them, without the insides of further loops."""
    for node in nodes:
        yield node
        if not isinstance(node, ast.For | ast.While):
            yield from _own(ast.iter_child_nodes(node))
