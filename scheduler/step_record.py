"""What one engine step was, told to whoever measures."""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan import MemoryUse, StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One engine step as it was committed, for metrics. Times in seconds."""

    step: int
    prompt_tokens: int
    rows: int
    """Rows of the decode cohort; 0 when the step only prefilled or released."""
    depth: int
    guided_rows: int
    """Rows of the guided cohort."""
    guided_depth: int
    tokens: int
    """Tokens the device emitted."""
    drafted: int
    accepted: int
    build_s: float
    wait_s: float
    device_s: float
    gap_s: float | None
    """As in `StepResult`: how long the device sat idle before this step."""
    host_s: float
    """Event-loop time between the previous result's arrival and the next plan's departure: what
    the device would have waited for without pipelining. 0 after an idle pause."""
    memory: MemoryUse | None = None
    """As in `StepResult`."""

    @classmethod
    def of(cls, plan: StepPlan, result: StepResult, host_s: float) -> StepRecord:
        return cls(
            step=plan.step,
            prompt_tokens=sum(len(chunk.tokens) for chunk in plan.prefill),
            rows=len(plan.decode.rows) if plan.decode else 0,
            depth=plan.decode.depth if plan.decode else 0,
            guided_rows=len(plan.guided.rows) if plan.guided else 0,
            guided_depth=plan.guided.depth if plan.guided else 0,
            tokens=sum(len(row.tokens) for row in result.rows),
            drafted=sum(row.drafted for row in result.rows),
            accepted=sum(row.accepted for row in result.rows),
            build_s=result.build_s,
            wait_s=result.wait_s,
            device_s=result.device_s,
            gap_s=result.gap_s,
            host_s=host_s,
            memory=result.memory,
        )
