"""The current state of a run on a rank: the model, the optimizer, and other tensors and values that change with each step."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from undula.errors import CheckpointError
from undula.state.model_state import (
    MODEL,
    OPTIMIZER,
    aliases,
    empty_like_saved,
    load_state,
    model_and_optimizer_state,
    parameter_names,
)
from undula.state.optimizer_state import STATE
from undula.state.pieces import Piece, RankState, Table, copy_overlap, piece_of, rank_state


class LiveState:
    """State of a run on this rank: the tensors that training changes in place, as pieces, and the JSON values that belong to them.

    Args:
        model: Model of the run.
        optimizer: Optimizer of the run.
        beside: Callback that returns the rest of the state: pieces, rows and JSON values that belong to neither the model nor the
            optimizer, by name.
        check: Callback that gets the values of a state before it is restored, and raises an error if the run cannot go on with it.

    Attributes:
        model: Model of the run.
        optimizer: Optimizer of the run.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        beside: Callable[[], Mapping[str, Any]] = dict,
        check: Callable[[Mapping[str, Any]], None] = lambda values: None,
    ):
        self.model = model
        self.optimizer = optimizer
        self._beside = beside
        self._check = check

    @cached_property
    def is_whole(self) -> bool:
        """Whether every rank holds the whole state, which depends on how the model is sharded."""
        return self.held().is_whole

    def held(self) -> RankState:
        """Return this rank's part of the state.

        It is found anew in each call. A script can give a parameter other memory (`p.data = ...`) or have hooks of `state_dict()` that
        return copies, so pieces that were found before an earlier step may not change with the model any more.
        """
        return rank_state({**model_and_optimizer_state(self.model, self.optimizer), **self._beside()})

    def copies(self, held: RankState) -> dict[str, Tensor]:
        """Return copies of the tensors in a state that can change before the next update, by name.

        These are all but the parameters and the entries that the optimizer has for them: a forward pass can change buffers and what
        `get_extra_state()` returns, and the next learning rate can be written into a tensor of a group.
        """
        lasting = {MODEL + name for name in parameter_names(self.model).values()} | aliases(self.model)
        return {
            name: piece.tensor.detach().clone()
            for name, piece in held.pieces.items()
            if name not in lasting and not name.startswith(f"{STATE}.")
        }

    def targets(self, saved: Table, values: Mapping[str, Any]) -> "Targets":
        """Return tensors of this rank into which a saved state can be restored.

        Args:
            saved: Table of the saved tensors. It may include tensors that the optimizer creates only at its first step.
            values: Values of the saved state.

        Raises:
            CheckpointError: The run cannot go on with the saved state.
        """
        targets = Targets(self.model, self.optimizer, rank_state(self._beside()).pieces, saved)
        self._check(values)
        return targets


class Targets:
    """Tensors into which a saved state is copied, as pieces. `load` passes them to the model and the optimizer."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, beside: Mapping[str, Piece], saved: Table
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        own = {name: spec for name, spec in saved.items() if name.startswith((MODEL, OPTIMIZER))}
        self._tensors = empty_like_saved(model, optimizer, own)
        # A setting that a resumed run may change can add or remove such a piece, which then starts anew.
        known = {name: piece for name, piece in beside.items() if name in saved}
        if other := next((name for name, piece in known.items() if piece.shape != saved[name].shape), None):
            raise CheckpointError(
                f"the run was saved with {other!r} of the shape {list(saved[other].shape)}, and now has {list(known[other].shape)}; "
                "restore the previous settings"
            )
        self.pieces = {**{name: piece_of(tensor) for name, tensor in self._tensors.items()}, **known}

    @cached_property
    def distinct(self) -> dict[str, Piece]:
        """Pieces without those of parameters that have another name as well, under which they are restored."""
        again = aliases(self._model)
        return {name: piece for name, piece in self.pieces.items() if name not in again}

    def load(self, values: Mapping[str, Any]) -> None:
        """Load the restored tensors and the values of the saved state into the model and the optimizer."""
        load_state(self._model, self._optimizer, {**self._tensors, **values})

    def copy_whole(self, state: RankState) -> None:
        """Copy all pieces from a state that this process holds as a whole."""
        for name, target in self.pieces.items():
            source = state.pieces[name]
            copy_overlap(source.box, source.tensor, target)
