"""The gated delta rule in chunk-parallel form, in plain PyTorch.

Per head the rule is ``S <- exp(g) S``, ``S <- S + beta (v - S k) k^T``, ``o = S q``. Within a chunk
the updates collapse into one triangular inverse (the WY form of Yang et al., "Parallelizing Linear
Transformers with the Delta Rule over Sequence Length" and "Gated Delta Networks"); across chunks
the state obeys an affine recurrence that a parallel prefix scan solves. There is no Python loop
over tokens, so ``torch.compile`` sees a short graph.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as fn

BASE = 16


def _small_matmul(x: Tensor, y: Tensor) -> Tensor:
    """Multiply tiny matrices in full fp32, whatever the matmul precision setting says."""
    return (x.unsqueeze(-1) * y.unsqueeze(-3)).sum(-2)


def _diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """Return the ``[..., n, size, size]`` diagonal blocks of a square matrix."""
    count = matrix.shape[-1] // size
    blocks = matrix.unflatten(-1, (count, size)).unflatten(-3, (count, size))
    return torch.diagonal(blocks, dim1=-4, dim2=-2).movedim(-1, -3)


def _invert(strict: Tensor) -> Tensor:
    """Return ``(I + strict)^-1`` for strictly lower triangular matrices of 16 * 2^n rows.

    Blocks of 16 use the finite Neumann product, larger ones the two-by-two block formula.
    """
    negative = -_diagonal_blocks(strict, BASE)
    eye = torch.eye(BASE, device=strict.device, dtype=strict.dtype)
    inverse, power = eye + negative, negative
    for _ in range(3):
        power = _small_matmul(power, power)
        inverse = inverse + _small_matmul(inverse, power)
    size = BASE
    while size < strict.shape[-1]:
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = _diagonal_blocks(strict, 2 * size)[..., size:, :size]
        bottom = torch.cat([-(lower @ corner @ upper), lower], dim=-1)
        inverse = torch.cat([fn.pad(upper, (0, size)), bottom], dim=-2)
        size *= 2
    return inverse.squeeze(-3)


class UnitLowerInverse(torch.autograd.Function):
    """Inverse of ``I + strict`` with the closed-form gradient ``-T^T dT T^T``."""

    @staticmethod
    def forward(ctx: Any, strict: Tensor) -> Tensor:
        """Invert and keep only the result."""
        inverse = _invert(strict)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Return the gradient of the strictly lower part."""
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed).tril(-1)


def _states_before(transition: Tensor, update: Tensor) -> Tensor:
    """Return the state before each chunk for ``S_c+1 = transition_c S_c + update_c``, ``S_0 = 0``.

    Chunks are dimension 2. An inclusive Hillis-Steele scan composes the affine maps.
    """
    chunks, width = transition.shape[2], transition.shape[-1]
    both = torch.cat([transition, update], dim=-1)
    step = 1
    while step < chunks:
        later = both[:, :, step:]
        composed = later[..., :width] @ both[:, :, :-step]
        composed = composed + fn.pad(later[..., width:], (width, 0))
        both = torch.cat([both[:, :, :step], composed], dim=2)
        step *= 2
    ends = both[:, :, :-1, :, width:]
    return fn.pad(ends, (0, 0, 0, 0, 1, 0))


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunk: int = 64
) -> Tensor:
    """Apply the rule to whole sequences from a zero state.

    Shapes: q and k ``[B, T, H, Dk]`` (normalised, q already scaled), v ``[B, T, H, Dv]``; log_decay
    and beta ``[B, T, H]`` in fp32; returns fp32 ``[B, T, H, Dv]``. ``T`` need not divide by
    ``chunk``. Products inside a chunk run in the dtype of ``v``; the inverse and the states stay
    fp32.
    """
    length, dtype = q.shape[1], v.dtype
    pad = -length % chunk
    q, k, v = (fn.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v))
    log_decay, beta = (fn.pad(x, (0, 0, 0, pad)) for x in (log_decay, beta))
    q, k, v = (x.unflatten(1, (-1, chunk)).movedim(3, 1) for x in (q, k, v))
    log_decay, beta = (x.unflatten(1, (-1, chunk)).movedim(3, 1) for x in (log_decay, beta))

    total = log_decay.cumsum(-1)
    keep = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    gaps = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~keep, float("-inf"))
    decay = gaps.exp()
    since_start, gain = total.exp().unsqueeze(-1), beta.unsqueeze(-1)
    similar = (k @ k.transpose(-1, -2)).float()
    inverse = UnitLowerInverse.apply((similar * gain * decay).tril(-1)).to(dtype)
    sources = torch.cat([k * (gain * since_start), v * gain], dim=-1).to(dtype)
    both = inverse @ sources

    width = k.shape[-1]
    to_end = (total[..., -1:] - total).exp().unsqueeze(-1)
    pulled = ((k * to_end).to(dtype).transpose(-1, -2) @ both).float()
    carry = total[..., -1].exp()[..., None, None] * torch.eye(width, device=q.device)
    state = _states_before(carry - pulled[..., :width], pulled[..., width:]).to(dtype)
    values = both[..., width:] - both[..., :width] @ state
    scores = ((q @ k.transpose(-1, -2)).float() * decay).to(dtype)
    out = (q * since_start).to(dtype) @ state + scores @ values
    return out.float().movedim(1, 3).flatten(1, 2)[:, :length]
