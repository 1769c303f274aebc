"""Train trunk and MTP layer together inside a wall-clock budget, then the MTP layer alone.

The trunk learns next-token prediction. The MTP layer is unrolled to depth four exactly as inference
runs it and learns the trunk's own (detached) distribution. Its gradient reaches the trunk's hidden
states only through a small factor, and never the shared embedding. A last phase freezes the trunk
and optimises the overlap of draft and trunk distributions, which is the acceptance rate.

Learning rates follow the clock, not a step count, so any CUDA machine fills the same budget. A run
that stops early (``--stop-after``) leaves a checkpoint, and the same command resumes from it.
"""

import argparse
import json
import lzma
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from muon import Muon
from network import Network, Rotary, Shape
from shards import save_shards
from torch import Tensor
from torch.nn import functional as fn

DEPTH = 4
DEPTH_WEIGHTS = (0.34, 0.26, 0.22, 0.18)
WARM_UP_STEPS = 3
TRUNK_SHARE = 0.1
END_OF_TEXT = 4093


@dataclass
class Settings:
    """Everything that shapes a run; see ``main`` for the meaning of each."""

    data: Path
    checkpoint: Path
    weights: Path
    seconds: float
    head_seconds: float
    stop_after: float
    rows: int
    draft_rows: int
    length: int
    matrix_rate: float
    vector_rate: float
    device: str
    compile: bool
    graph: bool
    seed: int


@dataclass
class Clock:
    """Seconds and steps spent in each phase; part of the checkpoint."""

    trunk: float = 0.0
    head: float = 0.0
    steps: int = 0
    head_steps: int = 0
    tokens: int = 0


class Windows:
    """Endless random batches of ``length + 1`` tokens; half of them start at a document."""

    def __init__(self, tokens: np.ndarray, settings: Settings) -> None:
        self._tokens = torch.from_numpy(tokens.astype(np.int16)).to(settings.device)
        ends = np.flatnonzero(tokens == END_OF_TEXT)
        self._documents = np.concatenate([[0], ends + 1])
        self._length = settings.length

    def batches(self, rows: int, seed: int) -> Iterator[Tensor]:
        """Yield ``[rows, length + 1]`` ids; each pass covers the stream at a fresh offset."""
        rng = np.random.default_rng(seed)
        span = torch.arange(self._length + 1, device=self._tokens.device)
        last = len(self._tokens) - self._length - 1
        while True:
            starts = np.arange(rng.integers(self._length), last, self._length)
            rng.shuffle(starts)
            nearest = np.searchsorted(self._documents, starts, side="right") - 1
            snapped = self._documents[nearest]
            close = (starts - snapped < self._length) & (rng.random(len(starts)) < 0.5)
            starts = np.where(close, snapped, starts)
            for first in range(0, len(starts) - rows + 1, rows):
                chosen = torch.from_numpy(starts[first : first + rows]).to(span.device)
                yield self._tokens[chosen[:, None] + span].long()


def trunk_loss(network: Network, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the mean next-token cross-entropy."""
    scores = network.logits(hidden).float()
    return fn.cross_entropy(scores.flatten(0, 1), targets.flatten())


def overlap_losses(draft: Tensor, trunk: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Return soft cross-entropy and one minus the overlap at temperature 0.8, both means.

    ``draft`` and ``trunk`` are hidden states that predict the same tokens.
    """
    head = head.to(draft.dtype)
    ours = fn.linear(draft, head).float()
    theirs = fn.linear(trunk, head).float()
    soft = -(theirs.softmax(-1) * ours.log_softmax(-1)).sum(-1).mean()
    shared = torch.minimum((ours / 0.8).softmax(-1), (theirs / 0.8).softmax(-1)).sum(-1)
    return soft, 1 - shared.mean()


Step = Callable[[Tensor], tuple[Tensor, Tensor]]


class Trainer:
    """Owns the network, its optimisers and the clock."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.network = Network(Shape()).to(settings.device)
        self.rotary = Rotary(self.network.shape, settings.device)
        self.dtype = torch.bfloat16 if settings.device == "cuda" else torch.float32
        self.depth_weights = torch.tensor(DEPTH_WEIGHTS, device=settings.device)
        self.clock = Clock()
        self.trunk_optimisers = self._optimisers("model.")
        self.head_optimisers = self._optimisers("mtp.")
        self.trunk_loss, self.overlap = trunk_loss, overlap_losses
        if settings.compile:
            self._compile()
        if settings.checkpoint.exists():
            self._restore()

    def _optimisers(self, prefix: str) -> list[torch.optim.Optimizer]:
        """Return Muon for the large matrices under ``prefix`` and AdamW for everything else."""
        named = [(n, p) for n, p in self.network.named_parameters() if n.startswith(prefix)]
        matrices = [p for n, p in named if p.ndim == 2 and min(p.shape) >= 64 and "embed" not in n]
        chosen = {id(p) for p in matrices}
        rest = [p for _, p in named if id(p) not in chosen]
        rate = self.settings.vector_rate
        adam = torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        adam.param_groups[0]["initial"] = rate
        return [Muon(matrices, lr=self.settings.matrix_rate, weight_decay=0.03), adam]

    def _compile(self) -> None:
        """Compile the layers (equal layers share one graph) and the losses."""
        torch.set_float32_matmul_precision("high")
        torch._dynamo.config.recompile_limit = 64
        for layer in self.network.model.layers:
            layer.compile(dynamic=False)
        mtp = self.network.mtp
        mtp.first = torch.compile(mtp.first, dynamic=False)  # type: ignore[method-assign]
        mtp.deeper = torch.compile(mtp.deeper, dynamic=False)  # type: ignore[method-assign]
        self.trunk_loss = torch.compile(trunk_loss, dynamic=False)
        self.overlap = torch.compile(overlap_losses, dynamic=False)

    def _restore(self) -> None:
        """Continue from the checkpoint file."""
        saved = torch.load(self.settings.checkpoint, map_location=self.settings.device)
        self.network.load_state_dict(saved["network"])
        for optimiser, state in zip(self._all(), saved["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.clock = Clock(**saved["clock"])
        print(f"resumed {self.clock}", flush=True)

    def _all(self) -> list[torch.optim.Optimizer]:
        """Return every optimiser in checkpoint order."""
        return [*self.trunk_optimisers, *self.head_optimisers]

    def save(self) -> None:
        """Write the checkpoint and the bf16 weights."""
        state = {
            "network": self.network.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self._all()],
            "clock": vars(self.clock),
        }
        self.settings.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.settings.checkpoint)
        save_shards(dict(self.network.named_parameters()), self.settings.weights)
        shape = self.network.shape.config()
        (self.settings.weights / "shape.json").write_text(json.dumps(shape, indent=2) + "\n")
        (self.settings.weights / "clock.json").write_text(json.dumps(vars(self.clock)) + "\n")

    def draft_losses(self, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return soft cross-entropies and missing overlaps of the four depths for given rows.

        ``hidden`` may carry a gradient; the trunk distribution to match is always detached.
        """
        embedded = self.network.embed(ids, hidden.dtype).detach()
        head = self.network.model.embed_tokens.weight.detach()
        target = hidden.detach()
        scaled = TRUNK_SHARE * hidden + (1 - TRUNK_SHARE) * target
        outputs = self.network.draft(scaled, embedded, self.rotary, DEPTH)
        count = outputs[0].shape[1]
        pairs = [
            self.overlap(output, target[:, k : k + count], head)
            for k, output in enumerate(outputs, start=1)
        ]
        return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])

    def joint_step(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Backpropagate trunk and draft losses; return the trunk loss and the overlaps."""
        ids, targets = batch[:, :-1], batch[:, 1:]
        hidden = self.network.hidden(self.network.embed(ids, self.dtype), self.rotary)
        loss = self.trunk_loss(self.network, hidden, targets)
        part = self.settings.draft_rows
        soft, missing = self.draft_losses(hidden[:part], ids[:part])
        (loss + (soft * self.depth_weights).sum()).backward()
        return loss.detach(), 1 - missing.detach()

    def head_step(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Backpropagate draft losses with a frozen trunk; return mean loss and overlaps."""
        ids = batch[:, :-1]
        with torch.no_grad():
            hidden = self.network.hidden(self.network.embed(ids, self.dtype), self.rotary)
        part = self.settings.draft_rows
        chunks = range(0, ids.shape[0], part)
        total, overlaps = torch.zeros((), device=ids.device), torch.zeros(DEPTH, device=ids.device)
        for first in chunks:
            rows = slice(first, first + part)
            soft, missing = self.draft_losses(hidden[rows], ids[rows])
            loss = ((0.5 * soft + missing) * self.depth_weights).sum() / len(chunks)
            loss.backward()
            total += loss.detach()
            overlaps += (1 - missing.detach()) / len(chunks)
        return total, overlaps

    def update(self, optimisers: list[torch.optim.Optimizer], factor: float) -> None:
        """Apply one optimiser step with all rates scaled by ``factor``."""
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["initial"] * factor
            optimiser.step()


class Replayed:
    """Runs a step eagerly a few times, then records it as one CUDA graph and replays that.

    A step takes a batch, leaves gradients and returns two tensors. Recording saves the launch time
    of some thousand kernels. Gradients live in the graph's memory and are overwritten by each call.
    """

    def __init__(self, step: Step, parameters: list[torch.nn.Parameter], record: bool) -> None:
        self._step, self._parameters, self._record = step, parameters, record
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Tensor | None = None
        self._result: tuple[Tensor, Tensor] | None = None

    def __call__(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the step's result for ``batch``; valid until the next call."""
        self._calls += 1
        if not self._record or self._calls <= WARM_UP_STEPS:
            self._clear()
            return self._step(batch)
        if self._graph is None or self._batch is None or self._result is None:
            self._clear()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self._batch, self._graph = batch.clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._result = self._step(self._batch)
        self._batch.copy_(batch)
        self._graph.replay()
        return self._result

    def _clear(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters:
            parameter.grad = None


def factor_at(progress: float, steps: int) -> float:
    """Return the rate factor: warm-up over 200 steps, flat to 30 %, then linear to 1 %."""
    decay = 1.0 if progress < 0.3 else max(0.01, (1 - progress) / 0.7)
    return min(1.0, (steps + 1) / 200) * decay


class Loop:
    """Runs both phases of a trainer against the wall clock."""

    def __init__(self, trainer: Trainer, windows: Windows) -> None:
        self.trainer, self.settings, self.clock = trainer, trainer.settings, trainer.clock
        self.begun = self.mark = self.saved = time.monotonic()
        self.data = windows.batches(self.settings.rows, self.settings.seed + self.clock.steps)

    def replayed(self, step: Step) -> Replayed:
        """Return ``step``, recorded as a CUDA graph if the settings ask for it."""
        return Replayed(step, list(self.trainer.network.parameters()), self.settings.graph)

    def out_of_time(self) -> bool:
        """Say whether this call should stop."""
        return time.monotonic() - self.begun > self.settings.stop_after

    def lap(self, warm: int) -> float:
        """Return seconds since the last lap; the first steps (compilation) count as nothing."""
        now = time.monotonic()
        spent, self.mark = now - self.mark, now
        return spent if warm > WARM_UP_STEPS else 0.0

    def report(self, label: str, steps: int, loss: Tensor, overlaps: Tensor) -> None:
        """Print one line now and then, and save every two and a half minutes."""
        if steps % 50 == 0 or steps <= 3:
            shown = " ".join(f"{value:.3f}" for value in overlaps.tolist())
            spent = self.clock.trunk if label == "joint" else self.clock.head
            line = f"{label} {steps} {spent:.1f}s {self.clock.tokens / 1e6:.1f}M"
            print(f"{line} loss {loss.item():.4f} overlap {shown}", flush=True)
        if time.monotonic() - self.saved > 150:
            self.trainer.save()
            self.saved = time.monotonic()

    def joint(self) -> None:
        """Train everything until the trunk's budget or this call's time is used."""
        trainer, clock, done = self.trainer, self.clock, 0
        step = self.replayed(trainer.joint_step)
        while clock.trunk < self.settings.seconds and not self.out_of_time():
            batch = next(self.data)
            loss, overlaps = step(batch)
            factor = factor_at(clock.trunk / self.settings.seconds, clock.steps)
            trainer.update(trainer._all(), factor)
            clock.steps += 1
            clock.tokens += batch[:, 1:].numel()
            self.report("joint", clock.steps, loss, overlaps)
            clock.trunk += self.lap(done)
            done += 1

    def head(self) -> None:
        """Train the MTP layer alone until its budget or this call's time is used."""
        trainer, clock, done = self.trainer, self.clock, 0
        self.mark = time.monotonic()
        step = self.replayed(trainer.head_step)
        while clock.head < self.settings.head_seconds and not self.out_of_time():
            loss, overlaps = step(next(self.data))
            progress = clock.head / self.settings.head_seconds
            trainer.update(trainer.head_optimisers, 0.4 * max(0.01, 1 - progress))
            clock.head_steps += 1
            self.report("head", clock.head_steps, loss, overlaps)
            clock.head += self.lap(done)
            done += 1


def read_tokens(path: Path) -> np.ndarray:
    """Return the ids of a ``.bin`` or ``.bin.xz`` token file."""
    raw = path.read_bytes()
    if path.suffix == ".xz":
        raw = lzma.decompress(raw)
    return np.frombuffer(raw, dtype="<u2")


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="token file written by pack.py")
    add("--checkpoint", type=Path, required=True, help="resumable state, read if it exists")
    add("--weights", type=Path, required=True, help="folder for the bf16 weights")
    add("--seconds", type=float, default=900, help="budget of the joint phase")
    add("--head-seconds", type=float, default=90, help="budget of the MTP-only phase")
    add("--stop-after", type=float, default=1e9, help="leave after this many seconds")
    add("--rows", type=int, default=32, help="windows in a batch")
    add("--draft-rows", type=int, default=8, help="windows the MTP layer sees at a time")
    add("--length", type=int, default=2048, help="tokens in a window")
    add("--matrix-rate", type=float, default=0.02, help="Muon learning rate")
    add("--vector-rate", type=float, default=0.002, help="AdamW learning rate")
    add("--device", default="cuda")
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    add("--graph", action=argparse.BooleanOptionalAction, default=True)
    add("--seed", type=int, default=0)
    settings = Settings(**vars(parser.parse_args()))
    trainer = Trainer(settings)
    loop = Loop(trainer, Windows(read_tokens(settings.data), settings))
    loop.joint()
    if trainer.clock.trunk >= settings.seconds:
        loop.head()
    trainer.save()
    print(f"stopped {trainer.clock}", flush=True)


if __name__ == "__main__":
    main()
