"""Measure held-out loss and draft acceptance of trained weights, in PyTorch.

``python evaluate.py --weights W --data WORK/heldout.bin --bytes-per-token R --to metrics.json``.
Acceptance is measured on held-out text as it stands and on the model's own continuations of it, at
temperature 0 (draft and trunk agree on the most probable token) and 0.8 (sum of ``min(p, q)``). On
own continuations, depth ``k`` is conditional on depths ``1 .. k-1`` having been accepted.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from network import Network, Rotary, Shape
from shards import load_shards
from torch import Tensor
from torch.nn import functional as fn
from train import DEPTH, END_OF_TEXT, read_tokens

PROMPT, CONTINUATION, CHAINS = 128, 256, 256


class Judge:
    """Holds the network and the compute settings of one evaluation."""

    def __init__(self, weights: Path, device: str, dtype: torch.dtype) -> None:
        self.network = Network(Shape())
        self.network.load_state_dict(load_shards(weights))
        self.network.to(device).eval()
        self.rotary = Rotary(self.network.shape, device)
        self.device, self.dtype = device, dtype

    def states(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and trunk hidden states of a batch."""
        embedded = self.network.embed(ids, self.dtype)
        return embedded, self.network.hidden(embedded, self.rotary)

    @torch.no_grad()
    def loss(self, ids: Tensor, rows: int) -> float:
        """Return mean nats per token over ``[n, T + 1]`` windows."""
        total = 0.0
        for batch in ids.split(rows):
            _, hidden = self.states(batch[:, :-1])
            scores = self.network.logits(hidden).float().flatten(0, 1)
            total += fn.cross_entropy(scores, batch[:, 1:].flatten(), reduction="sum").item()
        return total / ids[:, 1:].numel()

    @torch.no_grad()
    def continuations(self, prompts: Tensor, temperature: float) -> Tensor:
        """Return prompts followed by tokens the trunk picked itself (argmax at temperature 0)."""
        generator = torch.Generator(self.device).manual_seed(1)
        ids, state = prompts, list[list[Tensor]]()
        for position in range(prompts.shape[1] + CONTINUATION - 1):
            scores = self.network.step(ids[:, position], self.rotary, position, state, self.dtype)
            if position < prompts.shape[1] - 1:
                continue
            if temperature == 0:
                chosen = scores.argmax(-1, keepdim=True)
            else:
                odds = (scores.float() / temperature).softmax(-1)
                chosen = torch.multinomial(odds, 1, generator=generator)
            ids = torch.cat([ids, chosen], dim=1)
        return ids

    @torch.no_grad()
    def acceptance(self, ids: Tensor, temperature: float, first: int, own: bool) -> list[float]:
        """Return the acceptance of depths 1 to 4 on slots from ``first`` on.

        With ``own`` the rates are conditional: a chain counts at depth ``k`` with the probability
        that its tokens up to there were drafted and accepted.
        """
        hits, weights = torch.zeros(DEPTH), torch.zeros(DEPTH)
        for batch in ids.split(8):
            embedded, hidden = self.states(batch)
            outputs = self.network.draft(hidden, embedded, self.rotary, DEPTH)
            count = outputs[0].shape[1]
            alive = torch.ones(batch.shape[0], count - first, device=ids.device)
            for k, output in enumerate(outputs, start=1):
                ours = self.network.logits(output[:, first:])
                theirs = self.network.logits(hidden[:, k + first : k + count])
                taken = batch[:, k + 1 + first : k + 1 + count]
                alive, ours, theirs = (x[:, : taken.shape[1]] for x in (alive, ours, theirs))
                rate, kept = compare(ours.float(), theirs.float(), taken, temperature)
                hits[k - 1] += (alive * rate).sum().cpu()
                weights[k - 1] += alive.sum().cpu()
                alive = alive * kept if own else alive
        return [round(value, 4) for value in (hits / weights).tolist()]

    @torch.no_grad()
    def sample(self, prompt: list[int], tokens: int) -> list[int]:
        """Return a greedy continuation of one prompt, stopping at end of text."""
        ids, state = list(prompt), list[list[Tensor]]()
        for position in range(len(prompt) + tokens - 1):
            row = torch.tensor([ids[position]], device=self.device)
            scores = self.network.step(row, self.rotary, position, state, self.dtype)
            if position >= len(prompt) - 1:
                ids.append(int(scores.argmax()))
                if ids[-1] >= END_OF_TEXT:
                    break
        return ids


def compare(
    ours: Tensor, theirs: Tensor, taken: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return per slot the acceptance and the chance that ``taken`` was drafted and accepted."""
    if temperature == 0:
        best = ours.argmax(-1)
        return (best == theirs.argmax(-1)).float(), (best == taken).float()
    p, q = (theirs / temperature).softmax(-1), (ours / temperature).softmax(-1)
    chosen = [x.gather(-1, taken[..., None])[..., 0] for x in (q, p)]
    return torch.minimum(p, q).sum(-1), (chosen[0] / chosen[1].clamp_min(1e-9)).clamp_max(1)


def measure(judge: Judge, stream: Tensor, bytes_per_token: float) -> dict[str, Any]:
    """Return every figure the model card reports."""
    length = judge.network.shape.max_position_embeddings
    count = (len(stream) - 1) // length
    starts = torch.arange(count, device=stream.device)[:, None] * length
    windows = stream[starts + torch.arange(length + 1, device=stream.device)]
    nats = judge.loss(windows, 8)
    figures: dict[str, Any] = {
        "heldout_tokens": windows[:, 1:].numel(),
        "nats_per_token": round(nats, 4),
        "bits_per_byte": round(nats / 0.6931471805599453 / bytes_per_token, 4),
        "first_16_windows_nats_per_token": round(judge.loss(windows[:16], 8), 4),
    }
    spread = windows[torch.linspace(0, count - 1, CHAINS).long(), :PROMPT]
    for temperature in (0.0, 0.8):
        text = judge.acceptance(windows[:64, :-1], temperature, 0, own=False)
        written = judge.continuations(spread, temperature)
        own = judge.acceptance(written, temperature, PROMPT, own=True)
        figures[f"acceptance_t{temperature:g}"] = {"heldout_text": text, "own_text": own}
    return figures


def main() -> None:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="heldout.bin written by pack.py")
    parser.add_argument("--bytes-per-token", type=float, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    begun = time.monotonic()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    judge = Judge(options.weights, options.device, dtype)
    stream = torch.from_numpy(read_tokens(options.data).astype("int64")).to(options.device)
    figures = measure(judge, stream, options.bytes_per_token)
    figures["seconds"] = round(time.monotonic() - begun, 1)
    options.to.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=2), flush=True)


if __name__ == "__main__":
    main()
