"""Classifies names by their characters as PyTorch's tutorials do: packed sequences of different lengths, clipping, a confusion matrix."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

import undula

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


def evaluate(model, loader):
    model.eval()
    confusion = torch.zeros(len(LANGUAGES), len(LANGUAGES), dtype=torch.long)
    with torch.no_grad():
        for names, lengths, labels in loader:
            for label, guess in zip(labels, model(names, lengths).argmax(dim=1), strict=True):
                confusion[label, guess] += 1
    return confusion


def train(run):
    run.dataset(Names(0, 128), validation=Names(1000, 40), collate_fn=collate)
    torch.manual_seed(2)
    model = run.model(CharRNN())
    run.optimizer(torch.optim.RMSprop(model.parameters(), lr=run.base_lr))
    criterion = nn.NLLLoss()

    def validate(batch):
        names, lengths, labels = batch
        output = model(names, lengths)
        return {"loss": criterion(output, labels), "accuracy": (output.argmax(dim=1) == labels).float().mean()}

    for step in run.steps(validate):
        for names, lengths, labels in step.batches():
            step.backward(criterion(model(names, lengths), labels))
        step.update()
    undula.load_weights(model, run.url, "best")
    confusion = evaluate(model, DataLoader(Names(1000, 40), batch_size=16, collate_fn=collate))
    if run.rank == 0:
        for language, row in zip(LANGUAGES, confusion.tolist(), strict=True):
            print(f"{language:10}", *row)


if __name__ == "__main__":
    undula.main(train)
