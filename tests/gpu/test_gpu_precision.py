"""Tests of bf16 and fp16 on a GPU: runs resume exactly, the loss scale follows torch's rule, and activations take less memory."""

import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conformance_cases import ALL, write_job
from torch import nn

from undula.parallel.engines.engine import Engine
from undula.parallel.layout import join_layout
from undula.parallel.precision import Autocast
from undula.plan.plan import MicroBatch
from undula.testing.conformance import check
from undula.train.single_process import local_world

STEPS = ("plan.max_steps=4",)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["plain", "BatchNorm", "a branch that some steps use", "tied weights"])
def test_a_run_in_16_bits_resumes_exactly_after_every_step(name: str, compute: str, tmp_path: Path) -> None:
    check(ALL[name], write_job(tmp_path), *STEPS, f"precision.compute={compute}", "deterministic=true")


def test_overflows_are_found_and_gradients_unscaled_without_waiting_for_the_device(device: torch.device) -> None:
    with local_world(device):
        engine = Engine(join_layout(0, 1, device))
        model = engine.place(nn.Linear(4, 1, bias=False))
        engine.compute_in(torch.float16)
        for value, expected in ((2.0**-25, 0), (1e9, 1)):
            engine.begin_step(1)
            engine.before_forward(is_last=True)
            loss = model(torch.ones(1, 4, device=device)).sum() * value
            engine.backward(loss, 2.0**16, MicroBatch(0, 0, 0, 1), is_last=True)
            _, overflows = engine.finish_gradients(1, max_norm=None, loss_scale=2.0**16)
            assert overflows.device == device
            assert overflows.item() == expected
            if not expected:
                assert model.weight.grad.tolist() == [[2.0**-25] * 4]  # type: ignore[union-attr]
            engine.free_gradients()


class Block(nn.Module):
    """Block of a transformer."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 12, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)  # type: ignore[no-any-return]


def _cost(model: nn.Module, x: torch.Tensor) -> tuple[float, int]:
    """Return the seconds of a forward and backward pass, and the bytes that the forward pass keeps."""
    for _ in range(3):
        model(x).float().square().mean().backward()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        model(x).float().square().mean().backward()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / 10
    before = torch.cuda.memory_allocated()
    outputs = model(x)
    kept = torch.cuda.memory_allocated() - before
    del outputs
    return seconds, kept


def test_bf16_is_faster_and_keeps_less(device: torch.device, figures: dict[str, float]) -> None:
    """The blocks are those of a GPT with 124 M parameters. TF32 is off, as it is by default."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("this GPU only emulates bf16")
    assert not torch.backends.cuda.matmul.allow_tf32
    model = nn.Sequential(*(Block(768) for _ in range(12))).to(device)
    x = torch.randn(8, 1024, 768, device=device)
    seconds, kept = _cost(model, x)
    Autocast(model, device, torch.bfloat16)
    seconds_16, kept_16 = _cost(model, x)
    figures.update({"bf16 beside fp32, times as fast": seconds / seconds_16, "bf16, activations": kept_16 / kept})
    assert seconds / seconds_16 >= 1.5
    assert kept_16 <= 0.75 * kept
