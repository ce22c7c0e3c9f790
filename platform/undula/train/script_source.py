"""What the source of a script shows before it trains: its loops with a backward pass, and what depends on the number of workers there."""

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from undula.errors import UsageError

RATES = frozenset({"lr", "learning_rate"})
"""Names of arguments and variables that are learning rates."""


def refuse_number_of_workers(function: Callable[..., Any], instead: str) -> None:
    """Refuse a function of a script that computes a loss and asks for the number of workers. Functions of its file that it calls are read
    as well.

    Args:
        function: The function.
        instead: Number of virtual workers, as the function finds it.

    Raises:
        UsageError: It does.
    """
    if code := code_of(function):
        _refuse_number_of_workers(code, (node for each in _read(code) for node in ast.walk(each)), instead)


def refuse_number_of_workers_in_loops(code: CodeType | None, instead: str) -> None:
    """Refuse a function whose loops with a backward pass or learning rates, or those of functions of its file that it calls, depend on the
    number of workers.

    Args:
        code: Code of the function; None if it is unknown.
        instead: Number of virtual workers, as the function finds it.

    Raises:
        UsageError: One does.
    """
    if code is None:
        return
    run = code.co_varnames[0] if code.co_argcount else ""
    in_loops = [node for _, nodes in loops(code) for node in nodes]
    _refuse_number_of_workers(code, in_loops, instead)
    for side in (side for node in in_loops if isinstance(node, ast.BinOp) for side in (node.left, node.right)):
        if _is_world_size(side, run):
            raise _refusal(code, side, f"{run}.world_size is a part of what is computed for a batch", instead)
    for rate in (rate for each in _read(code) for node in ast.walk(each) if (rate := _rate(node))):
        if any(called(node) == "get_world_size" or _is_world_size(node, run) for node in ast.walk(rate)):
            raise _refusal(code, rate, "a learning rate is computed from the number of workers", instead)


def code_of(function: Callable[..., Any]) -> CodeType | None:
    """Return the code of a function of a script; None for an object, and for a function of a library."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) and "site-packages" not in code.co_filename else None


def _refuse_number_of_workers(code: CodeType, nodes: Iterable[ast.AST], instead: str) -> None:
    for node in nodes:
        if called(node) == "get_world_size":
            raise _refusal(code, node, "get_world_size() of torch.distributed is called for a batch", instead)


def _refusal(code: CodeType, node: ast.AST, problem: str, instead: str) -> UsageError:
    return UsageError(
        f"{Path(code.co_filename).name}:{getattr(node, 'lineno', 0)}: {problem}, but the number of workers changes when they come and go; "
        f"use {instead}, which is plan.virtual_workers of the job"
    )


def _is_world_size(node: ast.AST, run: str) -> bool:
    """Return whether an expression is `run.world_size`."""
    owner = node.value if isinstance(node, ast.Attribute) and node.attr == "world_size" else None
    return isinstance(owner, ast.Name) and owner.id == run


def _rate(node: ast.AST) -> ast.AST | None:
    """Return the expression that a node passes or assigns as a learning rate; None if it does not."""
    if isinstance(node, ast.keyword):
        return node.value if node.arg in RATES else None
    is_rate = isinstance(node, ast.Assign) and any(
        isinstance(each, ast.Name) and each.id in RATES for each in node.targets
    )
    return node.value if is_rate else None  # type: ignore[attr-defined]


def functions_of(code: CodeType) -> dict[int, ast.FunctionDef]:
    """Return the functions in the file of one, by the number of the first line of each, where its decorators begin."""
    try:
        tree = ast.parse(Path(code.co_filename).read_bytes())
    except (OSError, SyntaxError):  # of a function that was typed in, and has no file
        return {}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {min([each.lineno, *(part.lineno for part in each.decorator_list)]): each for each in found}


def _read(code: CodeType) -> list[ast.FunctionDef]:
    """Return a function and those of its file that it calls, directly or not."""
    functions = functions_of(code)
    own = functions.get(code.co_firstlineno)
    read = [own] if own else []
    for each in read:  # which grows by what it calls
        names = {name for node in ast.walk(each) if (name := called(node))}
        read += [other for other in functions.values() if other.name in names and other not in read]
    return read


def loops(code: CodeType) -> Iterator[tuple[ast.For, list[ast.AST]]]:
    """Yield the loops with a backward pass of their own, and what is in them, of a function and of those of its file that it calls."""
    for loop in (node for each in _read(code) for node in ast.walk(each) if isinstance(node, ast.For)):
        nodes = list(below(loop.body, (ast.For, ast.While)))
        if any(called(node, ast.Attribute) == "backward" for node in nodes):
            yield loop, nodes


def called(node: ast.AST, kind: type[ast.AST] = ast.AST) -> str | None:
    """Return the name of the function or method that a node calls by a name of a kind; None if it calls none."""
    function = node.func if isinstance(node, ast.Call) and isinstance(node.func, kind) else None
    return getattr(function, "attr", getattr(function, "id", None))


def below(nodes: Iterable[ast.AST], closed: tuple[type[ast.AST], ...]) -> Iterator[ast.AST]:
    """Yield nodes and those below them, without the insides of some types."""
    for node in nodes:
        yield node
        if not isinstance(node, closed):
            yield from below(ast.iter_child_nodes(node), closed)
