"""Ratios of a `Statistics` that more than one answer gives."""

from __future__ import annotations

from scheduler.statistics import Statistics


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
