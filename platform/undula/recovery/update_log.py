"""Record of what the optimizer of a sharded model is given, before the step is committed: in this process, and in the memory of the node.

A rank whose commit breaks can take its step all the same, if another rank has committed it. What a rank that is killed had in its process
is computed again from its newest snapshot and the updates since, which outlive it in the memory of its node.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from undula.parallel.sharding import Settles, has_known_results, has_own_step, place_gradients
from undula.recovery.baseline import Work
from undula.recovery.node_memory import reserve
from undula.recovery.replay import APPLIES, BEFORE, GRADIENT, KIND, OTHERS, PRESENT, TRUST, kind_of
from undula.recovery.script_place import PlaceFile
from undula.recovery.slot import Slot, ready_event
from undula.recovery.snapshot import SLOTS, UPDATE_SLOTS, Arrangement, encoded, fixed_meta
from undula.recovery.worker_state import HeldState
from undula.state.model_state import parameter_names
from undula.state.optimizer_state import GROUPS, encoded_groups
from undula.state.pieces import Piece, RankState, is_sharded, local_part, piece_of


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
