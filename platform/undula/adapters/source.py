"""What the source of a script shows before it trains: statements that fail the job, or change its result, only when they are reached."""

import ast
from collections.abc import Collection, Mapping
from pathlib import Path
from types import FrameType

from undula.errors import UsageError
from undula.train.script_source import below, called, functions_of, loops


def refuse_break(script: FrameType) -> None:
    """Refuse a `break` out of a loop with a backward pass in a function that runs, or in one of its file that it calls.

    Raises:
        UsageError: There is one.
    """
    if lines := [node.lineno for _, nodes in loops(script.f_code) for node in nodes if isinstance(node, ast.Break)]:
        raise UsageError(
            f"{Path(script.f_code.co_filename).name}:{min(lines)}: this `break` leaves the loop over batches after a number of "
            "steps that the script counts itself, and after an interruption it would count them from 0; set plan.max_steps in the job's "
            "YAML to that number, with which the `break` may stay, or remove it"
        )


def refuse_counted_steps(script: FrameType) -> None:
    """Refuse a step of the optimizer, or clipping, after a number of batches that a loop with a backward pass counts itself.

    Args:
        script: Function that runs. Functions of its file that it calls are read as well.

    Raises:
        UsageError: There is one.
    """
    for loop, nodes in loops(script.f_code):
        counts = {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AugAssign)}
        if "enumerate(" in ast.unparse(loop.iter) and isinstance(loop.target, ast.Tuple):
            counts.add(ast.unparse(loop.target.elts[0]))
        for node in (each for each in nodes if isinstance(each, ast.If)):
            is_counted = any(ast.unparse(part) in counts for part in ast.walk(node.test))
            if is_counted and (calls := [*filter(_ends_step, below(node.body, ()))]):
                raise UsageError(
                    f"{Path(script.f_code.co_filename).name}:{node.lineno}: this `if` calls {ast.unparse(calls[0]).split('(')[0]}() "
                    "after a number of batches that the script counts itself, but the number of workers decides how many each has in a "
                    "step; call it for each batch in `with accelerator.accumulate(model)`, pass the number of batches as "
                    "Accelerator(gradient_accumulation_steps=...), and leave the loss undivided"
                )


def refuse_later(script: FrameType, class_name: str, has: Collection[str], instead: Mapping[str, str]) -> None:
    """Refuse what a function that runs will read, below its current line and in any case, of an object that does not have it.

    Args:
        script: The function.
        class_name: Name of the class of the object, which the function assigns to a name.
        has: Attributes of the object.
        instead: What to do instead, for some of the others.

    Raises:
        UsageError: There is such an attribute.
    """
    own = functions_of(script.f_code).get(script.f_code.co_firstlineno)
    nodes = list(below(own.body if own else (), (ast.If, ast.Try, ast.FunctionDef, ast.Lambda)))
    calls = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    made = [node for node in calls if ast.unparse(node.value).split("(")[0].rpartition(".")[2] == class_name]
    names = {target.id for node in made for target in node.targets if isinstance(target, ast.Name)}
    for node in (each for each in nodes if isinstance(each, ast.Attribute)):
        is_read = isinstance(node.value, ast.Name) and node.value.id in names
        if is_read and node.lineno > script.f_lineno and node.attr not in has:
            raise UsageError(
                f"{Path(script.f_code.co_filename).name}:{node.lineno}: {class_name}.{node.attr} is not possible in a run; "
                f"{instead.get(node.attr, 'remove it')}"
            )


def _ends_step(node: ast.AST) -> bool:
    """Return whether a node is a call that clips a gradient, or of an optimizer's step."""
    owner = ast.unparse(node.func.value) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
    return called(node) == "clip_grad_norm_" or (called(node) == "step" and "opt" in owner.lower())
