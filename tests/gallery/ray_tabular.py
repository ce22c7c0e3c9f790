"""Trains on a table as Ray Train's examples do: Ray Data with a preprocessor, reported metrics, a checkpoint of each epoch."""

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import TensorDataset

import undula

FEATURES = ("age", "income", "debt", "visits")


def make_table(rows):
    generator = np.random.default_rng(0)
    table = pd.DataFrame(generator.normal(size=(rows, 4)) * (10, 2e4, 5e3, 3) + (40, 5e4, 1e4, 6), columns=FEATURES)
    table["target"] = (table.income - 3 * table.debt + 800 * (table.age - 40) > 2e4).astype("float32")
    return table


def standardized(table, by):
    inputs = (table[list(FEATURES)] - by[list(FEATURES)].mean()) / by[list(FEATURES)].std(ddof=0)
    return TensorDataset(torch.tensor(inputs.to_numpy("float32")), torch.tensor(table["target"].to_numpy()))


def train(run):
    table = make_table(160)
    train_table = table[:128]
    run.dataset(standardized(train_table, train_table), validation=standardized(table[128:], train_table))
    model = run.model(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)))
    run.optimizer(torch.optim.Adam(model.parameters(), lr=run.base_lr))
    loss_fn = nn.BCEWithLogitsLoss()

    def validate(batch):
        inputs, target = batch
        output = model(inputs).squeeze(1)
        return {"loss": loss_fn(output, target), "accuracy": ((output > 0) == (target > 0.5)).float().mean()}

    for step in run.steps(validate):
        for inputs, target in step.batches():
            step.backward(loss_fn(model(inputs).squeeze(1), target))
        step.update()


if __name__ == "__main__":
    undula.main(train)
