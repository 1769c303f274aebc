"""What the gateway is told of model and server when it registers a worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from smg_grpc_proto import vllm_engine_pb2 as vllm

from service.backend import Backend
from service.config import ServiceConfig

TOKENIZER: Final = "selfdraft:worker"
"""Where the tokenizer is, for the gateway. It looks for a folder or a hub id of this name before it
asks `GetTokenizer`. There is neither: a name that happened to exist on its machine or on the hub
would be another model's tokenizer."""


def model_info(backend: Backend, config: ServiceConfig) -> vllm.GetModelInfoResponse:
    """Facts about the served model. No path of this machine is in them."""
    scheduler = backend.scheduler
    info = scheduler.info
    checkpoint = _checkpoint(config.engine.model)
    return vllm.GetModelInfoResponse(
        model_path=backend.name,
        served_model_name=backend.name,
        tokenizer_path=TOKENIZER,
        is_generation=True,
        max_context_length=info.context_length,
        max_req_input_len=scheduler.limits.prompt_tokens,
        vocab_size=info.vocab_size,
        model_type=str(checkpoint.get("model_type", info.family)),
        architectures=checkpoint.get("architectures") or [],
        eos_token_ids=backend.tokenizer.eos_ids,
        pad_token_id=_id(checkpoint, "pad_token_id"),
        bos_token_id=_id(checkpoint, "bos_token_id"),
    )


def server_info(
    backend: Backend, *, active: int, paused: bool, uptime_s: float
) -> vllm.GetServerInfoResponse:
    """Facts about this server."""
    scheduler = backend.scheduler
    info = scheduler.info
    return vllm.GetServerInfoResponse(
        active_requests=active,
        is_paused=paused,
        uptime_seconds=uptime_s,
        server_type="selfdraft",
        data_parallel_size=1,
        block_size=info.page_size,
        kv_cache_dtype=info.dtype,
        model_dtype=info.dtype,
        max_num_seqs=scheduler.statistics().max_rows,
        constrained_decoding_start="first_token",
    )


def _checkpoint(directory: Path) -> dict[str, Any]:
    """config.json, with what generation_config.json adds."""
    merged: dict[str, Any] = {}
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if path.is_file():
            merged |= json.loads(path.read_text(encoding="utf-8"))
    return merged


def _id(checkpoint: dict[str, Any], name: str) -> int:
    """A token id; 0, the protocol's "not known", when there is none."""
    value = checkpoint.get(name)
    return value if isinstance(value, int) else 0
