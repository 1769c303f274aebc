"""The bundled model in PyTorch: Qwen3.5 dense text trunk with one MTP layer.

Parameter names are those of the exported checkpoint without the ``language_model.`` prefix. RMSNorm
weights are absolute (start at one), so nothing has to be folded at export. Weights stay fp32; each
linear layer casts them to the dtype of its input, so running in bf16 means feeding bf16 embeddings.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from delta import gated_delta_rule
from torch import Tensor, nn
from torch.nn import functional as fn


@dataclass(frozen=True)
class Shape:
    """Sizes of the network, with the keys of a Qwen3.5 ``text_config``."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 24
    intermediate_size: int = 768
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.25

    def is_full(self, layer: int) -> bool:
        """Say whether a trunk layer is full attention (the others are Gated DeltaNet)."""
        return (layer + 1) % self.full_attention_interval == 0

    def config(self) -> dict[str, Any]:
        """Return the ``text_config`` mapping of the checkpoint's ``config.json``."""
        sizes = asdict(self)
        rope = {
            "rope_type": "default",
            "rope_theta": sizes.pop("rope_theta"),
            "partial_rotary_factor": sizes.pop("partial_rotary_factor"),
        }
        kinds = [self.is_full(index) for index in range(self.num_hidden_layers)]
        return sizes | {
            "model_type": "qwen3_5_text",
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "initializer_range": 0.02,
            "layer_types": ["full_attention" if full else "linear_attention" for full in kinds],
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "rope_parameters": rope,
            "tie_word_embeddings": True,
            "use_cache": True,
        }


class Linear(nn.Module):
    """Bias-free linear map whose weight is cast to the input's dtype."""

    def __init__(self, inputs: int, outputs: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * (scale * inputs**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T``."""
        return fn.linear(x, self.weight.to(x.dtype))


def joined(x: Tensor, *layers: Linear) -> list[Tensor]:
    """Apply several linear maps to one input as a single product."""
    weights = [layer.weight for layer in layers]
    out = fn.linear(x, torch.cat(weights).to(x.dtype))
    return list(out.split([weight.shape[0] for weight in weights], dim=-1))


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32, with an absolute weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class Rotary:
    """Half-split rotary embedding on the first dimensions of each head."""

    def __init__(self, shape: Shape, device: torch.device | str) -> None:
        self.size = int(shape.head_dim * shape.partial_rotary_factor)
        exponents = torch.arange(0, self.size, 2, device=device).float() / self.size
        positions = torch.arange(shape.max_position_embeddings, device=device).float()
        angles = torch.outer(positions, shape.rope_theta**-exponents)
        self.cos, self.sin = angles.cos(), angles.sin()

    def span(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return cosine and sine rows for positions ``start`` to ``stop``."""
        return self.cos[start:stop], self.sin[start:stop]


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate ``[B, T, heads, head_dim]`` by per-position angles ``[T, r/2]``."""
    cos, sin = (part[:, None] for part in angles)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with per-head norms, partial rotary and a sigmoid output gate."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.head_dim = shape.num_attention_heads, shape.head_dim
        self.groups = shape.num_attention_heads // shape.num_key_value_heads
        narrow = shape.num_key_value_heads * shape.head_dim
        wide = shape.num_attention_heads * shape.head_dim
        self.q_proj = Linear(shape.hidden_size, 2 * wide)
        self.k_proj = Linear(shape.hidden_size, narrow)
        self.v_proj = Linear(shape.hidden_size, narrow)
        self.o_proj = Linear(wide, shape.hidden_size, scale=0.2)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def project(
        self, x: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return query ``[B, nh, T, hd]``, key, value ``[B, nkv, T, hd]`` and the flat gate."""
        both, k, v = joined(x, self.q_proj, self.k_proj, self.v_proj)
        q, gate = both.unflatten(-1, (self.heads, -1)).chunk(2, dim=-1)
        k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (k, v))
        q, k = rotate(self.q_norm(q), angles), rotate(self.k_norm(k), angles)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate.flatten(-2)

    def finish(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """Gate ``[B, nh, T, hd]`` and map it back to the hidden size."""
        return self.o_proj(mixed.transpose(1, 2).flatten(-2) * torch.sigmoid(gate))

    def widen(self, x: Tensor) -> Tensor:
        """Repeat key or value heads to the number of query heads."""
        return x.repeat_interleave(self.groups, dim=1)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Attend causally over the whole sequence."""
        q, k, v, gate = self.project(x, angles)
        mixed = fn.scaled_dot_product_attention(q, self.widen(k), self.widen(v), is_causal=True)
        return self.finish(mixed, gate)

    def step(self, x: Tensor, angles: tuple[Tensor, Tensor], state: list[Tensor]) -> Tensor:
        """Attend for one more token; ``state`` holds keys and values and grows by one row."""
        q, k, v, gate = self.project(x, angles)
        state[:] = [torch.cat([*state[:1], k], 2), torch.cat([*state[1:], v], 2)]
        keys, values = (self.widen(part) for part in state)
        return self.finish(fn.scaled_dot_product_attention(q, keys, values), gate)


class DepthwiseConv(nn.Module):
    """Weight holder of the causal depthwise convolution, ``[channels, 1, taps]``."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.rand(channels, 1, taps) * 2 - 1) * taps**-0.5)

    def forward(self, padded: Tensor) -> Tensor:
        """Convolve ``[B, taps - 1 + T, C]`` to ``[B, T, C]`` and apply SiLU, in fp32."""
        taps = self.weight.shape[-1]
        length = padded.shape[1] - taps + 1
        wide = padded.float()
        total = wide[:, :length] * self.weight[:, 0, 0]
        for tap in range(1, taps):
            total = total + wide[:, tap : tap + length] * self.weight[:, 0, tap]
        return fn.silu(total)


class DeltaNet(nn.Module):
    """Gated DeltaNet mixer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.k_dim, self.v_dim = shape.linear_key_head_dim, shape.linear_value_head_dim
        self.heads, self.taps = shape.linear_num_value_heads, shape.linear_conv_kernel_dim
        keys, values = self.k_dim * shape.linear_num_key_heads, self.v_dim * self.heads
        self.sizes = [keys, keys, values]
        self.in_proj_qkv = Linear(shape.hidden_size, sum(self.sizes))
        self.in_proj_z = Linear(shape.hidden_size, values)
        self.in_proj_b = Linear(shape.hidden_size, self.heads)
        self.in_proj_a = Linear(shape.hidden_size, self.heads)
        self.conv1d = DepthwiseConv(sum(self.sizes), self.taps)
        self.norm = RMSNorm(self.v_dim, shape.rms_norm_eps)
        self.out_proj = Linear(values, shape.hidden_size, scale=0.2)
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        steps = torch.exp(torch.empty(self.heads).uniform_(-6.9, -2.3))
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))

    def parts(self, x: Tensor, padded: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        """Return normalised q, k, v, the log decay and beta, all fp32."""
        q, k, v = self.conv1d(padded).split(self.sizes, dim=-1)
        q, k = (part.unflatten(-1, (-1, self.k_dim)) for part in (q, k))
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
        decay = -self.A_log.exp() * fn.softplus(a.float() + self.dt_bias)
        values = v.unflatten(-1, (-1, self.v_dim))
        return q * self.k_dim**-0.5, k, values, decay, torch.sigmoid(b.float())

    def finish(self, mixed: Tensor, z: Tensor) -> Tensor:
        """Norm, gate with ``silu(z)`` and map ``[B, T, H, Dv]`` back to the hidden size."""
        gate = fn.silu(z.float()).unflatten(-1, (-1, self.v_dim))
        return self.out_proj((self.norm(mixed) * gate).flatten(-2).to(z.dtype))

    def project(self, x: Tensor) -> list[Tensor]:
        """Return the pre-convolution rows, z, b and a."""
        return joined(x, self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Mix whole sequences from a zero state; ``angles`` is not used."""
        rows, z, b, a = self.project(x)
        q, k, v, decay, beta = self.parts(x, fn.pad(rows, (0, 0, self.taps - 1, 0)), a, b)
        q, k, v = (part.to(x.dtype) for part in (q, k, v))
        return self.finish(gated_delta_rule(q, k, v, decay, beta), z)

    def step(self, x: Tensor, angles: tuple[Tensor, Tensor], state: list[Tensor]) -> Tensor:
        """Mix one more token; ``state`` holds the convolution window and the recurrent state."""
        rows, z, b, a = self.project(x)
        if not state:
            window = rows.new_zeros(rows.shape[0], self.taps - 1, rows.shape[2])
            blank = torch.zeros(rows.shape[0], self.heads, self.k_dim, self.v_dim)
            state[:] = [window, blank.to(rows.device)]
        padded = torch.cat([state[0], rows], dim=1)
        parts = self.parts(x, padded, a, b)
        q, k, v, decay, beta = (part[:, 0] for part in parts)
        memory = state[1] * decay.exp()[..., None, None]
        error = (v - torch.einsum("bhk,bhkv->bhv", k, memory)) * beta[..., None]
        memory = memory + k[..., None] * error[:, :, None]
        state[:] = [padded[:, 1:], memory]
        return self.finish(torch.einsum("bhk,bhkv->bhv", q, memory)[:, None], z)


class MLP(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size, scale=0.2)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``down(silu(gate(x)) * up(x))``."""
        gate, up = joined(x, self.gate_proj, self.up_proj)
        return self.down_proj(fn.silu(gate) * up)


class Layer(nn.Module):
    """Pre-norm decoder layer around one of the two mixers."""

    def __init__(self, shape: Shape, full: bool) -> None:
        super().__init__()
        self.full = full
        if full:
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = DeltaNet(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def feed(self, x: Tensor) -> Tensor:
        """Add the feed-forward branch."""
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Run the layer over whole sequences."""
        mixer = self.self_attn if self.full else self.linear_attn
        return self.feed(x + mixer(self.input_layernorm(x), angles))

    def step(self, x: Tensor, angles: tuple[Tensor, Tensor], state: list[Tensor]) -> Tensor:
        """Run the layer for one more token, updating ``state`` in place."""
        mixer = self.self_attn if self.full else self.linear_attn
        return self.feed(x + mixer.step(self.input_layernorm(x), angles, state))


class Trunk(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        kinds = [shape.is_full(index) for index in range(shape.num_hidden_layers)]
        self.layers = nn.ModuleList(Layer(shape, full) for full in kinds)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Mtp(nn.Module):
    """The Multi-Token-Prediction layer: embedding first, hidden second, recycled after norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc = Linear(2 * shape.hidden_size, shape.hidden_size)
        self.pre_fc_norm_embedding = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList([Layer(shape, full=True)])
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def enter(
        self, embedded: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Join both inputs; return the residual stream and the attention projections."""
        pair = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(torch.cat(pair, dim=-1))
        layer = self.layers[0]
        return x, *layer.self_attn.project(layer.input_layernorm(x), angles)

    def leave(self, x: Tensor, mixed: Tensor, gate: Tensor) -> Tensor:
        """Finish attention and feed-forward; return the normed output that is also recycled."""
        layer = self.layers[0]
        return self.norm(layer.feed(x + layer.self_attn.finish(mixed, gate)))

    def first(
        self, embedded: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run depth one on every slot; return output, keys and values (heads repeated)."""
        attention = self.layers[0].self_attn
        x, q, k, v, gate = self.enter(embedded, hidden, angles)
        k, v = attention.widen(k), attention.widen(v)
        mixed = fn.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.leave(x, mixed, gate), k, v

    def deeper(
        self,
        embedded: Tensor,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        rows: tuple[Tensor, Tensor],
        chain: list[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run one recycled depth for the chains of all slots at once.

        The chain of slot ``p`` sees the depth-one ``rows`` up to ``p`` and its own recycled rows
        (``chain``, one key and value per slot and depth). Returns the output and the new row.
        """
        attention = self.layers[0].self_attn
        x, q, k, v, gate = self.enter(embedded, hidden, angles)
        own = (attention.widen(k).float(), attention.widen(v).float())
        q = q.float() * attention.head_dim**-0.5
        scores = q @ rows[0].float().transpose(-1, -2)
        count = scores.shape[-1]
        keep = torch.ones(count, count, dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~keep, float("-inf"))
        total = torch.logsumexp(scores, dim=-1, keepdim=True)
        alone = [(q * key).sum(-1, keepdim=True) for key, _ in [*chain, own]]
        for score in alone:
            total = torch.logaddexp(total, score)
        mixed = (scores - total).exp() @ rows[1].float()
        for score, (_, value) in zip(alone, [*chain, own], strict=True):
            mixed = mixed + (score - total).exp() * value
        return self.leave(x, mixed.to(x.dtype), gate), own


class Network(nn.Module):
    """Trunk and MTP layer; the embedding matrix is also the output head of both."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.mtp = Mtp(shape)

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the embedding rows of ``ids`` in the compute dtype."""
        return fn.embedding(ids, self.model.embed_tokens.weight).to(dtype)

    def hidden(self, embedded: Tensor, rotary: Rotary) -> Tensor:
        """Return the trunk's hidden states after the final norm."""
        angles = rotary.span(0, embedded.shape[1])
        x = embedded
        for layer in self.model.layers:
            x = layer(x, angles)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return vocabulary scores in the dtype of ``hidden``."""
        return fn.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype))

    def draft(self, hidden: Tensor, embedded: Tensor, rotary: Rotary, depth: int) -> list[Tensor]:
        """Return the MTP outputs of depths 1 to ``depth`` for slots ``0 .. T - depth - 1``.

        Entry ``k - 1`` at slot ``p`` has read tokens up to ``p + k`` and predicts ``p + k + 1``;
        the trunk's distribution for the same token is at row ``p + k``.
        """
        count = hidden.shape[1] - depth
        state, keys, values = self.mtp.first(
            embedded[:, 1 : 1 + count], hidden[:, :count], rotary.span(0, count)
        )
        outputs, chain = [state], []
        for k in range(2, depth + 1):
            angles = rotary.span(k - 1, k - 1 + count)
            state, row = self.mtp.deeper(
                embedded[:, k : k + count], state, angles, (keys, values), chain
            )
            chain.append(row)
            outputs.append(state)
        return outputs

    def step(
        self, ids: Tensor, rotary: Rotary, position: int, state: list[list[Tensor]], dtype: Any
    ) -> Tensor:
        """Feed one token per sequence; return the next token's scores. ``state`` starts as []."""
        if not state:
            state.extend([] for _ in self.model.layers)
        angles = rotary.span(position, position + 1)
        x = self.embed(ids[:, None], dtype)
        for layer, memory in zip(self.model.layers, state, strict=True):
            x = layer.step(x, angles, memory)
        return self.logits(self.model.norm(x))[:, 0]
