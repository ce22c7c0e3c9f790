"""What a step has gathered, and numbers that were read of it, may be used for metrics and not for the loss."""

import copy
import json
import math
import operator
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from undula.adapters.gathered import metrics_of_batch, open_batch, plain, refuse_gathered
from undula.adapters.refusals import explained
from undula.adapters.transformers.library import logged_by_script
from undula.errors import UsageError

Scale = Callable[[Tensor, Tensor], Tensor]
WAYS: dict[str, Scale] = {
    "the tensor": lambda loss, count: loss / count,
    "a number": lambda loss, count: loss / count.item(),
    "a number on the left": lambda loss, count: count.item() * loss,
    "a quotient of numbers": lambda loss, count: loss * (8 / count.item()),
    "a quotient with a float": lambda loss, count: loss * (1.5 / count.item()),
    "a power": lambda loss, count: loss * count.item() ** -0.5,
    "a negated number": lambda loss, count: loss + -count.item(),
    "the largest number": lambda loss, count: loss / max(count.item(), 1),
    "a number of a list": lambda loss, count: loss / count.repeat(2).tolist()[1],
    "a weight without gradient": lambda loss, count: loss * (torch.ones(3) / count.item()).sum(),
    "a new tensor": lambda loss, count: loss * torch.zeros(count.long().item()).sum(),
    "another tensor's": lambda loss, count: loss * (loss.detach() + count),
    "the next integer": lambda loss, count: loss / math.ceil(+count.item()),
    "the total of several": lambda loss, count: loss * sum([count.item(), count.item()]),
    "float()": lambda loss, count: loss * float(count),
    "int()": lambda loss, count: loss * int(count),
    "float() of a number": lambda loss, count: loss / float(count.item()),
    "int() of a number": lambda loss, count: loss / int(count.item()),
    "a remainder": lambda loss, count: loss * (count.item() % 3),
    "numpy()": lambda loss, count: loss / count.cpu().numpy(),
    "an array of NumPy": lambda loss, count: loss / float(np.asarray(count).sum()),
    "a mean of NumPy": lambda loss, count: loss / float(np.mean([count.item(), count.item()])),
    "a root": lambda loss, count: loss / math.sqrt(count.item()),
    "a tensor of it": lambda loss, count: loss / torch.tensor(count.item()),
    "a new tensor of it": lambda loss, count: loss / loss.new_tensor(count.item()),
    "a filled tensor": lambda loss, count: loss / torch.full((1,), count.item()),
    "a comparison of tensors": lambda loss, count: loss * (2 if count > 3 else 1),
    "a comparison of numbers": lambda loss, count: loss * (2 if count.item() > 3 else 1),
    "a condition": lambda loss, count: loss * (2 if count else 1),
    "a condition of a number": lambda loss, count: loss * (2 if count.item() else 1),
    "an equality": lambda loss, count: loss * (2 if torch.equal(count, count) else 1),
    "the number of processes": lambda loss, count: loss / len(count.reshape(1)),
    "the shape": lambda loss, count: loss / count.reshape(1).shape[0],
    "a copy into another tensor": lambda loss, count: loss / torch.zeros(()).copy_(count),
    "an item of another tensor": lambda loss, count: loss / _set(torch.zeros(1), count.item()),
    "the result in another tensor": lambda loss, count: loss / torch.add(count, 1.0, out=torch.zeros(())),
}


def _set(tensor: Tensor, value: float) -> Tensor:
    operator.setitem(tensor, 0, value)
    return tensor


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_depends_on_what_was_gathered_is_refused(way: str, dtype: torch.dtype) -> None:
    count = metrics_of_batch({"count": torch.tensor(4, dtype=dtype)})["count"]
    loss = torch.tensor(3.0, requires_grad=True)
    with pytest.raises(UsageError, match=r"accelerator.gather\(\)"), explained(), open_batch():
        refuse_gathered(WAYS[way](loss, count))


def test_numbers_of_metrics_are_kept_and_shown_in_a_batch_and_are_used_as_numbers_outside_of_it() -> None:
    with open_batch():
        count = metrics_of_batch(torch.tensor([1, 3])).sum().item()
        kept = [count + 1, 2 * count, sum([count, count]) / 2, math.ceil(count / 3), -count, divided(8, count)]
        texts = f"{count:d}", f"{count:.2f}", str(count), f"{metrics_of_batch(torch.tensor(0.5)):.2f}"
        metrics = metrics_of_batch({"count": torch.tensor(4)}) | {"number": count}
        metrics |= {"share": kept[0] / count if count > 0 and metrics["count"] > 0 else 0}
        copies = pickle.loads(pickle.dumps([count, metrics["count"]])), copy.deepcopy([count, metrics["count"]])
    assert kept == plain(kept) == [5, 8, 4, 2, -4, 2]
    assert texts == ("4", "4.00", "4", "0.50")
    assert logged_by_script(metrics) == {"count": 4, "number": 4, "share": 1.25}
    assert [[type(each) for each in of] for of in copies] == [[int, Tensor]] * 2
    assert (list(range(count)), json.dumps(plain([count])), math.sqrt(count)) == ([0, 1, 2, 3], "[4]", 2.0)
    assert (count > 3, count == 4, bool(count), float(np.mean([count, count])), hash(count)) == (True, True, True, 4, 4)
    with torch.no_grad():
        assert torch.mean(torch.ones(2, requires_grad=True) * count).item() == 4
    with pytest.raises(TypeError):
        range(count / 8)


def divided(dividend: float, divisor: float) -> float:
    return dividend / divisor
