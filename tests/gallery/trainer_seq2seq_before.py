"""Trains a sequence-to-sequence model as run_translation does: T5, generation in evaluations, exact matches, label smoothing."""

import argparse
import random

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def make_tokenizer():
    words = ["<pad>", "</s>", "<unk>", *DIGITS, *"0123456789"]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=16
    )


def pairs(seed, rows):
    generator = random.Random(seed)
    numbers = [[generator.randrange(10) for _ in range(generator.randint(2, 4))] for _ in range(rows)]
    return Dataset.from_dict(
        {
            "en": [" ".join(DIGITS[digit] for digit in number) for number in numbers],
            "digits": [" ".join(str(digit) for digit in number) for number in numbers],
        }
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--num_beams", type=int, default=2)
    cli = parser.parse_args()
    args = Seq2SeqTrainingArguments(
        output_dir="translation",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=6,
        gradient_accumulation_steps=2,
        num_train_epochs=cli.epochs,
        learning_rate=2e-2,
        optim="adafactor",
        lr_scheduler_type="inverse_sqrt",
        warmup_steps=4,
        label_smoothing_factor=0.1,
        predict_with_generate=True,
        generation_max_length=8,
        generation_num_beams=cli.num_beams,
        eval_strategy="epoch",
        logging_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
    )
    set_seed(args.seed)
    tokenizer = make_tokenizer()

    def preprocess(examples):
        model_inputs = tokenizer(examples["en"], truncation=True)
        model_inputs["labels"] = tokenizer(text_target=examples["digits"], truncation=True)["input_ids"]
        return model_inputs

    def compute_metrics(eval_preds):
        preds, labels = (np.where(each < 0, tokenizer.pad_token_id, each) for each in eval_preds)
        preds = tokenizer.batch_decode(preds, skip_special_tokens=True)
        labels = tokenizer.batch_decode(labels, skip_special_tokens=True)
        matches = [pred.strip() == label.strip() for pred, label in zip(preds, labels, strict=True)]
        return {"exact": float(np.mean(matches)), "gen_len": float(np.mean([len(pred.split()) for pred in preds]))}

    train_dataset, eval_dataset = [
        pairs(seed, rows).map(preprocess, batched=True, remove_columns=["en", "digits"])
        for seed, rows in ((0, 96), (1, 20))
    ]
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.1,
            decoder_start_token_id=0,
        )
    )
    trainer = Seq2SeqTrainer(
        model,
        args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    trainer.save_model()
    results = trainer.predict(eval_dataset, metric_key_prefix="predict")
    print(results.metrics)
    if trainer.is_world_process_zero():
        print(tokenizer.batch_decode(np.maximum(results.predictions[:3], 0), skip_special_tokens=True))


if __name__ == "__main__":
    main()
