"""Parts of the training loop of Hugging Face's Trainer for versions of transformers that have the loop as one method without parts."""

import shutil
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput, speed_metrics


class OlderLoop:
    """The beginning and the end of the loop, with the names and the effects that they have where they are methods of the Trainer."""

    def _init_training_state(
        self: Any, max_steps: int, per_epoch: int, epochs: int, checkpoint: None, trial: None
    ) -> None:
        """Make the state of the trainer, and activate gradient checkpointing."""
        exported = [
            each for each in (*self.callback_handler.callbacks, self.control) if isinstance(each, ExportableState)
        ]
        self.state = TrainerState(stateful_callbacks=exported)
        self.state.is_hyper_param_search = False
        self.state.train_batch_size = self._train_batch_size
        self.state.compute_steps(self.args, max_steps)
        if self.args.gradient_checkpointing:
            kwargs = self.args.gradient_checkpointing_kwargs
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        self.state.epoch = 0
        self.state.init_training_references(self, max_steps, epochs, trial)

    def _finalize_training(self: Any, trial: None, num_train_samples: float, start_time: float) -> TrainOutput:
        """Log the metrics of the whole training, and clean up."""
        state = self.state
        self._total_loss_scalar += self._tr_loss.item()
        train_loss = self._total_loss_scalar / max(state.global_step, 0.001)
        metrics = speed_metrics("train", start_time, num_samples=num_train_samples, num_steps=state.max_steps)
        self.store_flos()
        metrics |= {"total_flos": state.total_flos, "train_loss": train_loss}
        self.is_in_train = False
        if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._load_best_model()
        self._memory_tracker.stop_and_update_metrics(metrics)
        self.log(metrics)
        if self.args.should_save and state.best_model_checkpoint is not None and self.args.save_total_limit == 1:
            for folder in Path(self._get_output_dir(trial)).glob("checkpoint-*"):
                if not folder.samefile(state.best_model_checkpoint):
                    shutil.rmtree(folder, ignore_errors=True)
        self.control = self.callback_handler.on_train_end(self.args, state, self.control)
        self._finish_current_push()
        if self.neftune_noise_alpha is not None:
            self.neftune_hook_handle.remove()
        return TrainOutput(state.global_step, train_loss, metrics)
