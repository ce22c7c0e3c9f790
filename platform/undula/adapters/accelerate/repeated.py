"""The last batch of an epoch once more, for the variables of a loop whose group ended in the work after that epoch.

What a script does after its loop over batches uses what the loop has left, such as the last loss. A new group that repeats this work has no
batch left in the epoch, and would end with a NameError.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from undula.data.nested import moved
from undula.data.script.items import Items, requests
from undula.parallel.recompute import kept_random_state
from undula.train.run import Run


def last_batch(run: Run, loader: "DataLoader[Any]", step: int) -> Any:
    """Return a micro-batch of a step, the same on all ranks."""
    request = next(requests(run.plan, range(1), step, "training"))
    return moved(Items(loader.dataset, loader.collate_fn)[request], run.device)  # type: ignore[arg-type]


@contextmanager
def undone(model: nn.Module, registered: Sequence[Any]) -> Iterator[None]:
    """Undo what a block changes: buffers of the model, objects of the script with a state, and the random number generators."""
    layers = [(layer, dict(layer.named_buffers(recurse=False))) for layer in model.modules()]
    before = [(layer, name, buffer, buffer.clone()) for layer, own in layers for name, buffer in own.items()]
    states = [deepcopy(each.state_dict()) for each in registered]
    with kept_random_state():
        try:
            yield
        finally:
            with torch.no_grad():
                for layer, name, buffer, value in before:
                    buffer.copy_(value)
                    setattr(layer, name, buffer)  # a forward pass may put another tensor in its place
            for each, state in zip(registered, states, strict=True):
                each.load_state_dict(state)
