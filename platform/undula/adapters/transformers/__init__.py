"""Hugging Face's Trainer on workers that come and go.

from undula.adapters.transformers import Trainer, launch        # in place of transformers' Trainer
...
launch(main)                                                    # in place of main()
"""

from undula.errors import needs_extra, one_sentence, require_tested

with one_sentence(), needs_extra("transformers"):
    require_tested("transformers", "accelerate")
    from undula.adapters.script import expect_launch, launch
    from undula.adapters.transformers.trainer import ElasticMixin, Trainer
    from undula.adapters.transformers.world_size import PlannedArguments, Seq2SeqTrainingArguments, TrainingArguments

expect_launch()
__all__ = ["ElasticMixin", "PlannedArguments", "Seq2SeqTrainingArguments", "Trainer", "TrainingArguments", "launch"]
