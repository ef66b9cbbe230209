"""gpipe-bench table=2 with layers that compute: the same work for all contenders."""

from __future__ import annotations

import torch
from torch import nn

from gpipe_cli.bench.peers import Stage


def test_a_peer_s_recompute_draws_the_same_noise_again() -> None:
    def gradient(remat: bool) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.ones(100, requires_grad=True)
        outputs = Stage([nn.Dropout(0.5), nn.Tanh()], remat, noise=True)(x)
        assert isinstance(outputs, torch.Tensor)
        torch.rand(10)  # as another micro-batch would
        outputs.sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(remat=True), gradient(remat=False))


def test_a_peer_s_stage_hands_on_contiguous_tensors_and_gradients() -> None:
    """torch's pipelining sends no others; a layer that transposes has neither."""
    x = torch.ones(4, 3, requires_grad=True)
    outputs = Stage([nn.Identity(), Transposed()], remat=False)(x)
    assert isinstance(outputs, tuple) and all(y.is_contiguous() for y in outputs)
    assert torch.autograd.grad(outputs[1].mean(), x)[0].is_contiguous()


class Transposed(nn.Module):
    """Its input, and that transposed."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x.T
