"""Classifies names by their characters as PyTorch's tutorials do: packed sequences of different lengths, clipping, a confusion matrix."""

import argparse
import math
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

SYLLABLES = {
    "Italian": ("ro", "bel", "li", "ni", "fa", "co", "gia"),
    "Dutch": ("van", "der", "kuy", "pers", "dijk", "ooy", "el"),
    "Japanese": ("ya", "ma", "to", "ki", "shi", "ha", "ra"),
    "Polish": ("kow", "wisz", "cz", "ski", "no", "ja", "ko"),
}
LANGUAGES = list(SYLLABLES)
LETTERS = " " + "".join(sorted({letter for parts in SYLLABLES.values() for part in parts for letter in part}))


class Names(Dataset):
    def __init__(self, first, rows):
        self.first, self.rows = first, rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.first + index)
        label = index % len(LANGUAGES)
        count = int(torch.randint(2, 5, (), generator=generator))
        parts = [SYLLABLES[LANGUAGES[label]][i] for i in torch.randint(7, (count,), generator=generator)]
        return torch.tensor([LETTERS.index(letter) for letter in "".join(parts)]), label


def collate(rows):
    names, labels = zip(*rows, strict=True)
    lengths = torch.tensor([len(name) for name in names])
    return pad_sequence(names, batch_first=True), lengths, torch.tensor(labels)


class CharRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), 12, padding_idx=0)
        self.rnn = nn.GRU(12, 24, batch_first=True, bidirectional=True)
        self.out = nn.Linear(48, len(LANGUAGES))

    def forward(self, names, lengths):
        packed = pack_padded_sequence(self.embed(names), lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, hidden = self.rnn(packed)
        return F.log_softmax(self.out(torch.cat((hidden[0], hidden[1]), dim=1)), dim=1)


def time_since(start):
    seconds = time.time() - start
    return f"{math.floor(seconds / 60)}m {seconds % 60:.0f}s"


def evaluate(model, loader):
    model.eval()
    confusion = torch.zeros(len(LANGUAGES), len(LANGUAGES), dtype=torch.long)
    with torch.no_grad():
        for names, lengths, labels in loader:
            for label, guess in zip(labels, model(names, lengths).argmax(dim=1), strict=True):
                confusion[label, guess] += 1
    return confusion


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(2)
    train_loader = DataLoader(Names(0, 128), batch_size=16, shuffle=True, collate_fn=collate)
    val_loader = DataLoader(Names(1000, 40), batch_size=16, collate_fn=collate)
    model = CharRNN()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
    criterion = nn.NLLLoss()
    best, all_losses, start = 0.0, [], time.time()
    for epoch in range(1, args.epochs + 1):
        model.train()
        losses = []
        for names, lengths, labels in train_loader:
            model.zero_grad()
            loss = criterion(model(names, lengths), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        all_losses.append(sum(losses) / len(losses))
        confusion = evaluate(model, val_loader)
        accuracy = confusion.trace().item() / confusion.sum().item()
        print(f"{epoch} ({time_since(start)}): loss {all_losses[-1]:.4f}, accuracy {accuracy:.3f}")
        if accuracy > best:
            best = accuracy
            torch.save(model.state_dict(), "names.pt")
    model.load_state_dict(torch.load("names.pt", weights_only=True))
    for language, row in zip(LANGUAGES, evaluate(model, val_loader).tolist(), strict=True):
        print(f"{language:10}", *row)


if __name__ == "__main__":
    main()
