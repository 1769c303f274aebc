"""Build an engine from a checkpoint folder: check, budget, load, gate.

This module imports MLX only inside `load_engine`, because the BLAS must be chosen before that
import, and MLX's streams belong to the thread that first uses them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.blas import Blas, describe_blas, prepare_blas, set_threads, thread_choices
from engine.budget import Budget, Costs, device_working_set, estimate, plan_budget
from engine.config import EngineConfig
from engine.plan import EngineInfo, MtpGate

if TYPE_CHECKING:
    import mlx.core as mx

    from engine.checkpoint import Checkpoint, LoadReport
    from engine.models.qwen3_5 import Qwen35Model
    from engine.runner import MLXEngine
    from engine.widths import Widths

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) while loading."""

_STAGES = ("reading the checkpoint", "loading weights", "reserving memory", "checking the MTP head")

_THREAD_ROUNDS = 8
_THREAD_PRICE = 0.1
"""More than one BLAS thread must save this share of the time."""

STATES_SHARE = 8
"""Intermediate recurrent states of a verify may take 1/8 of the working set; beyond that a commit
replays the block instead of picking a state."""


_SLOW = (
    "deterministic: this BLAS gives a row other bits at other places of a batch, so rows decode "
    "one by one; blas=reference needs no such thing"
)


def load_engine(
    config: EngineConfig,
    progress: Progress | None = None,
    *,
    trace: bool = False,
    scripted: Sequence[float] | None = None,
    inline: bool = False,
) -> MLXEngine:
    """Load `config.model` and return an engine that is ready to run.

    Call it on the thread that will own the engine. Loading and evaluating happen on a thread of the
    engine's own (`engine.executor`), `progress` is called there; with `inline` on the caller's.
    `trace` keeps the logits behind every token (tests). `scripted` overrules acceptance
    (benchmarks; see `engine.scripted`) and skips the gate. Raises CheckpointError, ConfigError or
    BudgetError (all `EngineError`), naming the file, tensor, key or number at fault, before memory
    is taken where that can be known.
    """
    config.validate()
    blas = prepare_blas(config.blas)

    from engine.executor import Executor
    from engine.runner import leave_thread

    load = partial(_load, config, blas, progress, trace=trace, scripted=scripted)
    if inline:
        try:
            return load()
        except BaseException:
            leave_thread()
            raise
    executor = Executor()
    try:
        return executor.call(load).run_on(executor)
    except BaseException:
        executor.stop()
        raise


def _load(
    config: EngineConfig,
    blas: Blas,
    progress: Progress | None,
    *,
    trace: bool,
    scripted: Sequence[float] | None,
) -> MLXEngine:
    def stage(index: int) -> None:
        if progress is not None:
            progress((*_STAGES, "ready")[index], index, len(_STAGES))

    stage(0)
    setup, plan = _prepare(config, blas, trace=trace)
    on_gpu = setup.on_gpu
    _limit_memory(plan.budget)
    stage(1)
    compiled = setup.compile_ahead()
    model, report = setup.load_model()
    stage(2)
    threads = "" if on_gpu else _choose_threads(model)
    if on_gpu:
        model.widths = _choose_widths(model)
    blas_name = setup.blas.name + threads
    info = setup.describe(report, plan, blas=blas_name, widths=model.widths)
    if compiled:
        info = replace(info, notes=(*info.notes, compiled))
    engine = setup.assemble(model, info, plan)
    stage(3)
    if scripted is not None:
        from engine.scripted import ScriptedCycle

        ScriptedCycle.script(engine.cycle, scripted)
    elif setup.mtp and config.mtp_gate == "auto":
        engine = setup.gated(engine, model, plan)
    stage(4)
    return engine


def plan_memory(config: EngineConfig) -> Budget:
    """What an engine of `config` would reserve on this machine, from headers alone: no weight is
    read and no memory is taken. Raises what `load_engine` raises before it does either."""
    config.validate()
    return _prepare(config, prepare_blas(config.blas), trace=False)[1].budget


def _prepare(config: EngineConfig, blas: Blas, *, trace: bool) -> tuple[_Setup, _Plan]:
    """What is to be loaded, and the memory it gets."""
    import mlx.core as mx

    from engine.checkpoint import planned_bytes, read_checkpoint

    on_gpu = mx.default_device().type == mx.gpu
    checkpoint = read_checkpoint(config.model)
    setup = _Setup(
        config=config,
        checkpoint=checkpoint,
        blas=describe_blas(blas, on_gpu=on_gpu),
        on_gpu=on_gpu,
        dtype=_dtype(config, checkpoint, on_gpu=on_gpu),
        dequantize=config.weights == "dequantize" or (config.weights == "auto" and not on_gpu),
        mtp=checkpoint.has_mtp and config.max_depth > 0,
        trace=trace,
    )
    if not setup.mtp:
        for name in [name for name in checkpoint.tensors if name.startswith("mtp.")]:
            del checkpoint.tensors[name]
    planned = planned_bytes(checkpoint, dtype=setup.dtype, dequantize=setup.dequantize)
    return setup, setup.budget(planned)


@dataclass(frozen=True, slots=True)
class _Plan:
    budget: Budget
    costs: Costs
    context: int
    keep_states: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setup:
    """Everything decided before the first weight is read, and the steps that follow from it."""

    config: EngineConfig
    checkpoint: Checkpoint
    blas: Blas
    on_gpu: bool
    dtype: mx.Dtype
    dequantize: bool
    mtp: bool
    trace: bool

    @property
    def exact(self) -> bool:
        """Whether results must not depend on shapes, bit for bit. Only MLX's own BLAS gives that,
        and only to arithmetic that goes token by token."""
        return self.config.blas == "reference" and not self.on_gpu

    @property
    def prefill_chunk(self) -> int:
        """A CPU prefills some 250 tokens a second of even a small model; running streams wait for
        each chunk."""
        return self.config.prefill_chunk or (256 if self.on_gpu else 64)

    @property
    def prefix_memory(self) -> int | None:
        """What a restored prefix skips is computed in other chunks than a row from 0 would: the
        same bits only where results do not depend on shapes."""
        asked = self.config.prefix_memory
        return 0 if asked is None and self.config.deterministic and not self.exact else asked

    def budget(self, weight_bytes: int) -> _Plan:
        """The memory plan, and whether verifies keep intermediate recurrent states."""
        import mlx.core as mx

        config, arch = self.config, self.checkpoint.arch
        context = arch.max_position_embeddings
        if config.context is not None:
            context = min(context, config.context)
        working_set = device_working_set(mx.device_info(), on_gpu=self.on_gpu)
        state = arch.value_dim * arch.linear_key_head_dim * 4 * arch.linear_layers
        states = state * config.max_rows * (config.max_depth + 1)
        # A verify that runs as one block makes no intermediate states (`run_in_blocks`).
        keep_states = self.exact and states <= working_set // STATES_SHARE
        costs = estimate(
            arch,
            weight_bytes=weight_bytes,
            item_bytes=self.dtype.size,
            page_size=config.page_size,
            depth=config.max_depth if self.mtp else 0,
            mtp=self.mtp,
            keep_states=keep_states,
            token_by_token=self.exact,
        )
        budget = plan_budget(
            costs,
            working_set=working_set,
            page_size=config.page_size,
            max_rows=config.max_rows,
            prefill_chunk=self.prefill_chunk,
            context=context,
            kv_memory=config.kv_memory,
            prefix_memory=self.prefix_memory,
            cycle_rows=self._cycle_rows,
        )
        context = min(context, budget.pages * config.page_size)
        return _Plan(budget=budget, costs=costs, context=context, keep_states=keep_states)

    @property
    def _cycle_rows(self) -> int:
        """Rows of the largest cycle where they are more than `max_rows`, else 0."""
        from engine.padding import bucket, padded_rows

        if self.config.deterministic:
            return padded_rows(self.config.max_rows)
        return bucket(self.config.max_rows) if self.on_gpu else 0

    def compile_ahead(self) -> str:
        """Kernels that this model needs on CUDA; a note where they could not be had."""
        import mlx.core as mx

        from engine.compile_ahead import compile_ahead, distinct

        if not (self.on_gpu and mx.cuda.is_available()) or self.dequantize:
            return ""
        packed = {
            module: (self.checkpoint.tensors[f"{module}.weight"], spec)
            for module, spec in self.checkpoint.quantization.items()
            if f"{module}.weight" in self.checkpoint.tensors
        }
        return compile_ahead(distinct(packed, str(self.dtype).removeprefix("mlx.core.")))

    def load_model(self) -> tuple[Qwen35Model, LoadReport]:
        """The model with its weights in place, evaluated."""
        import mlx.core as mx

        from engine.checkpoint import load_weights
        from engine.models.qwen3_5 import Qwen35Model
        from engine.ops import lay_out_for_cpu

        model = Qwen35Model(self.checkpoint.arch, with_mtp=self.mtp)
        report = load_weights(model, self.checkpoint, dtype=self.dtype, dequantize=self.dequantize)
        model.fuse()
        if not self.exact:
            model.run_in_blocks()
        if not self.on_gpu:
            lay_out_for_cpu(model)
        mx.eval(model.parameters())
        return model, report

    def describe(self, report: LoadReport, plan: _Plan, *, blas: str, widths: Widths) -> EngineInfo:
        """The engine's facts as far as they are known before its pools exist."""
        config, checkpoint = self.config, self.checkpoint
        blas_note = (self.blas.note,) if self.blas.note else ()
        widths_note = (str(widths),) if str(widths) else ()
        return EngineInfo(
            model=config.model.name,
            family=checkpoint.family,
            vocab_size=checkpoint.arch.vocab_size,
            context_length=plan.context,
            layers=checkpoint.arch.num_hidden_layers,
            mtp_layers=1 if self.mtp else 0,
            max_depth=config.max_depth if self.mtp else 0,
            mtp_gate=MtpGate.UNMEASURED if self.mtp else MtpGate.NONE,
            max_rows=config.max_rows,
            pages=plan.budget.pages,
            page_size=config.page_size,
            page_bytes=0,
            row_bytes=0,
            weight_bytes=report.weight_bytes,
            parameters=report.parameters,
            dtype=str(self.dtype).removeprefix("mlx.core."),
            quantization=report.quantization,
            device=_device_name(on_gpu=self.on_gpu),
            blas=blas,
            prefill_chunk=self.prefill_chunk,
            boundaries=plan.budget.boundaries,
            notes=(*checkpoint.notes, *report.notes, *blas_note, *widths_note),
        )

    def assemble(self, model: Qwen35Model, info: EngineInfo, plan: _Plan) -> MLXEngine:
        """An engine with fresh page pools over a loaded model."""
        import mlx.core as mx

        from engine.cache import PagePool
        from engine.preflight import Estimator, Preflight
        from engine.runner import MLXEngine

        count = model.attention_layers + (1 if info.max_depth else 0)
        pools = [
            PagePool(
                pages=info.pages,
                page_size=info.page_size,
                heads=model.config.num_key_value_heads,
                head_dim=model.config.head_dim,
                dtype=self.dtype,
            )
            for _ in range(count)
        ]
        mx.eval([array for pool in pools for array in (pool.keys, pool.values)])
        states = sum(s.conv.nbytes + s.memory.nbytes for s in model.zero_states(1))
        hidden = model.config.hidden_size * self.dtype.size if info.max_depth else 0
        info = replace(
            info,
            page_bytes=sum(pool.nbytes for pool in pools) // (info.pages + 1),
            row_bytes=states,
            boundary_bytes=states + hidden if info.boundaries else 0,
        )
        estimator = Estimator(costs=plan.costs, page_size=info.page_size)
        engine = MLXEngine(
            model=model,
            pools=pools[: model.attention_layers],
            mtp_pool=pools[-1] if info.max_depth else None,
            info=info,
            keep_states=plan.keep_states,
            chunked_prefill=not self.exact,
            trace=self.trace,
            deterministic=self.config.deterministic,
            buckets=self.on_gpu,
            preflight=Preflight(
                estimator=estimator,
                limit=plan.budget.working_set,
                in_use=mx.get_active_memory,
                clear=mx.clear_cache,
            ),
            budget=plan.budget,
        )
        if engine.one_by_one and _SLOW not in info.notes:
            return engine.described(replace(info, notes=(*info.notes, _SLOW)))
        return engine

    def gated(self, engine: MLXEngine, model: Qwen35Model, plan: _Plan) -> MLXEngine:
        """The engine as it is when its head agrees with its trunk, else one that never drafts."""
        from engine.gate import validate_mtp_support

        verdict = validate_mtp_support(engine, _start_token(self.checkpoint))
        info = replace(
            engine.info,
            notes=(*engine.info.notes, str(verdict)),
            mtp_gate=MtpGate.PASSED if verdict.passed else MtpGate.FAILED,
            mtp_gate_acceptance=verdict.rate,
        )
        if verdict.passed:
            engine.traces.clear()
            return engine.described(info)
        engine.release()
        return self.assemble(model, replace(info, mtp_layers=0, max_depth=0), plan)


def _limit_memory(budget: Budget) -> None:
    """Tell MLX what the budget says, for the whole process and for good.

    The cache limit holds everywhere: freed buffers beyond it go back to the system at once. The
    memory limit makes allocations beyond it wait for running work, and then fail, on Metal and
    CUDA; MLX's CPU allocator records it and does not enforce it. The wired limit stays as it is.
    """
    import mlx.core as mx

    mx.set_cache_limit(budget.cache_limit)
    mx.set_memory_limit(budget.working_set)


def _dtype(config: EngineConfig, checkpoint: Checkpoint, *, on_gpu: bool) -> mx.Dtype:
    import mlx.core as mx

    if config.dtype == "auto":
        return checkpoint.dtype if on_gpu else mx.float32
    named: dict[str, Any] = {
        "float32": mx.float32,
        "bfloat16": mx.bfloat16,
        "float16": mx.float16,
    }
    chosen: mx.Dtype = named[config.dtype]
    return chosen


def _choose_threads(model: Qwen35Model) -> str:
    """Set the number of BLAS threads that multiplies this model's matrices fastest; says which.

    Small products lose more to waking threads than they gain, and idle threads spin on cores that
    the rest of the service could use: so it is measured, on the matrices of one layer and the head
    at a verify's width.
    """
    import mlx.core as mx

    choices = thread_choices()
    if len(choices) < 2:
        return ""
    x = mx.ones((4, model.config.hidden_size), model.model.norm.weight.dtype)
    best = dict.fromkeys(choices, float("inf"))
    for _ in range(_THREAD_ROUNDS):
        for count in choices:
            set_threads(count)
            mx.eval(model.head(model.model.layers[0].feed_forward(x)[None]))  # wakes the threads
            began = time.perf_counter()
            for _ in range(3):
                mx.eval(model.head(model.model.layers[0].feed_forward(x)[None]))
            best[count] = min(best[count], time.perf_counter() - began)
    # More threads must pay: they take cores from the event loop.
    chosen = min(choices, key=lambda count: best[count] * (1.0 + _THREAD_PRICE * (count > 1)))
    set_threads(chosen)
    return f", {chosen} thread{'s' if chosen > 1 else ''}"


def _choose_widths(model: Qwen35Model) -> Widths:
    """Measure products of one layer's feed-forward matrices, the bulk of a step."""
    from engine.widths import measure_widths

    layer = model.model.layers[0]
    return measure_widths(
        lambda x: [layer.mlp(x)], model.config.hidden_size, model.model.norm.weight.dtype
    )


def _start_token(checkpoint: Checkpoint) -> int:
    """A token that a text may begin with: the model's own beginning or end of text."""
    for source in (checkpoint.text_config, checkpoint.config):
        for key in ("bos_token_id", "eos_token_id"):
            value = source.get(key)
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int) and 0 <= value < checkpoint.arch.vocab_size:
                return value
    return 0


def _device_name(*, on_gpu: bool) -> str:
    import mlx.core as mx

    info = mx.device_info()
    name = info.get("device_name") or info.get("architecture") or "unknown"
    return f"{'gpu' if on_gpu else 'cpu'}: {name}"
