"""Record of what the optimizer of a sharded model is given, before the step is committed: in this process, and in the memory of the node.

A rank whose commit breaks can take its step all the same, if another rank has committed it. What a rank that is killed had in its process
is computed again from its newest snapshot and the updates since, which outlive it in the memory of its node.

Also here: updates of the optimizer that are recorded before their step is committed, and taken again where a rank was lost with its state.

A rank of a sharded model has a part of the state that no other rank has. What an update needs beside this part is recorded before the
commit: the rank's shard of the reduced and clipped gradient, the settings of the optimizer, and what LARS and LAMB have computed over all
ranks. From these and an older state, the optimizer computes the same bits again, on plain tensors.

Also here: how far the script has come after an update, which each rank of a sharded model notes in the memory of its node.

A rank that is killed leaves a snapshot and the updates since. Whether the script has changed the rank's part after the last of these, no
other rank knows.
"""

import os
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from undula.parallel.sharding import Settles, has_known_results, has_own_step, place_gradients
from undula.recovery.baseline import Work
from undula.recovery.node_memory import Slot, ready_event, reserve
from undula.recovery.snapshot import PLACE, SLOTS, UPDATE_SLOTS, Arrangement, encoded, fixed_meta
from undula.recovery.worker_state import HeldState
from undula.state.model_state import MODEL, parameter_names
from undula.state.optimizer_state import ENTRIES, GROUPS, STATE, encoded_groups, optimizer_state
from undula.state.pieces import Holding, Piece, RankState, is_sharded, local_part, piece_of
from undula.state.values import decode

_FIELDS = struct.Struct("<qBB")


@dataclass(frozen=True)
class ScriptPlace:
    """The place to which the script had come on one rank."""

    step: int
    """Number of committed steps."""
    work: Work
    """What it had done since the last of them."""

    @classmethod
    def noted_in(cls, folder: Path | None) -> "ScriptPlace | None":
        """Return the place that a rank has noted in its folder in the memory of this node; None if it has noted none."""
        if folder is None:
            return None
        try:
            step, place, changes = _FIELDS.unpack((folder / PLACE).read_bytes())
        except (OSError, struct.error):
            return None
        return cls(step, Work(place, changes))


class PlaceFile:
    """File in which a rank notes how far the script has come.

    Args:
        folder: Folder of the rank in the memory of its node. Nothing is noted before there is a snapshot in it.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._file: BinaryIO | None = None

    def note(self, step: int, work: Work) -> None:
        """Note what the script has done since the last of so many committed steps.

        Raises:
            OSError: The node has no memory for the file.
        """
        if self._file is None:
            if not self._folder.exists():
                return
            self._file = (self._folder / PLACE).open("wb", buffering=0)
        # One call, which no signal interrupts, so that a rank that is killed leaves the former place or this one.
        os.pwrite(self._file.fileno(), _FIELDS.pack(step, work.place, work.changes), 0)


GRADIENT, TRUST = "update.gradient.", "update.trust."
"""Beginnings of the names of a recorded update's tensors: the gradient of each parameter, and the ratios of LARS and LAMB."""
BEFORE, APPLIES, KIND, PRESENT = "update.before", "update.applies", "update.kind", "update.present"
"""Values of a recorded update: the number of steps before it, whether the step is not skipped, the class of the optimizer, and the names of
the parameters that have a gradient."""
OTHERS = "update.others"
"""Value of a recorded update: the names of the parameters that the optimizer does not have, and that no update changes."""


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of an optimizer, as recorded updates name it."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def can_replay(values: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a recorded update, of which the values are given, is one of such an optimizer."""
    return bool(values[KIND] == kind_of(optimizer))


def replayed_holding(holding: Holding | None, values: Mapping[str, Any]) -> Holding | None:
    """Return the extent of what `replayed` returns, given that of the state before and the values of the update; None for none."""
    if holding is None:
        return None
    known = _known_after(values)
    boxes = {name: box for name, box in holding.boxes.items() if _is_kept(name, known)}
    return Holding(holding.expected, boxes)


def replayed(state: RankState, update: RankState, kind: type[torch.optim.Optimizer], device: torch.device) -> RankState:
    """Return the state of a rank after an update, without the pieces that an update does not make, such as buffers.

    Args:
        state: State of the rank before the update, which is not changed.
        update: The recorded update.
        kind: Class of the optimizer.
        device: Device on which the update is computed.
    """
    names, known = _parameters_of(update.values), _known_after(update.values)
    kept = {name: piece for name, piece in state.pieces.items() if _is_kept(name, known)}
    if not update.values[APPLIES]:
        return RankState(kept, state.values)
    parameters = {name: nn.Parameter(kept[MODEL + name].tensor.to(device, copy=True), False) for name in names}
    for name in update.values[PRESENT]:
        parameters[name].grad = update.pieces[GRADIENT + name].tensor.to(device, copy=True)  # which SGD may change
    settings = {name: piece.tensor for name, piece in update.pieces.items()}
    make: Any = kind
    optimizer: torch.optim.Optimizer = make(
        [
            {
                "params": [parameters[name] for name in group["parameters"]],
                **{key: decode(value, settings, device) for key, value in group["settings"].items()},
            }
            for group in update.values[GROUPS]
        ]
    )
    _load_entries(optimizer, parameters, state, device)
    ratios = [piece.tensor.to(device) for name, piece in sorted(update.pieces.items()) if name.startswith(TRUST)]
    if ratios:
        make = optimizer
        make.settled = ratios
    optimizer.step()
    return _state_of(optimizer, parameters, state, kept)


def _load_entries(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: RankState, device: torch.device
) -> None:
    tensors = {name: piece.tensor.clone() for name, piece in state.pieces.items() if name.startswith(f"{STATE}.")}
    for name, entries in state.values[ENTRIES].items():
        if name in parameters:
            optimizer.state[parameters[name]] = decode(entries, tensors, device)


def _state_of(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    before: RankState,
    kept: Mapping[str, Piece],
) -> RankState:
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    described = optimizer_state(optimizer, names)
    found = {MODEL + name: parameter.detach() for name, parameter in parameters.items()}
    found |= {name: value for name, value in described.items() if isinstance(value, Tensor)}
    pieces = {name: replace(piece, tensor=found.get(name, piece.tensor)) for name, piece in kept.items()}
    # What the optimizer has made in this update, which the next one needs, is no part of what this rank offers.
    pieces |= {name: piece_of(tensor) for name, tensor in found.items() if name not in kept}
    return RankState(pieces, {**before.values, ENTRIES: described[ENTRIES], GROUPS: described[GROUPS]})


def _parameters_of(values: Mapping[str, Any]) -> dict[str, None]:
    """Return the names of the optimizer's parameters, in its order."""
    return {name: None for group in values[GROUPS] for name in group["parameters"]}


def _known_after(values: Mapping[str, Any]) -> set[str]:
    """Return the names of the pieces of the model that are known after an update, given the values of the update."""
    return {MODEL + name for name in (*_parameters_of(values), *values[OTHERS])}


def _is_kept(name: str, known: Collection[str]) -> bool:
    return name.startswith(f"{STATE}.") or name in known


class UpdateLog:
    """Records the updates of one rank.

    Args:
        module: Module of the run.
        optimizer: Optimizer of the run.
        plan_digest: Digest of the run's plan.
        attempt: Number of the attempt.
        own: Folder of the rank's slots in the memory of its node; None to keep updates in this process only.
        count: Number of updates to keep there. A snapshot must be taken at least as often.

    Attributes:
        pending: Update whose step is not committed yet; None if there is none.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan_digest: str,
        attempt: int,
        own: Path | None = None,
        count: int = 1,
    ):
        self._module, self._optimizer = module, optimizer
        self._plan_digest, self._attempt = plan_digest, attempt
        self._own = own
        self._place_file = PlaceFile(own) if own else None
        self._names = UPDATE_SLOTS[:count]
        self._slots: list[Slot] = []
        self._form: object = None
        self._fixed_meta = b""
        self._next = 0
        self._places: dict[nn.Parameter, Piece] = {}
        """Piece of each parameter, whose gradient has the same place."""
        self._ratios: list[Tensor] = []
        self.pending: HeldState | None = None

    def record(self, before: int, done: int, applies: bool, work: Work) -> None:
        """Record the update that leads from `before` to `done` steps. No snapshot may be in progress.

        Args:
            before: Number of committed steps.
            done: Number of steps after the update.
            applies: Whether the optimizer will step, instead of skipping the step.
            work: What the script has done in the state before the update.
        """
        place_gradients(self._parameters())
        names, pieces = parameter_names(self._module), {}
        tensors: dict[str, Tensor] = {}
        groups = encoded_groups(self._optimizer, names, tensors)
        present = []
        for parameter in self._parameters():
            place, name = self._place(parameter), names[parameter]
            if parameter.grad is None:
                gradient = place.tensor.new_zeros(()).expand(place.tensor.shape)  # takes its place in the slot
            else:
                gradient = local_part(parameter.grad).detach()
                present.append(name)
            pieces[GRADIENT + name] = Piece(gradient, place.shape, place.offsets, place.is_replicated)
        if isinstance(self._optimizer, Settles) and applies:
            self._ratios = self._optimizer.settled or []
        # Those of a step that is skipped count for nothing, but keep the places of all others in the slot.
        tensors |= {f"{TRUST}{number:04d}": ratio for number, ratio in enumerate(self._ratios)}
        pieces |= {name: piece_of(tensor) for name, tensor in tensors.items()}
        values = {
            BEFORE: before,
            APPLIES: applies,
            KIND: kind_of(self._optimizer),
            PRESENT: present,
            GROUPS: groups,
            OTHERS: sorted(set(names.values()) - {name for group in groups for name in group["parameters"]}),
            **work.values(),
        }
        self.pending = HeldState(self._plan_digest, self._attempt, done, RankState(pieces, values), ())
        if self._own is not None:
            self._store(self.pending)

    def note_place(self, step: int, work: Work) -> None:
        """Note what the script has done since the last of so many committed steps."""
        if self._place_file:
            try:
                self._place_file.note(step, work)
            except OSError:  # a lost worker costs more steps
                self._place_file = None

    def committed(self) -> None:
        """Forget the pending update, whose step is committed."""
        self.pending = None

    def close(self) -> None:
        """Record in this process only from now on."""
        self._own, self._place_file, self._slots = None, None, []

    def _store(self, update: HeldState) -> None:
        try:
            assert self._own is not None
            if not any((self._own / name).exists() for name in SLOTS):
                return  # without a snapshot, updates are of no use, and must not take its memory
            if not self._lay_out(update.state):
                return
            slot, self._next = self._slots[self._next], (self._next + 1) % len(self._slots)
            sources = [piece.tensor for piece in update.state.pieces.values()]
            slot.write(sources, ready_event(sources), encoded(self._fixed_meta, update.age, (), update.values))
        except OSError:  # the state is still in the snapshots, which may be some steps older
            self.close()

    def _lay_out(self, update: RankState) -> bool:
        """Prepare the slots for an update. Return whether the node has memory for them."""
        former, self._form = (
            self._form,
            [(name, piece.box, piece.tensor.dtype) for name, piece in update.pieces.items()],
        )
        if self._form != former:
            assert self._own is not None
            arrangement = Arrangement(update.pieces)
            self._fixed_meta = fixed_meta(self._plan_digest, arrangement)
            self._slots, self._next = [], 0
            if reserve(self._own, dict.fromkeys(self._names, arrangement.bytes)) is None:
                self._slots = [Slot(self._own / name, arrangement) for name in self._names]
        return bool(self._slots)

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self._optimizer.param_groups:
            yield from (parameter for parameter in group["params"] if parameter.requires_grad)

    def _place(self, parameter: nn.Parameter) -> Piece:
        if parameter not in self._places:
            self._places[parameter] = piece_of(parameter)
        return self._places[parameter]


def can_record(module: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the updates of an optimizer can be taken again on the shards of a module, with the same bits.

    That is unknown if the script has given the optimizer hooks or a step of its own.
    """
    return is_sharded(module) and has_known_results(optimizer) and not has_own_step(optimizer)
