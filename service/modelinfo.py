"""What `GetModelInfo` says."""

from __future__ import annotations

from selfdraft.v1 import selfdraft_pb2 as pb

from service.backend import Backend
from service.config import RequestLimits
from service.version import VERSION


def model_info(backend: Backend, limits: RequestLimits) -> pb.GetModelInfoResponse:
    """Facts about the served model, from the engine, the tokenizer and the server's limits."""
    scheduler, tokenizer = backend.scheduler, backend.tokenizer
    info = scheduler.info
    depth = scheduler.config.depth
    return pb.GetModelInfoResponse(
        model=backend.name,
        family=info.family,
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        default_max_tokens=min(limits.default_max_tokens, scheduler.limits.room(1)),
        layers=info.layers,
        mtp_layers=info.mtp_layers,
        max_depth=info.max_depth if depth == "auto" else min(depth, info.max_depth),
        parameters=info.parameters,
        dtype=info.dtype,
        quantization=info.quantization,
        weight_bytes=info.weight_bytes,
        max_rows=min(info.max_rows, scheduler.config.max_rows),
        kv_pages=info.pages,
        page_size=info.page_size,
        page_bytes=info.page_bytes,
        device=info.device,
        blas=info.blas,
        eos_token_ids=tokenizer.eos_ids,
        has_chat_template=tokenizer.chat_template is not None,
        notes=info.notes,
        server_version=VERSION,
    )
