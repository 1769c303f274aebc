"""How busy the engine is, in the gateway's terms. All numbers are those of one `Statistics`."""

from __future__ import annotations

from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import common_pb2 as common

from engine.plan import EngineInfo
from scheduler.statistics import Statistics
from service.loads import acceptance, hit_rate, kv_usage


def scheduler_load(now: Statistics, info: EngineInfo) -> vllm.SchedulerLoad:
    """For `GetLoads`."""
    return vllm.SchedulerLoad(
        num_running_reqs=now.running,
        num_waiting_reqs=now.queued_requests,
        num_total_reqs=now.running + now.queued_requests,
        num_used_tokens=used_tokens(now, info),
        max_total_num_tokens=now.pages_total * info.page_size,
        token_usage=kv_usage(now),
        gen_throughput=now.tokens_per_second,
        cache_hit_rate=hit_rate(now),
        utilization=now.running / now.max_rows,
        max_running_requests=now.max_rows,
        num_waiting_uncached_tokens=now.queued_tokens,
    )


def used_tokens(now: Statistics, info: EngineInfo) -> int:
    """Room in pages that running requests hold."""
    return (now.pages_used - now.pages_cached) * info.page_size


class LoadRecords:
    """The records of one subscriber, numbered."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._sample = 0
        self._steps = -1
        self._busy = False
        self._quiet_since = 0.0
        self._silence_s: float | None = None

    def observe(self, now: Statistics) -> None:
        """Look whether the engine has stepped. Once before each `record`, as often as one likes."""
        busy = bool(now.running or now.queued_requests)
        if now.steps != self._steps or not (busy and self._busy):
            self._quiet_since = now.at
        self._steps, self._busy = now.steps, busy
        self._silence_s = now.at - self._quiet_since if busy else None

    def record(self, now: Statistics, *, load_only: bool, telemetry: bool) -> common.EngineLoad:
        """The next record; `telemetry` adds what no routing decision reads.

        The silence is that between two steps: a prompt is prefilled in chunks, each of them a step,
        so a long prefill is not silent.
        """
        self._sample += 1
        usage = kv_usage(now)
        load = common.EngineLoad(
            running_requests=now.running,
            waiting_requests=now.queued_requests,
            waiting_uncached_tokens=now.queued_tokens,
            token_usage=usage,
            active_token_usage=usage,
            gen_throughput=now.tokens_per_second,
            max_running_requests=now.max_rows,
            sample=self._sample,
            load_only=load_only,
            engine_reports_steps=True,
            prefill_pending_tokens=now.queued_tokens + now.prefilling_tokens,
        )
        if self._silence_s is not None:
            load.engine_silence_ms = round(self._silence_s * 1000)
        if telemetry:
            self._add_telemetry(load, now)
        return load

    def _add_telemetry(self, load: common.EngineLoad, now: Statistics) -> None:
        load.cache_hit_rate = hit_rate(now)
        load.num_used_tokens = used_tokens(now, self._info)
        load.max_total_num_tokens = now.pages_total * self._info.page_size
        load.memory.weight_gb = self._info.weight_bytes / 1e9
        load.memory.kv_cache_gb = self._info.pages * self._info.page_bytes / 1e9
        load.memory.token_capacity = load.max_total_num_tokens
        load.queues.waiting = now.queued_requests
        load.queues.grammar = now.guided_rows
        load.queues.paused = now.paused
        if now.row_cycles:
            load.speculative.accept_length = 1 + now.accepted / now.row_cycles
        load.speculative.accept_rate = acceptance(now)
