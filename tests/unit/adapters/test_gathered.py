"""What a step has gathered, and numbers that were read of it, may be used for metrics and not for the loss."""

import json
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from undula.adapters.gathered import metrics_of_batch, refuse_gathered
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
    "a new tensor": lambda loss, count: loss * torch.zeros(count.item()).sum(),
    "another tensor's": lambda loss, count: loss * (loss.detach() + count),
    "the next integer": lambda loss, count: loss / math.ceil(+count.item()),
    "the total of several": lambda loss, count: loss * sum([count.item(), count.item()]),
    "float()": lambda loss, count: loss * float(count),
    "int()": lambda loss, count: loss * int(count),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_depends_on_what_was_gathered_is_refused(way: str, dtype: torch.dtype) -> None:
    count = metrics_of_batch({"count": torch.tensor(4, dtype=dtype)})["count"]
    loss = torch.tensor(3.0, requires_grad=True)
    with pytest.raises(UsageError, match=r"accelerator.gather\(\)"):
        refuse_gathered(WAYS[way](loss, count))


def test_numbers_of_metrics_are_used_as_numbers() -> None:
    count = metrics_of_batch(torch.tensor([1, 3])).sum().item()
    assert (count + 1, 2 * count, list(range(count))) == (5, 8, [0, 1, 2, 3])
    assert (f"{count:d}", f"{count:.2f}", json.dumps([count]), str(count)) == ("4", "4.00", "[4.0]", "4.0")
    assert logged_by_script({"count": metrics_of_batch(torch.tensor(4)), "number": count}) == {"count": 4, "number": 4}
    assert type(pickle.loads(pickle.dumps(count))) is float
    assert isinstance(metrics_of_batch(torch.tensor(True)).item(), bool)
    with torch.no_grad():
        assert torch.mean(torch.ones(2, requires_grad=True) * count).item() == 4
    with pytest.raises(TypeError, match="is no integer"):
        range(count / 8)
