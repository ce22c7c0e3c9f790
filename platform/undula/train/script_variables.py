"""Variables of the script that begin anew in each worker group, although steps change them and later ones, or the validation, read them.

At some step boundaries the variables of the script's loop are noted, as small values. The next group of the process compares how they
begin: what begins as in the former group, and had changed from step to step there, is lost.

Also here: what no state of a run has, and is lost when it resumes: tensors of modules that are no part of the model, and buffers of the
model that are not persistent. The first step shows whether it changes any.
"""

import gc
import random
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import CO_NEWLOCALS, getattr_static, unwrap
from itertools import chain, islice, starmap
from math import inf
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from undula.recovery.fingerprint import Watched, differ
from undula.recovery.worker_state import WorkerState
from undula.train.script_reads import Reads


class StateBeside:
    """Tensors of all modules of this process that are no part of the model, as they are before a step.

    Args:
        model: Model of the run.
    """

    def __init__(self, model: nn.Module):
        inside = {id(layer) for layer in model.modules()}
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._before = [
            (layer, name, tensor, version_of(tensor))
            for layer in _modules()
            if id(layer) not in inside
            for name, tensor in _tensors(layer).items()
            if id(tensor) not in own
        ]
        self._unsaved = [
            (path, layer, name, _watched(layer, name).take())
            for path, layer in model.named_modules()
            for name in sorted(layer._non_persistent_buffers_set)
            if layer._buffers.get(name) is not None
        ]

    def changed(self) -> str | None:
        """Return the class of a module and its tensor, as in "Centre.mean", if one has changed; None if none has."""
        for layer, name, tensor, version in self._before:
            now = _tensors(layer).get(name)
            if now is not tensor or version_of(now) != version:
                return f"{type(layer).__name__}.{name}"
        return None

    def unsaved(self) -> str | None:
        """Return the name of a buffer of the model that is not persistent, if its values have changed; None if none has."""
        for path, layer, name, before in self._unsaved:
            if layer._buffers.get(name) is not None and differ(before, _watched(layer, name).take()):
                return f"{path}.{name}".removeprefix(".")
        return None


def _watched(layer: nn.Module, name: str) -> Watched:
    return Watched(lambda: [buffer] if (buffer := layer._buffers[name]) is not None else [])


def _modules() -> list[nn.Module]:
    """Return the modules that exist in this process.

    ``gc.get_objects()`` also gives tuples that other threads are building, which fail with a SystemError if they go on
    while somebody holds them. So its list exists only within a call that runs no Python code and keeps the
    interpreter's lock, and only the classes come out; their instances are then among what refers to a class.
    """
    objects = chain.from_iterable(starmap(gc.get_objects, [()]))
    classes = filter(nn.Module.__subclasscheck__, set(map(type, objects)))
    # The class is asked, because isinstance() would run code of stand-ins for objects that are made when they are used.
    return [each for each in gc.get_referrers(*classes) if issubclass(type(each), nn.Module)]


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a layer itself; none of one that is not initialized."""
    try:
        return {**dict(layer.named_parameters(recurse=False)), **dict(layer.named_buffers(recurse=False))}
    except AttributeError:
        return {}


def version_of(tensor: Tensor) -> int:
    """Return how often operations have changed a tensor in place; 0 if torch does not count it."""
    return 0 if is_lazy(tensor) or tensor.is_inference() else tensor._version


Path: TypeAlias = tuple[object, ...]
"""Name of a variable, its attribute or "", and the keys that lead to a value in it."""
Notes: TypeAlias = dict[Path, int | None]
"""Small numbers by path, which are equal if the values there are; None for values that do not count."""
OPAQUE = (
    nn.Module,
    torch.optim.Optimizer,
    LRScheduler,
    DataLoader,
    Dataset,
    FunctionType,
    MethodType,
    ModuleType,
    type,
)
"""Types of objects whose values are the run's, or no state, or are looked for elsewhere."""
CLOCKS: tuple[Callable[[], float], ...] = (time.time, time.monotonic, time.perf_counter)
LIBRARIES = sysconfig.get_path("stdlib"), "-packages"
"""Beginning of the files of Python's own modules, and a part of those of other libraries."""
DEPTH = 4
"""Maximum number of containers and objects around a value."""
MOST_NOTES = 2000
"""Maximum number of notes of a variable."""
MOST_ELEMENTS = 256
"""Maximum number of elements of a tensor that are noted."""
LIMIT_S = 0.1
"""Maximum time in seconds for notes, after which there are no more in a group."""


@dataclass
class Record:
    """Notes of the variables of a loop in a group."""

    place: tuple[CodeType, int]
    """The loop: code of its function, and offset of its instruction."""
    begun: Notes
    is_told: bool = False
    """Whether an event has named a variable. One event is enough, so there are no more notes then."""
    newest: Notes = field(default_factory=dict)
    """Notes of the newest boundary that were taken."""
    changed: dict[Path, None] = field(default_factory=dict)
    """Paths of values that have changed between two boundaries, in order."""

    def add(self, notes: Notes) -> None:
        """Add the notes of a boundary."""
        for path, note in notes.items():
            if None not in (note, former := self.newest.get(path)) and note != former:
                self.changed[path] = None
        self.newest = notes

    def begun_anew(self, begun: Notes) -> dict[tuple[str, str], None]:
        """Return the variables of which changed values have begun again as in this group, or as none, with their attributes."""
        paths = [path for path in self.changed if path[:1] in self.begun and self.begun.get(path) == begun.get(path)]
        return {(str(path[0]), str((*path, "")[1])): None for path in paths}


class ScriptVariables:
    """Variables of a script's loop, from one worker group of this process to the next.

    Args:
        worker: Data of the process.
        is_first: Whether this is the rank whose events reach the ledger.
        readers: Functions of the script that the run calls between two steps.
        keepers: Functions of the script that give and restore its part of the run's state.
    """

    def __init__(self, worker: WorkerState, is_first: bool, readers: Sequence[object], keepers: Sequence[object]):
        self._worker, self._is_first, self._readers, self._keepers = worker, is_first, readers, keepers
        self._began = [clock() for clock in CLOCKS]
        self._boundaries = 0
        self._next = 1.0
        """Number of boundaries after which the variables are noted again."""

    def begin(self) -> str | None:
        """Note how the variables begin, and return the name of one that has begun anew, and is read; None if there is none."""
        former, frame = self._worker.script_record, _frame_of_script()
        if former and former.is_told:
            return None
        self._worker.script_record = None
        with suppress(Exception):  # values of the script can be of any kind, and a search must not end the run
            if frame:
                variables = _variables(frame)
                self._worker.script_record = record = Record((frame.f_code, frame.f_lasti), self._noted(variables))
                if former and former.place == record.place and self._is_first:
                    for name, attribute in former.begun_anew(record.begun):
                        if self._is_read(frame, variables, name, attribute):
                            record.is_told = True
                            return f"{name}.{attribute}" if attribute else name
        return None

    def boundary(self) -> None:
        """Note the variables at the boundaries after the first step, the second, the fourth and so on, which takes the others no time."""
        self._boundaries += 1
        record = self._worker.script_record
        if record is None or record.is_told or self._boundaries < self._next:
            return
        began, frame, self._worker.script_record = time.perf_counter(), _frame_of_script(), None
        with suppress(Exception):
            if frame and (frame.f_code, frame.f_lasti) == record.place:
                record.add(self._noted(_variables(frame)))
                self._worker.script_record = record
        is_slow = self._boundaries > 1 and time.perf_counter() - began > LIMIT_S
        self._next = inf if is_slow else 2 * self._boundaries

    def _noted(self, variables: Mapping[str, object]) -> Notes:
        clocks = [(began, clock()) for began, clock in zip(self._began, CLOCKS, strict=True)]

        def is_time(note: object) -> bool:
            return isinstance(note, int | float) and any(
                began <= seconds <= now for began, now in clocks for seconds in (note, note * 1e-9)
            )

        found = (note for name, value in variables.items() for note in islice(_notes((name,), value), MOST_NOTES))
        return {path: None if note is None else hash(repr(note)) for path, note in found if not is_time(note)}

    def _is_read(self, frame: FrameType, variables: Mapping[str, object], name: str, attribute: str) -> bool:
        """Return whether a later step or a function of the script may read a variable before it is assigned."""
        code, value = frame.f_code, variables.get(name)
        if any(_holds(keeper, value) or name in _names(keeper) for keeper in self._keepers):
            return False
        codes = {key: _code(each) for key, each in variables.items()}
        own = {key: each for key, each in codes.items() if each and each.co_filename == code.co_filename}
        others = {key for key, each in variables.items() if callable(each) and key not in own and _holds(each, value)}
        is_global = name not in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
        kind = type(value)
        methods = {each for each in dir(kind) if isinstance(getattr_static(kind, each), FunctionType | property)}
        reads = Reads(name, attribute, methods, is_global, own, others)
        for reader in self._readers:
            called = _code(reader)
            is_seen = called is not None and (is_global or name in called.co_freevars)
            if reads.reads(called) if called and is_seen else _holds(reader, value):
                return True
        return reads.reads(code, frame.f_lasti)


def _frame_of_script() -> FrameType | None:
    """Return the frame of the script that goes through the steps; None if it is an adapter's, or no function's."""
    frame: FrameType | None = sys._getframe()
    while frame and (_is_of_loop(frame.f_globals.get("__name__", "")) or _is_of_library(frame.f_code.co_filename)):
        frame = frame.f_back  # also from a progress bar around the steps
    if frame is None or str(frame.f_globals.get("__name__", "")).startswith("undula."):
        return None
    return frame if frame.f_code.co_flags & CO_NEWLOCALS else None


def _is_of_loop(module: str) -> bool:
    return module.startswith(("undula.train.", "undula.testing."))


def _variables(frame: FrameType) -> dict[str, object]:
    """Return the variables that the code of a frame can read by name."""
    own = frame.f_locals
    found = {**{name: value for name, value in frame.f_globals.items() if not name.startswith("__")}, **own}
    if isinstance(own, dict):
        own.clear()  # a copy, with which the frame would keep a batch in memory
    return found


def _notes(path: Path, value: Any, depth: int = 0, of_library: bool = False) -> Iterator[tuple[Path, object]]:
    """Yield the notes of a value, that of itself first. Of the objects of other libraries, only tensors count."""
    note, inside = None, path if len(path) > 1 else (*path, "")
    parts: Iterable[tuple[object, object]] = ()
    if depth > DEPTH or isinstance(value, OPAQUE):
        return
    if isinstance(value, Tensor | np.ndarray):
        note, of_library = _sample(value), False
    elif isinstance(value, dict):
        note, parts = "dict", value.items()  # and not its size, because new entries may be those of a cache
    elif isinstance(value, list | tuple | deque):
        note, parts = len(value), enumerate(value)
    elif isinstance(value, random.Random):
        note = value.getstate()
    elif isinstance(value, np.random.Generator):
        note = value.bit_generator.state
    elif isinstance(value, torch.Generator):
        note = None if value is torch.default_generator else _sample(value.get_state())
    elif value is None or isinstance(value, bool | np.bool_):
        pass  # a flag, or a place for what is made when it is first used
    elif isinstance(value, int | float | complex | str | bytes | np.generic):
        note = value
    elif isinstance(fields := getattr(value, "__dict__", None), dict) and not type(value).__module__.startswith(
        "undula."
    ):
        note, inside, parts = type(value).__name__, path, fields.items()
        of_library = of_library or any(map(_is_class_of_library, type(value).__mro__))
    else:
        return
    yield path, None if of_library else note
    for key, each in parts:
        yield from _notes((*inside, key), each, depth + 1, of_library)


def _sample(value: Tensor | np.ndarray[Any, Any]) -> object:
    """Return the shape and some elements of a tensor or an array."""
    if isinstance(value, Tensor):
        value = getattr(value, "_local_tensor", value)  # a shard, if it is one
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided or value.is_meta:
            return None
        flat = value.detach().flatten()
        some = flat[:: flat.numel() // MOST_ELEMENTS + 1].cpu().contiguous().view(torch.uint8).numpy()
    else:
        some = value.flat[:: value.size // MOST_ELEMENTS + 1]
    return value.shape, some.tobytes()


def _is_of_library(file: str) -> bool:
    return file.startswith(LIBRARIES[0]) or LIBRARIES[1] in file


def _is_class_of_library(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return kind.__module__ not in ("abc", "typing") and _is_of_library(file)


def _code(function: object) -> CodeType | None:
    """Return the code of a function of Python, without decorators and arguments that were given before."""
    while isinstance(function, partial):
        function = function.func
    return unwrap(function).__code__ if isinstance(function, FunctionType | MethodType) else None


def _names(function: object) -> set[str]:
    code = _code(function)
    return {*code.co_freevars, *code.co_names} if code else set()


def _holds(function: object, value: object, depth: int = 0) -> bool:
    """Return whether a function, or one that it calls, refers to an object."""
    if value is None or isinstance(value, bool | int | float | str) or depth > DEPTH:
        return False
    parts: tuple[object, ...] = ()
    if isinstance(function, partial):
        parts = function.func, *function.args, *function.keywords.values()
    elif isinstance(function, MethodType):
        parts = function.__self__, function.__func__
    elif isinstance(function, FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
        parts = *cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    return function is value or any(_holds(part, value, depth + 1) for part in parts)
