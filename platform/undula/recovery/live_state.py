"""The current state of a run on a rank: the model, the optimizer, and other tensors and values that change with each step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from undula.state.model_state import (
    MODEL,
    OPTIMIZER,
    empty_like_saved,
    live_buffers,
    live_leaves,
    load_state,
    model_and_optimizer_state,
)
from undula.state.pieces import Piece, RankState, Table, copy_overlap, piece_of, rank_state


class LiveState:
    """The tensors that training changes in place, as pieces, and the values that belong to them.

    Args:
        model, optimizer: The model and the optimizer of the run.
        beside: Returns the pieces and JSON values of the state that belong to neither the model nor the optimizer, by name.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, beside: Callable[[], Mapping[str, Any]] = dict
    ):
        self._model = model
        self._optimizer = optimizer
        self._beside = beside
        self._seen: list[Any] = []
        self._held: RankState | None = None

    @property
    def is_whole(self) -> bool:
        """Whether each rank has the whole state."""
        return self.held().is_whole

    def held(self) -> RankState:
        """This rank's part of the state. It is the same object as before if no tensor was replaced and no value has changed."""
        beside = self._beside()
        seen = list(live_leaves(self._model, self._optimizer))
        seen += [value.tensor if isinstance(value, Piece) else value for value in beside.values()]
        if self._held is None or not _are_same(seen, self._seen):
            state = model_and_optimizer_state(self._model, self._optimizer)
            self._held, self._seen = rank_state({**state, **beside}), seen
        return self._held

    def buffers(self) -> dict[str, Tensor]:
        """Copies of the model's buffers, which the next forward pass changes."""
        known = self.held().pieces
        return {name: value.detach().clone() for name, value in live_buffers(self._model).items() if name in known}

    def targets(self, saved: Table) -> "Targets":
        """Tensors of this rank into which a saved state can be restored.

        Args:
            saved: The table of the saved tensors. An optimizer that has not stepped yet lacks some of them.
        """
        return Targets(self._model, self._optimizer, self._beside(), saved)


class Targets:
    """Pieces of a state that is being restored. `load` hands them to the model and the optimizer."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, beside: Mapping[str, Any], saved: Table
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        own = {name: spec for name, spec in saved.items() if name.startswith((MODEL, OPTIMIZER))}
        self._tensors = empty_like_saved(model, optimizer, own)
        known = {name: value for name, value in beside.items() if isinstance(value, Piece)}
        self.pieces = {**{name: piece_of(tensor) for name, tensor in self._tensors.items()}, **known}

    def load(self, values: Mapping[str, Any]) -> None:
        """Hand the tensors and their values to the model and the optimizer."""
        load_state(self._model, self._optimizer, {**self._tensors, **values})

    def copy_whole(self, state: RankState) -> None:
        """Copy the pieces from a state in this process."""
        for name, target in self.pieces.items():
            source = state.pieces[name]
            copy_overlap(source.box, source.tensor, target)


def _are_same(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Whether all tensors are the same objects and all values are equal."""
    return len(now) == len(then) and all(
        a is b or (not isinstance(a, Tensor) and type(a) is type(b) and a == b) for a, b in zip(now, then, strict=True)
    )
