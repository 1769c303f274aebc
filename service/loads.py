"""What `GetLoads` says, and the ratios of a `Statistics` that more than one answer gives."""

from __future__ import annotations

from selfdraft.v1 import selfdraft_pb2 as pb

from scheduler.statistics import Statistics


def loads(now: Statistics) -> pb.GetLoadsResponse:
    """One snapshot as a message."""
    return pb.GetLoadsResponse(
        queued_requests=now.queued_requests,
        queued_tokens=now.queued_tokens,
        oldest_wait_seconds=now.oldest_wait_s,
        running_requests=now.running,
        prefilling_requests=now.prefilling,
        prefilling_tokens=now.prefilling_tokens,
        paused_requests=now.paused,
        max_rows=now.max_rows,
        kv_pages=now.pages_total,
        kv_pages_used=now.pages_used - now.pages_cached,
        kv_pages_cached=now.pages_cached,
        kv_usage=kv_usage(now),
        tokens_per_second=now.tokens_per_second,
        prompt_tokens_per_second=now.prompt_tokens_per_second,
        depth=now.depth,
        spec_draft_tokens=now.drafted,
        spec_accepted_tokens=now.accepted,
        spec_draft_tokens_per_pos=now.drafted_per_position,
        spec_accepted_tokens_per_pos=now.accepted_per_position,
        generated_tokens=now.generated_tokens,
        prompt_tokens=now.prompt_tokens,
        cached_tokens=now.cached_tokens,
        submitted_requests=now.submitted,
        refused_requests=now.refused,
        finished_requests={reason.value: count for reason, count in now.finished.items()},
        sessions=now.sessions,
        queued_by_priority={
            priority.name.lower(): count for priority, count in now.queued_by_class.items()
        },
        preempted_requests=now.preempted_waiting,
        preemptions=now.preemptions,
        kv_pages_peak=now.pages_peak,
    )


def kv_usage(now: Statistics) -> float:
    """Share of the KV pages that running requests hold, 0 … 1. Pages that only kept prefixes hold
    are free for the asking, so they do not count: they would make an idle server look full."""
    return (now.pages_used - now.pages_cached) / now.pages_total


def hit_rate(now: Statistics) -> float:
    """Share of the prompt tokens so far that came from a kept prefix, 0 … 1."""
    prompts = now.cached_tokens + now.prompt_tokens
    return now.cached_tokens / prompts if prompts else 0.0


def acceptance(now: Statistics) -> float:
    """Share of the drafts so far that were accepted, 0 … 1."""
    return now.accepted / now.drafted if now.drafted else 0.0
