"""Muon: momentum SGD whose matrix updates are orthogonalised (Jordan et al., 2024)."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, rounds: int = 5) -> Tensor:
    """Push the singular values of a ``[n, rows, cols]`` stack towards one (Newton-Schulz)."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.transpose(-1, -2) if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if tall else x


class Muon(Optimizer):
    """Updates matrices of equal shape as one stack; weight decay is decoupled."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "initial": lr}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply one update; parameters without a gradient are left alone."""
        for group in self.param_groups:
            stacks: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    stacks[param.shape].append(param)
            for params in stacks.values():
                self._update(params, group)

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Update parameters that share one shape."""
        grads = [param.grad for param in params if param.grad is not None]
        buffers = [self._buffer(param) for param in params]
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        ahead = torch._foreach_lerp(grads, buffers, group["momentum"])
        rows, cols = params[0].shape
        scale = max(1.0, rows / cols) ** 0.5 * group["lr"]
        updates = orthogonalise(torch.stack(list(ahead))).float().unbind()
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, list(updates), alpha=-scale)

    def _buffer(self, param: Tensor) -> Tensor:
        """Return the momentum buffer of a parameter, creating it on first use."""
        state = self.state[param]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(param)
        momentum: Tensor = state["momentum"]
        return momentum
