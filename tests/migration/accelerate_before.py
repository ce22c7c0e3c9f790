"""A loop as in the examples of Hugging Face Accelerate, on data that are made here."""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Points(Dataset[tuple[Tensor, int]]):
    """Points around one of three centres."""

    def __init__(self, first: int, rows: int, delay_s: float):
        self.first, self.rows, self.delay_s = first, rows, delay_s

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.delay_s)
        generator = torch.Generator().manual_seed(self.first + index)
        point = torch.randn(12, generator=generator)
        label = index % 3
        point[label] += 2
        return point, label


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--delay_s", type=float, default=0.0, help="time to read a sample")
    parser.add_argument("--output_dir", type=Path, required=True)
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = Points(0, 96, args.delay_s)
    train_dataloader = DataLoader(training, batch_size=4, shuffle=args.shuffle, num_workers=args.num_workers)
    eval_dataloader = DataLoader(Points(96, 17, 0), batch_size=4, num_workers=args.num_workers)
    total = args.epochs * len(train_dataloader) // accelerator.gradient_accumulation_steps
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step + 1, 5) / 5 * (1 - step / total))
    model, optimizer, train_dataloader, eval_dataloader, scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, scheduler
    )

    for epoch in range(args.epochs):
        model.train()
        for points, labels in train_dataloader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(points), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        model.eval()
        predictions = []
        for points, labels in eval_dataloader:
            with torch.no_grad():
                logits = model(points)
            predictions.append(accelerator.gather_for_metrics((logits, labels)))
        logits, labels = (torch.cat(parts) for parts in zip(*predictions, strict=True))
        result = {"epoch": epoch, "accuracy": (logits.argmax(dim=1) == labels).float().mean().item()}
        accelerator.log(result, step=epoch)
        accelerator.print(result)
        if accelerator.is_main_process:
            result |= {"logits": logits.tolist(), "labels": labels.tolist()}
            with (args.output_dir / "results.jsonl").open("a") as file:
                file.write(json.dumps(result) + "\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
