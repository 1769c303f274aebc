"""Qwen3.5 dense: a hybrid trunk (Gated DeltaNet, every fourth layer full attention) and its MTP.

Equations and tensor names follow the published checkpoints as implemented in transformers
(models/qwen3_5/modeling_qwen3_5.py) and mlx-lm (models/qwen3_5.py); the MTP wiring follows vLLM's
qwen3_5_mtp.py: fc([norm(E) ‖ norm(h)]) with the trunk's hidden after its final norm, one
full-attention decoder layer, a last norm, the trunk's own embedding and head. Norm weights are
held in plain form (the +1 of the files folded in).

Parameter paths equal the canonical tensor names of `engine.checkpoint`. Shapes: B rows, W tokens,
H hidden size. Between mixers a block is a flat [M, H] with M >= B·W: matrix products then see all
its rows at once (as [B, W, H] MLX multiplies packed weights row by row: at 16 rows six times slower
on an H200), and M may be padded to a width this device multiplies faster (`engine.widths`). Rows
past B·W are nobody's and are cut off before every mixer.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm

from engine.blocks import Block
from engine.cache import PagePool, RecurrentState, RecurrentTrail, Window, slot_positions
from engine.models.delta import delta_rule
from engine.models.delta_block import delta_block
from engine.models.delta_chunked import delta_rule_chunked
from engine.models.qwen3_5_config import Qwen35Config
from engine.ops import (
    Rotation,
    causal_conv,
    columns,
    first_rows,
    fuse_linears,
    pad_rows,
    silu,
    unit_scale,
)
from engine.widths import Widths

Settle = Callable[[RecurrentTrail], list[mx.array]]
"""See `Qwen35Model.trunk`."""


class Attention(Module):
    """Grouped-query attention with normed q and k, partial RoPE and a sigmoid output gate."""

    def __init__(self, c: Qwen35Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
        )
        width = self.heads * self.head_dim
        self.q_proj = Linear(c.hidden_size, 2 * width, bias=False)
        self.k_proj = Linear(c.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = Linear(c.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = Linear(width, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps)

    def fuse(self) -> None:
        """Merge the three input projections into one where their formats allow it."""
        fused = fuse_linears([self.q_proj, self.k_proj, self.v_proj])
        if fused is not None:
            self.qkv_proj = fused
            del self.q_proj, self.k_proj, self.v_proj

    def project(self, x: mx.array, block: Block, rotate: Rotation) -> tuple[mx.array, ...]:
        """q [B, nh, W, hd] and k [B, nkv, W, hd] rotated, v [B, W, nkv, hd], gate [B, W, nh·hd]."""
        batch, width = block.batch, block.width
        if "qkv_proj" in self:
            width_q, width_k = 2 * self.heads * self.head_dim, self.kv_heads * self.head_dim
            q, k, v = columns(block.spread(self.qkv_proj(x)), width_q, width_k, width_k)
        else:
            q, k, v = (block.spread(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, gate = mx.split(q.reshape(batch, width, self.heads, 2 * self.head_dim), 2, axis=-1)
        k = k.reshape(batch, width, self.kv_heads, self.head_dim)
        v = v.reshape(batch, width, self.kv_heads, self.head_dim)
        q = rotate(self.q_norm(q).transpose(0, 2, 1, 3))
        k = rotate(self.k_norm(k).transpose(0, 2, 1, 3))
        return q, k, v, gate.reshape(batch, width, -1)

    def attend(
        self,
        q: mx.array,
        keys: mx.array,
        values: mx.array,
        mask: mx.array,
        gate: mx.array,
        block: Block,
        rows: int,
    ) -> mx.array:
        """Attention output [rows, H] of q over keys and values [B, nkv, T, hd]."""
        out = mx.fast.scaled_dot_product_attention(
            q, keys, values, scale=self.head_dim**-0.5, mask=mask
        )
        out = out.transpose(0, 2, 1, 3).reshape(*gate.shape) * mx.sigmoid(gate)
        return self.o_proj(block.flatten(out, rows))

    def __call__(self, x: mx.array, where: Window, pool: PagePool, rotate: Rotation) -> mx.array:
        q, k, v, gate = self.project(x, where.block, rotate)
        pool.write(k.transpose(0, 2, 1, 3), v, where)
        keys, values = pool.read(where)
        return self.attend(q, keys, values, where.mask, gate, where.block, x.shape[0])


class DeltaNet(Module):
    """Gated DeltaNet mixer: short convolution, delta-rule memory, gated norm."""

    def __init__(self, c: Qwen35Config) -> None:
        super().__init__()
        self.k_heads, self.v_heads = c.linear_num_key_heads, c.linear_num_value_heads
        self.k_dim, self.v_dim = c.linear_key_head_dim, c.linear_value_head_dim
        self.taps = c.linear_conv_kernel_dim
        keys, values = self.k_heads * self.k_dim, self.v_heads * self.v_dim
        self.channels = 2 * keys + values
        self.in_proj_qkv = Linear(c.hidden_size, self.channels, bias=False)
        self.in_proj_z = Linear(c.hidden_size, values, bias=False)
        self.in_proj_b = Linear(c.hidden_size, self.v_heads, bias=False)
        self.in_proj_a = Linear(c.hidden_size, self.v_heads, bias=False)
        self.conv1d = DepthwiseWeight(self.channels, self.taps)
        self.A_log = mx.zeros((self.v_heads,), mx.float32)
        self.dt_bias = mx.zeros((self.v_heads,), mx.float32)
        self.norm = RMSNorm(self.v_dim, eps=c.rms_norm_eps)
        self.out_proj = Linear(values, c.hidden_size, bias=False)
        self.blocks = False
        """Run a verify as one block (`engine.models.delta_block`) instead of token by token."""

    def fuse(self) -> None:
        """Merge the input projections where formats allow it, and fold constants of the gates."""
        layers = [self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a]
        fused = fuse_linears(layers)
        if fused is not None:
            self.in_proj = fused
            del self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
        self.prepare()

    def prepare(self) -> None:
        """Constants of the gates and norms in the form the forward pass wants them."""
        # l2 norm of q and k with q's extra Dk^-0.5 (mtp-checkpoints: q ← q/‖q‖ · Dk^-0.5).
        q_scale, k_scale = self.k_dim**-1.0, self.k_dim**-0.5
        scales = [q_scale] * self.k_heads + [k_scale] * self.k_heads
        self._qk_scale = mx.array(scales, mx.float32)[:, None]
        self._decay_rate = -mx.exp(self.A_log.astype(mx.float32))
        self._dt_bias = self.dt_bias.astype(mx.float32)
        self._taps = self.conv1d.weight[..., 0].transpose(1, 0).astype(mx.float32)

    def zero_state(self, batch: int, dtype: mx.Dtype) -> RecurrentState:
        return RecurrentState(
            conv=mx.zeros((batch, self.taps - 1, self.channels), dtype),
            memory=mx.zeros((batch, self.v_heads, self.v_dim, self.k_dim), mx.float32),
        )

    def project(self, x: mx.array, block: Block) -> tuple[mx.array, ...]:
        """u [B, W, C], z [B, W, Hv·Dv], b and a [B, W, Hv]."""
        if "in_proj" in self:
            joined = block.spread(self.in_proj(x))
            values = self.v_heads * self.v_dim
            return tuple(columns(joined, self.channels, values, self.v_heads, self.v_heads))
        layers = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        return tuple(block.spread(f(x)) for f in layers)

    def __call__(
        self, x: mx.array, block: Block, state: RecurrentState, keep: bool, chunked: bool = False
    ) -> tuple[mx.array, RecurrentTrail]:
        """Output [M, H] and what a commit needs; see `Qwen35Model.trunk` for the flags."""
        batch, width = block.batch, block.width
        u, z, b, a = self.project(x, block)
        rows = mx.concatenate([state.conv, u], axis=1)
        y = silu(causal_conv(rows, self._taps, width))
        split = 2 * self.k_heads * self.k_dim
        qk = y[..., :split].reshape(batch, width, 2 * self.k_heads, self.k_dim)
        qk = unit_scale(qk, self._qk_scale)
        v = y[..., split:].reshape(batch, width, self.v_heads, self.v_dim)
        q, k = qk[:, :, : self.k_heads], qk[:, :, self.k_heads :]
        if self.v_heads != self.k_heads:
            repeat = self.v_heads // self.k_heads
            q, k = mx.repeat(q, repeat, axis=2), mx.repeat(k, repeat, axis=2)
        beta = mx.sigmoid(b.astype(mx.float32))
        step = mx.logaddexp(a.astype(mx.float32) + self._dt_bias, mx.array(0.0))
        log_decay = self._decay_rate * step
        if block.ragged is not None:
            alive = block.ragged.alive[..., None]
            log_decay, beta = mx.where(alive, log_decay, 0.0), mx.where(alive, beta, 0.0)
        memories: list[mx.array] = []
        last, writes = None, None
        if chunked:
            out, memory = delta_rule_chunked(q, k, v, log_decay, beta, state.memory)
            last = memory[None]
        elif self.blocks and width > 1:
            out, writes = delta_block(q, k, v, log_decay, beta, state.memory)
        else:
            out, memories = delta_rule(q, k, v, mx.exp(log_decay), beta, state.memory)
            last = memories[-1]
        gated = self.norm(out).astype(x.dtype) * silu(
            z.reshape(batch, width, self.v_heads, self.v_dim).astype(mx.float32)
        ).astype(x.dtype)
        trail = RecurrentTrail(
            before=state,
            rows=rows,
            memories=tuple(memories) if keep else (),
            last=last,
            block=writes,
            inputs=(k, v, log_decay, beta),
        )
        return self.out_proj(block.flatten(gated, x.shape[0])), trail


class DepthwiseWeight(Module):
    """Weight of a depthwise convolution, [C, K, 1] as MLX files hold it."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = mx.zeros((channels, taps, 1))


class SwiGLU(Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.gate_proj = Linear(hidden, width, bias=False)
        self.up_proj = Linear(hidden, width, bias=False)
        self.down_proj = Linear(width, hidden, bias=False)

    def fuse(self) -> None:
        fused = fuse_linears([self.gate_proj, self.up_proj])
        if fused is not None:
            self.gate_up_proj = fused
            del self.gate_proj, self.up_proj

    def __call__(self, x: mx.array) -> mx.array:
        if "gate_up_proj" in self:
            gate, up = columns(self.gate_up_proj(x), self.width, self.width)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(silu(gate) * up)


class DecoderLayer(Module):
    """x ← x + mixer(norm(x)); x ← x + ffn(norm(x))."""

    def __init__(self, c: Qwen35Config, *, full_attention: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        if full_attention:
            self.self_attn = Attention(c)
        else:
            self.linear_attn = DeltaNet(c)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size)

    def fuse(self) -> None:
        (self.self_attn if "self_attn" in self else self.linear_attn).fuse()
        self.mlp.fuse()

    def feed_forward(self, x: mx.array) -> mx.array:
        return x + self.mlp(self.post_attention_layernorm(x))

    def attention(self, x: mx.array, where: Window, pool: PagePool, rotate: Rotation) -> mx.array:
        mixed = self.self_attn(self.input_layernorm(x), where, pool, rotate)
        return self.feed_forward(x + mixed)

    def recurrence(
        self, x: mx.array, block: Block, state: RecurrentState, keep: bool, chunked: bool
    ) -> tuple[mx.array, RecurrentTrail]:
        out, trail = self.linear_attn(self.input_layernorm(x), block, state, keep, chunked)
        return self.feed_forward(x + out), trail


class Trunk(Module):
    """Embedding, decoder layers, final norm."""

    def __init__(self, c: Qwen35Config) -> None:
        super().__init__()
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size)
        self.layers = [
            DecoderLayer(c, full_attention=c.is_full_attention(i))
            for i in range(c.num_hidden_layers)
        ]
        self.norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)


class MtpHead(Module):
    """The MTP layer. It owns no embedding and no LM head: it borrows the trunk's."""

    def __init__(self, c: Qwen35Config) -> None:
        super().__init__()
        self.fc = Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.pre_fc_norm_embedding = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.layers = [DecoderLayer(c, full_attention=True)]
        self.norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def combine(self, embedding: mx.array, hidden: mx.array) -> mx.array:
        """fc([norm(E) ‖ norm(h)]), embedding first."""
        parts = [self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)]
        return self.fc(mx.concatenate(parts, axis=-1))


class Qwen35Model(Module):
    """Trunk, head and MTP behind the calls every family offers."""

    def __init__(self, config: Qwen35Config, *, with_mtp: bool) -> None:
        super().__init__()
        self.config = config
        self.widths = Widths()
        self.model = Trunk(config)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if with_mtp:
            self.mtp = MtpHead(config)

    @property
    def has_mtp(self) -> bool:
        return "mtp" in self

    @property
    def attention_layers(self) -> int:
        return sum("self_attn" in layer for layer in self.model.layers)

    def fuse(self) -> None:
        """Call once after loading: merges projections and prepares constants."""
        for layer in self.model.layers + (self.mtp.layers if self.has_mtp else []):
            layer.fuse()

    def run_in_blocks(self) -> None:
        """From now on verifies run recurrences as one block each: fewer operations and no
        intermediate states, equal up to rounding only."""
        for layer in self.model.layers:
            if "linear_attn" in layer:
                layer.linear_attn.blocks = True

    def zero_states(self, batch: int) -> list[RecurrentState]:
        """Fresh recurrent rows, one entry per Gated-DeltaNet layer."""
        dtype = self.model.norm.weight.dtype
        linear = [layer.linear_attn for layer in self.model.layers if "linear_attn" in layer]
        return [mixer.zero_state(batch, dtype) for mixer in linear]

    def _rotation(self, start: mx.array, width: int) -> Rotation:
        dims, base = self.config.rotary_dims, self.config.rope_theta
        return Rotation(start=start, width=width, dims=dims, base=base)

    def embed(self, tokens: mx.array) -> mx.array:
        """Embeddings [M, H] of all tokens [B, W], padded to a good width."""
        flat = tokens.reshape(-1)
        embedding: mx.array = self.model.embed_tokens(pad_rows(flat, self.widths.padded(flat.size)))
        return embedding

    @staticmethod
    def _unflatten(x: mx.array, batch: int, width: int) -> mx.array:
        """[M, H] → [B, W, H]."""
        return first_rows(x, batch * width).reshape(batch, width, -1)

    def trunk(
        self,
        tokens: mx.array,
        where: Window,
        pools: list[PagePool],
        states: list[RecurrentState],
        *,
        keep: bool = False,
        chunked: bool = False,
        settle: Settle | None = None,
    ) -> tuple[mx.array, list[RecurrentTrail]]:
        """Hidden states after the final norm, [B, W, H], of tokens [B, W].

        Where the window's block is ragged, tokens are [1, N], flat, and so are the hidden states.
        Writes keys and values at the window's positions. `keep` asks for every intermediate
        recurrent state, so that a commit can pick one. `chunked` runs the recurrence in blocks:
        faster for many tokens, equal up to rounding only, and without intermediate states.

        `settle` is called with each recurrent layer's trail, and the next layer waits for the
        arrays it returns. MLX else computes what a pass leaves behind when it comes to it, and all
        layers' trails are held until then: for many tokens, the larger part of the pass's memory.
        """
        x = self.embed(tokens)
        rotate = self._rotation(where.start, where.width)
        attention, recurrent = iter(pools), iter(states)
        trails: list[RecurrentTrail] = []
        for layer in self.model.layers:
            if "self_attn" in layer:
                x = layer.attention(x, where, next(attention), rotate)
            else:
                x, trail = layer.recurrence(x, where.block, next(recurrent), keep, chunked)
                trails.append(trail)
                if settle is not None:
                    x = mx.depends([x], settle(trail))[0]
        return self._unflatten(self.model.norm(x), *tokens.shape), trails

    def head(self, hidden: mx.array) -> mx.array:
        """Logits [B, W, V] in float32, of hidden states [B, W, H]."""
        tied = "lm_head" not in self
        project = self.model.embed_tokens.as_linear if tied else self.lm_head
        batch, width, _ = hidden.shape
        rows = hidden.reshape(batch * width, -1)
        logits = project(pad_rows(rows, self.widths.padded(rows.shape[0])))
        return self._unflatten(logits, batch, width).astype(mx.float32)

    def mtp_exact(
        self, hidden: mx.array, tokens: mx.array, where: Window, pool: PagePool
    ) -> mx.array:
        """First MTP pass: slots from true trunk hiddens [B, W, H] and next tokens [B, W].

        `where` is a `slot_window`. Writes the slots' keys and values; returns the MTP's output
        [B, W, H]. Flat, [1, N, …], where its block is ragged.
        """
        x = self._combined(hidden, tokens)
        rotate = self._rotation(where.start, where.width)
        out: mx.array = self.mtp.norm(self.mtp.layers[0].attention(x, where, pool, rotate))
        return self._unflatten(out, *tokens.shape)

    def _combined(self, hidden: mx.array, tokens: mx.array) -> mx.array:
        """The MTP layer's input [M, H]."""
        embedding = self.embed(tokens)
        flat = hidden.reshape(-1, hidden.shape[-1])
        return self.mtp.combine(embedding, pad_rows(flat, embedding.shape[0]))

    def mtp_draft(
        self,
        hidden: mx.array,
        tokens: mx.array,
        past: DraftPast,
    ) -> mx.array:
        """One recursive MTP pass on the head's own output: hidden [B, 1, H], tokens [B, 1].

        Its slot is provisional, so it goes to `past` and never to a page.
        """
        layer = self.mtp.layers[0]
        x = self._combined(hidden, tokens)
        normed = layer.input_layernorm(x)
        rotate = self._rotation(past.position, 1)
        block = Block(tokens.shape[0], 1)
        q, k, v, gate = layer.self_attn.project(normed, block, rotate)
        keys, values, mask = past.extend(k, v.transpose(0, 2, 1, 3))
        mixed = layer.self_attn.attend(q, keys, values, mask, gate, block, x.shape[0])
        out: mx.array = self.mtp.norm(layer.feed_forward(x + mixed))
        return self._unflatten(out, *tokens.shape)


class DraftPast:
    """Keys and values a recursive draft sees: the row's exact slots, then this cycle's own.

    `slots` [B] is how many exact slots each row has, at positions 1 … slots of its pages; drafted
    slot i has the rotary position slots + i.
    """

    def __init__(self, pool: PagePool, table: mx.array, slots: mx.array) -> None:
        columns = table[:, :-1]
        self.keys = PagePool.gather(pool.keys, columns)
        self.values = PagePool.gather(pool.values, columns)
        positions = slot_positions(self.keys.shape[2])
        self.mask = (positions[None, :] <= slots[:, None])[:, None, None, :]
        self.position = slots

    def extend(self, key: mx.array, value: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Add one slot, [B, nkv, 1, hd] each; returns all keys, values and the mask."""
        self.keys = mx.concatenate([self.keys, key], axis=2)
        self.values = mx.concatenate([self.values, value], axis=2)
        visible = mx.ones((*self.mask.shape[:3], 1), mx.bool_)
        self.mask = mx.concatenate([self.mask, visible], axis=3)
        self.position = self.position + 1
        return self.keys, self.values, self.mask
