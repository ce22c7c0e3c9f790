"""Fine-tunes a text classifier as run_glue does: dataclasses of arguments, dynamic padding, metrics, the best model, predictions."""

import logging
import random
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import numpy as np
from sklearn.metrics import accuracy_score, f1_score
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

logger = logging.getLogger(__name__)
GOOD, BAD = ["good", "great", "fine", "lovely"], ["bad", "poor", "dull", "awful"]
OTHER = ["the", "film", "was", "really", "plot", "and", "actors", "were", "music"]


@dataclass
class DataTrainingArguments:
    max_seq_length: int = field(default=12, metadata={"help": "Maximum length after tokenization."})
    pad_to_max_length: bool = field(default=False, metadata={"help": "Whether to pad all samples to the maximum."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Truncates the evaluation."})


@dataclass
class ModelArguments:
    hidden_size: int = 16
    num_hidden_layers: int = 2


def reviews(seed, rows):
    generator = random.Random(seed)
    labels = [generator.randrange(2) for _ in range(rows)]
    texts = []
    for label in labels:
        words = [*generator.choices(OTHER, k=generator.randint(3, 8)), generator.choice(GOOD if label else BAD)]
        texts.append(" ".join(generator.sample(words, len(words))))
    return datasets.Dataset.from_dict({"idx": list(range(rows)), "sentence": texts, "label": labels})


def make_tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *GOOD, *BAD, *OTHER]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def compute_metrics(p):
    predictions = np.argmax(p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions, axis=1)
    return {"accuracy": accuracy_score(p.label_ids, predictions), "f1": f1_score(p.label_ids, predictions)}


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    parser.set_defaults(
        output_dir="glue",
        num_train_epochs=6,
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        weight_decay=0.01,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="f1",
        logging_steps=5,
        report_to="none",
    )
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(level=logging.INFO)
    logger.warning(f"Process rank: {training_args.local_process_index}, device: {training_args.device}")
    set_seed(training_args.seed)
    raw_datasets = datasets.DatasetDict(train=reviews(0, 96), validation=reviews(1, 32))
    tokenizer = make_tokenizer()

    def preprocess_function(examples):
        padding = "max_length" if data_args.pad_to_max_length else False
        return tokenizer(examples["sentence"], padding=padding, max_length=data_args.max_seq_length, truncation=True)

    with training_args.main_process_first(desc="dataset map pre-processing"):
        raw_datasets = raw_datasets.map(preprocess_function, batched=True)
    train_dataset, eval_dataset = raw_datasets["train"], raw_datasets["validation"]
    if data_args.max_eval_samples is not None:
        eval_dataset = eval_dataset.select(range(data_args.max_eval_samples))
    for index in random.sample(range(len(train_dataset)), 2):
        logger.info(f"Sample {index} of the training set: {train_dataset[index]}.")
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=model_args.hidden_size,
        num_hidden_layers=model_args.num_hidden_layers,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=None),
    )
    train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    metrics = train_result.metrics | {"train_samples": len(train_dataset)}
    trainer.save_model()
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    metrics = trainer.evaluate(eval_dataset=eval_dataset)
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    predictions = np.argmax(trainer.predict(eval_dataset.remove_columns("label")).predictions, axis=1)
    if trainer.is_world_process_zero():
        with Path(training_args.output_dir, "predict_results.txt").open("w") as writer:
            writer.writelines(f"{index}\t{item}\n" for index, item in enumerate(predictions))


if __name__ == "__main__":
    main()
