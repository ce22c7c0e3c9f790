"""Trains a recurrent language model of words as PyTorch's example does: the hidden state goes from batch to batch, the rate falls."""

import argparse
import math
import time

import torch
from shapes import TEXT
from torch import nn

BPTT, COLUMNS, LR, CLIP = 5, 8, 5.0, 0.25


class Corpus:
    def __init__(self, text):
        words = text.split()
        self.vocabulary = sorted(set(words))
        ids = torch.tensor([self.vocabulary.index(word) for word in words])
        self.train, self.valid = ids[:520], ids[520:]


class RNNModel(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(words, 24)
        self.rnn = nn.LSTM(24, 24, 2, dropout=0.2)
        self.decoder = nn.Linear(24, words)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

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


def train(model, source, optimizer, epoch):
    model.train()
    criterion, hidden, start_time = nn.CrossEntropyLoss(), model.init_hidden(COLUMNS), time.time()
    for batch, start in enumerate(range(0, len(source) - 1, BPTT)):
        tokens, targets = get_batch(source, start)
        optimizer.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(tokens, hidden)
        loss = criterion(output, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if batch % 4 == 0:
            elapsed = (time.time() - start_time) * 1000
            print(f"| epoch {epoch:3d} | {batch:5d} batches | ms {elapsed:5.0f} | ppl {math.exp(loss.item()):8.2f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(1111)
    corpus = Corpus(TEXT)
    model = RNNModel(len(corpus.vocabulary))
    train_data, val_data = batchify(corpus.train, COLUMNS), batchify(corpus.valid, COLUMNS)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    for epoch in range(1, args.epochs + 1):
        train(model, train_data, optimizer, epoch)
        val_loss = evaluate(model, val_data)
        print(f"| end of epoch {epoch:3d} | valid loss {val_loss:5.2f} | valid ppl {math.exp(val_loss):8.2f}")
        scheduler.step()
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
