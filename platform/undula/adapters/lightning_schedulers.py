"""Schedulers of a Lightning script, which a run steps as one."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler


class Schedulers(LRScheduler):
    """Schedulers that Lightning would step after each step, or at the end of each epoch.

    Args:
        optimizer: Optimizer of the schedulers.
        configs: Lightning's settings of the schedulers.
        step_one: Function that steps a scheduler, by the module's hook.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, configs: list[Any], step_one: Callable[[Any], None]):
        # The base class would set learning rates itself.
        self.optimizer = optimizer
        self.epochs_done = 0
        """Number of epochs that have ended with the step that is about to be committed."""
        self._configs = configs
        self._step_one = step_one
        self._epochs = 0

    def step(self, epoch: int | None = None) -> None:
        """Step the schedulers after a step. One that counts epochs catches up if the last step of an epoch was skipped."""
        for config in self._configs:
            if config.interval == "step":
                self._step_one(config.scheduler)
        while self._epochs < self.epochs_done:
            self._epochs += 1
            for config in self._configs:
                if config.interval == "epoch":
                    self._step_one(config.scheduler)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self._epochs, "schedulers": [config.scheduler.state_dict() for config in self._configs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._epochs = state_dict["epochs"]
        for config, state in zip(self._configs, state_dict["schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
