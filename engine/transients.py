"""What a pass takes while it runs, from a model's dimensions: upper estimates, in bytes.

MLX allocates ahead of the device: a buffer is there from when its operation is handed over until
those that read it are done, some fifty operations later, which is about one decoder layer. So what
counts is the sum of all arrays that a layer makes between its inputs and outputs, views aside,
without hoping that one takes another's place; layers before and after leave only what is said to
outlive them. The numbers below count those arrays at stock MLX's CPU fallbacks, which are more than
a GPU's fused kernels make; tests/engine/test_transients.py holds them to measured peaks.
"""

from __future__ import annotations

from engine.models.qwen3_5_config import Qwen35Config

HELD = 16
"""Every so many tokens the recurrence, token by token, waits for its reads. MLX else goes through
all updates first, and a prompt's pass holds a memory per token; verifies are shorter and have
nothing to wait for."""
FLOAT = 4
"""Bytes of the float32 that recurrences, norms and rotations work in, whatever activations are."""
SCORE_COPIES = 3
"""Scores, masked scores, weights: what attention without a fused kernel makes."""
MASKS = 2
"""The trunk's and the head's, a byte per score each."""
AHEAD = 12
"""Recurrent states of tokens whose updates are handed over before their reads are done."""
BLOCK_STATES = 3
"""Recurrent states of one layer where they pass from block to block: old, decayed, new."""


def recurrence_token(arch: Qwen35Config, item: int) -> int:
    """Per token of a prefill pass in a recurrent layer; `item` bytes per activation. The
    convolution's arrays meet those of the feed-forward before it; once it is done, its rows and
    results lie beside the delta rule's."""
    if not arch.linear_layers:
        return 0
    heads, channels = arch.linear_num_value_heads, arch.conv_dim
    keys = arch.linear_num_key_heads * arch.linear_key_head_dim
    values, spread = arch.value_dim, heads * arch.linear_key_head_dim
    # The projection, once more where rows of several lengths are gathered into a block, and its
    # rows behind the last ones.
    projected = (3 * channels + 2 * values + 4 * heads) * item
    # Queries and keys with their norm, and repeated for more value heads.
    normed = 6 * keys + (2 * spread if spread != keys else 0)
    # Windows times the taps, sum, silu.
    convolved = ((arch.linear_conv_kernel_dim + 3) * channels + normed) * FLOAT
    # Queries and keys by block and scaled by decay; values, reads, writes; 16 × 16 matrices.
    ruled = (2 * channels + normed + 7 * spread + 10 * values + 8 * 16 * heads) * FLOAT
    mixer = max(convolved + _feed_forward(arch, item), ruled)
    return _frame(arch, item) + projected + mixer


def attention_token(arch: Qwen35Config, item: int) -> int:
    """Per token of a prefill pass in an attention layer, scores aside: q, its gate and norm, k and
    v, rotation, output and gated output; then the feed-forward."""
    queries = arch.num_attention_heads * arch.head_dim
    keys = arch.num_key_value_heads * arch.head_dim
    mixer = (5 * queries + 4 * keys) * item + (7 * queries + 8 * keys) * FLOAT
    return _frame(arch, item) + mixer + _feed_forward(arch, item)


def _frame(arch: Qwen35Config, item: int) -> int:
    """Around a mixer: the residual twice, two norms of two arrays in float32 and their results, the
    outputs of mixer and feed-forward. An MTP pass holds as much before its layer begins: hiddens,
    embedding, two norms, their concatenation."""
    return arch.hidden_size * (6 * item + 6 * max(item, FLOAT))


def _feed_forward(arch: Qwen35Config, item: int) -> int:
    """Gate and up in one, σ(gate), their product."""
    return 4 * arch.intermediate_size * item


def scores(arch: Qwen35Config, item: int) -> int:
    """Per pair of query and key."""
    return arch.num_attention_heads * SCORE_COPIES * max(item, FLOAT) + MASKS


def prefill_row(arch: Qwen35Config, row: int, *, token_by_token: bool) -> int:
    """Per row of a prefill pass: its new states beside the old ones (`row` bytes), and those of the
    layer that runs."""
    states = HELD + AHEAD if token_by_token else BLOCK_STATES
    return row + states * memory(arch)


def verify_row(
    arch: Qwen35Config,
    item: int,
    *,
    row: int,
    depth: int,
    logit_copies: int,
    keep_states: bool,
    token_by_token: bool,
) -> int:
    """Per row of a verify at that depth. What lives to the commit (new states, every layer's trail,
    the drafts' laws) beside the larger of a layer and the choice of tokens."""
    width, layers, logits = depth + 1, arch.linear_layers, arch.vocab_size * FLOAT
    spread = arch.linear_num_value_heads * arch.linear_key_head_dim
    trail = arch.conv_dim * item + (2 * spread + arch.value_dim) * FLOAT
    tail = (arch.linear_conv_kernel_dim - 1) * arch.conv_dim * item
    kept = width * memory(arch) * layers if keep_states and depth else 0
    lives = row + layers * (width * trail + tail) + kept + depth * logits
    states = width + BLOCK_STATES if token_by_token else BLOCK_STATES
    token = max(recurrence_token(arch, item), attention_token(arch, item))
    layer = width * token + states * memory(arch)
    return lives + max(layer, width * logit_copies * logits)


def memory(arch: Qwen35Config) -> int:
    """One layer's recurrent state of one row."""
    return arch.value_dim * arch.linear_key_head_dim * FLOAT
