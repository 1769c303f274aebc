"""A loaded model for scripts and notebooks: no server, no scheduler, one call to generate.

    with engine.load_model("path/to/checkpoint") as model:
        result = model.generate([1, 2, 3], max_tokens=50, temperature=0.7, seed=1)
        print(result.tokens, result.acceptance)

Calls come from the thread that loaded the model; the device has a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack, overload

import numpy as np

from engine.config import EngineConfig
from engine.contract import CONTRACTS, MtpContract
from engine.plan import MAX_STOP_IDS, EngineInfo, Finish, RowSpec, SamplingParams, pages_needed
from engine.sampling_limits import SEEDS, violations

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

    from engine.runner import MLXEngine

_TRIALS = 6
"""Cycles in a row at which `depth="auto"` measures one depth; the first of them is not counted."""
_DEEPEST_TRIAL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What one prompt got."""

    tokens: tuple[int, ...]
    finish: Finish | None
    fault: str | None
    cycles: int
    """Decode cycles that emitted something."""
    drafted: tuple[int, ...]
    """[j]: cycles in which draft j + 1 was up for acceptance."""
    accepted: tuple[int, ...]
    """[j]: cycles in which draft j + 1 was accepted."""

    @property
    def acceptance(self) -> float | None:
        """Share of drafts accepted; None without drafts."""
        return sum(self.accepted) / sum(self.drafted) if sum(self.drafted) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundHead:
    """An MTP head as it is bound to its trunk. It borrows what it shares; nothing is copied."""

    contract: MtpContract
    head: Module
    """The head's own part: its norms, `fc` and decoder layer."""
    embedding: Module
    """The trunk's embedding, the very module."""
    lm_head: Module
    """The trunk's LM head, the very module: the embedding where the two are tied."""


class _Options(TypedDict, total=False):
    """What `LoadedModel.generate` may be told besides, for its two signatures."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    depth: int | Literal["auto"]
    stop_ids: Sequence[int]


class LoadedModel:
    """An engine with its own pages, driven directly. Build it with `load_model`."""

    def __init__(self, engine: MLXEngine) -> None:
        self._engine = engine

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back; idempotent."""
        self._engine.close()

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine, notes on what is off and why included."""
        return self._engine.info

    @property
    def mtp(self) -> list[BoundHead]:
        """Heads that draft: one, or none without weights or when the head failed its gate."""
        model = self._engine.model
        if self.info.max_depth == 0:
            return []
        embedding: Module = model.model.embed_tokens
        return [
            BoundHead(
                contract=CONTRACTS[self.info.family],
                head=model.mtp,
                embedding=embedding,
                lm_head=model.lm_head if "lm_head" in model else embedding,
            )
        ]

    @overload
    def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, **options: Unpack[_Options]
    ) -> Generated: ...

    @overload
    def generate(
        self, prompt_ids: Sequence[Sequence[int]], *, max_tokens: int, **options: Unpack[_Options]
    ) -> list[Generated]: ...

    def generate(
        self,
        prompt_ids: Sequence[int] | Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        depth: int | Literal["auto"] = "auto",
        stop_ids: Sequence[int] = (),
    ) -> Generated | list[Generated]:
        """Continue one prompt, or several together; one result per prompt, in order.

        Prompt i draws with the seed `seed` + i. `depth` is the number of drafts per cycle, 0 for
        none; "auto" measures a few depths on the way and goes on with the fastest. Prompts beyond
        what the engine's rows and pages hold at once run in turns.

        Raises ValueError naming the argument for a prompt that is empty, does not fit or has tokens
        outside the vocabulary, and for sampling parameters, depth or stop ids out of range.
        """
        single = len(prompt_ids) > 0 and isinstance(prompt_ids[0], int | np.integer)
        prompts: list[list[int]] = [list(prompt_ids)] if single else [list(p) for p in prompt_ids]  # type: ignore[arg-type]
        for index, prompt in enumerate(prompts):
            self._check_prompt(index, prompt, max_tokens)
        params = SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
        )
        for found in violations(params, vocab_size=self.info.vocab_size):
            raise ValueError(str(found))
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"stop_ids: at most {MAX_STOP_IDS}, not {len(stop_ids)}")
        if depth != "auto" and not 0 <= depth <= self.info.max_depth:
            raise ValueError(f"depth: must be auto or 0…{self.info.max_depth}, not {depth}")
        requests = [
            (
                prompt,
                RowSpec(
                    sampling=replace(params, seed=(seed + index) % SEEDS),
                    max_tokens=max_tokens,
                    stop_ids=tuple(stop_ids),
                ),
            )
            for index, prompt in enumerate(prompts)
        ]
        results = [r for turn in self._turns(requests) for r in self._run(turn, depth)]
        return results[0] if single else results

    def _run(
        self, requests: list[tuple[list[int], RowSpec]], depth: int | Literal["auto"]
    ) -> list[Generated]:
        from engine.solo import generate

        depths = FastestDepth(self.info.max_depth) if depth == "auto" else depth
        chunk = self.info.prefill_chunk
        watch = depths.emitted if isinstance(depths, FastestDepth) else None
        return [
            Generated(
                tokens=tuple(result.tokens),
                finish=result.finish,
                fault=result.fault,
                cycles=result.cycles,
                drafted=tuple(result.drafted),
                accepted=tuple(result.accepted),
            )
            for result in generate(
                self._engine, requests, depth=depths, chunk=chunk, on_cycle=watch
            )
        ]

    def _turns(
        self, requests: list[tuple[list[int], RowSpec]]
    ) -> list[list[tuple[list[int], RowSpec]]]:
        """The requests in groups that fit."""
        turns: list[list[tuple[list[int], RowSpec]]] = []
        used = self.info.pages + 1
        for prompt, spec in requests:
            need = pages_needed(len(prompt) + spec.max_tokens, self.info.page_size)
            if used + need > self.info.pages or len(turns[-1]) == self.info.max_rows:
                turns.append([])
                used = 0
            turns[-1].append((prompt, spec))
            used += need
        return turns

    def _check_prompt(self, index: int, prompt: list[int], max_tokens: int) -> None:
        info, name = self.info, f"prompt_ids[{index}]"
        if not prompt:
            raise ValueError(f"{name}: must not be empty")
        if max_tokens < 1:
            raise ValueError(f"max_tokens: must be >= 1, not {max_tokens}")
        if any(not 0 <= token < info.vocab_size for token in prompt):
            raise ValueError(f"{name}: tokens must be in 0…{info.vocab_size - 1}")
        most = min(info.context_length, info.pages * info.page_size)
        if len(prompt) + max_tokens > most:
            raise ValueError(
                f"{name}: {len(prompt)} tokens and max_tokens {max_tokens} exceed {most}"
            )


class FastestDepth:
    """Depths by cycle: each candidate for a few cycles, then the one with the least time per token.

    A candidate's first cycle is not counted: new shapes compile.
    """

    def __init__(self, max_depth: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._candidates = list(range(min(max_depth, _DEEPEST_TRIAL) + 1))
        self._clock = clock
        self._marks: list[tuple[int, float, int]] = []
        """(depth, time, tokens so far) at the start of every measured cycle."""
        self._tokens = 0
        self._best: int | None = None

    def emitted(self, tokens: int) -> None:
        """A cycle brought this many tokens, all rows together."""
        self._tokens += tokens

    def __call__(self, cycle: int) -> int:
        if self._best is not None:
            return self._best
        trial = min(cycle // _TRIALS, len(self._candidates))
        if trial == len(self._candidates):
            self._marks.append((-1, self._clock(), self._tokens))
            self._best = self._fastest()
            return self._best
        depth = self._candidates[trial]
        self._marks.append((depth, self._clock(), self._tokens))
        return depth

    def _fastest(self) -> int:
        price = dict.fromkeys(self._candidates, float("inf"))
        for depth in self._candidates:
            own = [i for i, mark in enumerate(self._marks) if mark[0] == depth]
            first, after = self._marks[own[1]], self._marks[own[-1] + 1]
            price[depth] = (after[1] - first[1]) / max(1, after[2] - first[2])
        return min(self._candidates, key=price.__getitem__)


def load_model(path: str | Path, *, config: EngineConfig | None = None) -> LoadedModel:
    """Load a checkpoint folder on this thread.

    `config` gives everything but the folder; by default a few rows, for one user. Raises what
    `engine.load.load_engine` raises, all of it `EngineError`.
    """
    from engine.load import load_engine

    folder = Path(path)
    chosen = EngineConfig(model=folder, max_rows=4) if config is None else config
    return LoadedModel(load_engine(replace(chosen, model=folder)))
