"""Trains a recurrent language model of words as PyTorch's example does: the hidden state goes from batch to batch, the rate falls."""

import itertools
import math

import torch
from shapes import TEXT
from torch import nn
from torch.utils.data import Dataset

import undula

BPTT, COLUMNS = 5, 8


class Corpus:
    def __init__(self, text):
        words = text.split()
        self.vocabulary = sorted(set(words))
        ids = torch.tensor([self.vocabulary.index(word) for word in words])
        self.train, self.valid = ids[:520], ids[520:]


class Chunks(Dataset):
    """The batches of the columns, one after another: a sample is a column's number, its words and the words after them."""

    def __init__(self, source):
        self.source = source

    def __len__(self):
        return (len(self.source) - 1) // BPTT * COLUMNS

    def __getitem__(self, index):
        chunk, column = divmod(index, COLUMNS)
        words = self.source[chunk * BPTT : chunk * BPTT + BPTT + 1, column]
        return column, words[:-1], words[1:]


class RNNModel(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(words, 24)
        self.rnn = nn.LSTM(24, 24, 2, dropout=0.2)
        self.decoder = nn.Linear(24, words)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        self.register_buffer("hidden", torch.stack(self.init_hidden(COLUMNS)))

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return self.decoder(self.drop(output)).flatten(0, 1), hidden

    def init_hidden(self, columns):
        return torch.zeros(2, columns, 24), torch.zeros(2, columns, 24)


def batchify(data, columns):
    rows = len(data) // columns
    return data[: rows * columns].view(columns, rows).t().contiguous()


def repackage_hidden(hidden):
    return tuple(each.detach() for each in hidden)


def get_batch(source, start):
    length = min(BPTT, len(source) - 1 - start)
    return source[start : start + length], source[start + 1 : start + 1 + length].reshape(-1)


def evaluate(model, source):
    model.eval()
    criterion, hidden, total = nn.CrossEntropyLoss(), model.init_hidden(COLUMNS), 0.0
    with torch.no_grad():
        for start in range(0, len(source) - 1, BPTT):
            tokens, targets = get_batch(source, start)
            output, hidden = model(tokens, hidden)
            total += len(tokens) * criterion(output, targets).item()
    return total / (len(source) - 1)


def train(run):
    corpus = Corpus(TEXT)
    train_data, val_data = batchify(corpus.train, COLUMNS), batchify(corpus.valid, COLUMNS)
    run.dataset(Chunks(train_data))
    torch.manual_seed(1111)
    model = run.model(RNNModel(len(corpus.vocabulary)))
    optimizer = torch.optim.SGD(model.parameters(), lr=run.base_lr)
    epoch_steps = run.plan.steps_per_epoch
    run.optimizer(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, epoch_steps, gamma=0.9))
    criterion = nn.CrossEntropyLoss()

    def evaluate_epoch(done, means):
        if done % epoch_steps == 0:
            val_loss = evaluate(model, val_data)
            run.validated({"loss": val_loss, "ppl": math.exp(val_loss)}, val_data.numel())
            model.train()

    for step in run.steps(after_step=evaluate_epoch):
        if step.index % epoch_steps == 0:
            model.hidden.zero_()
        carried = []
        for columns, tokens, targets in step.batches():
            output, hidden = model(tokens.t(), tuple(model.hidden[:, :, columns]))
            step.backward(criterion(output, targets.t().flatten()))
            carried.append((columns, torch.stack(repackage_hidden(hidden))))
        step.update()
        for columns, hidden in itertools.chain.from_iterable(run.gather(carried)):
            model.hidden[:, :, columns] = hidden


if __name__ == "__main__":
    undula.main(train)
