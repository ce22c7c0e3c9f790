"""Tests that the library names the device of its tensors, because a script may set another default device of torch.

The scenarios of test_features.py train with one.
"""

import re
from pathlib import Path

import torch

import undula
from undula.train.micro_batches import pinned


def test_a_batch_that_is_on_a_device_already_is_not_pinned() -> None:
    batch = torch.empty(3, device="meta")
    assert pinned(batch) is batch


FACTORIES = {
    *("empty", "empty_strided", "zeros", "ones", "full", "tensor", "as_tensor", "asarray", "scalar_tensor", "arange"),
    *("rand", "randn", "randint", "randperm", "eye", "linspace", "sparse_coo_tensor"),
}
"""Functions of torch that make a tensor on the default device unless they are told another one."""


def test_the_library_names_the_device_of_each_tensor_that_it_makes() -> None:
    """The checks of studies are left out: they are no part of a run."""
    package = Path(undula.__file__).parent
    # The arguments may have parentheses in parentheses.
    calls = re.compile(rf"\btorch\.({'|'.join(FACTORIES)})(\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))")
    missing = [
        f"{file.relative_to(package)}: {call.group()}"
        for file in package.rglob("*.py")
        if file.relative_to(package).parts[0] != "study"
        for call in calls.finditer(file.read_text())
        if "device=" not in call.group()
    ]
    assert missing == []
