"""The prompt of a request: text, chat or token ids, checked against what the model can take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from selfdraft.v1 import selfdraft_pb2 as pb

from engine.plan import EngineInfo
from scheduler.admission import Limits
from scheduler.request import GenerationRequest
from service.aside import LARGE, aside
from service.auth import Scope
from service.backend import Backend
from service.chat import read_chat
from service.config import RequestLimits
from service.errors import invalid
from service.sampling import Complain
from service.text.constraint import CompiledGrammar, GrammarConstraint, GrammarError
from service.text.grammar import Grammars
from service.text.template import ChatTemplateError
from service.text.tokenizer import Tokenizer
from service.validation import (
    Options,
    Violations,
    check_id,
    check_known,
    check_token_ids,
    read_options,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request that passed every check the service can make."""

    request_id: str
    """As its client knows it."""
    key: str
    """As the server knows it: unique among the live requests of all tenants."""
    requests: tuple[GenerationRequest, ...]
    """One per sequence, of one group when there are several."""
    constraints: tuple[GrammarConstraint | None, ...]
    """Those of `requests`."""
    options: Options
    input: str
    """Which kind of input it had: text, tokenized or chat."""


async def prepare(
    request: pb.GenerateRequest,
    backend: Backend,
    complain: Violations,
    *,
    limits: RequestLimits,
    request_id: str,
    tenant: str,
    deadline: float | None,
    scope: Scope,
    cache_salt: str = "",
) -> Prepared:
    """Checks and tokenizes `request`, whose ids are names of `scope`. Raises ServiceError with
    every violation at once, those in `complain` before included."""
    scheduler = backend.scheduler
    await aside(partial(check_known, request, complain), request.ByteSize() > LARGE)
    if request.HasField("request_id"):
        check_id("request_id", request.request_id, complain, limits)
    options = read_options(
        request,
        complain,
        limits=limits,
        max_n=scheduler.config.max_queue,
        vocab_size=scheduler.info.vocab_size,
        eos_ids=backend.tokenizer.eos_ids,
    )
    ids = await _generate_input(request, backend, complain, limits)
    grammar = await _grammar(request.sampling_params, options, backend.grammars, complain, tenant)
    max_tokens = 1
    if ids is not None:
        path = request.WhichOneof("input") or "input"
        max_tokens = _room(len(ids), path, options, scheduler.limits, limits, complain)
    if ids is None or complain.found:
        raise invalid(complain.found)
    constraints = tuple(grammar.constraint() if grammar else None for _ in range(options.n))
    key = scope.inside(request_id)
    common = GenerationRequest(
        request_id=key,
        prompt_ids=ids,
        sampling=options.sampling,
        max_tokens=max_tokens,
        min_tokens=options.min_tokens,
        stop_ids=options.stop_ids,
        depth_cap=options.depth_cap,
        deadline=deadline,
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
        constraint=constraints[0],
        reuse_prefix=options.reuse_prefix,
        session_id=None if options.session_id is None else scope.inside(options.session_id),
        priority=options.priority,
        tenant=tenant,
        cache_salt=cache_salt,
    )
    return Prepared(
        request_id=request_id,
        key=key,
        requests=_sequences(common, constraints),
        constraints=constraints,
        input=request.WhichOneof("input") or "",
        options=options,
    )


def _sequences(
    common: GenerationRequest, constraints: tuple[GrammarConstraint | None, ...]
) -> tuple[GenerationRequest, ...]:
    """The request once, or as the requests of one group: seeds count up from the request's, and
    the prompt's log probabilities, the same for all, are asked for once."""
    if len(constraints) == 1:
        return (common,)
    return tuple(
        replace(
            common,
            request_id=f"{common.request_id}/{index}",
            group=common.request_id,
            sampling=replace(common.sampling, seed=(common.sampling.seed + index) % 2**64),
            prompt_logprobs=None if index else common.prompt_logprobs,
            constraint=constraint,
        )
        for index, constraint in enumerate(constraints)
    )


async def _grammar(
    params: pb.SamplingParams,
    options: Options,
    grammars: Grammars,
    complain: Complain,
    tenant: str,
) -> CompiledGrammar | None:
    if options.form is None:
        return None
    try:
        return await grammars.compile(options.form, getattr(params, options.form), tenant)
    except GrammarError as error:
        path = f".{error.path}" if error.path else ""
        complain(f"sampling_params.{options.form}{path}", str(error))
        return None


async def encode_input(
    request: pb.TokenizeRequest, tokenizer: Tokenizer, *, limits: RequestLimits
) -> tuple[int, ...]:
    """Token ids for `Tokenize`. Raises ServiceError with every violation at once."""
    complain = Violations()
    await aside(partial(check_known, request, complain), request.ByteSize() > LARGE)
    special = request.add_special_tokens if request.HasField("add_special_tokens") else None
    ids: tuple[int, ...] | None = None
    match request.WhichOneof("input"):
        case "text":
            ids = await _encode_text(
                request.text, tokenizer, complain, limits, special=special is not False
            )
        case "chat":
            if special:
                complain("add_special_tokens", "must be absent or false for chat")
            ids = await _encode_chat(request.chat, tokenizer, complain, limits)
        case _:
            complain("input", "one of text and chat is required")
    if ids is None or complain.found:
        raise invalid(complain.found)
    return ids


async def decode_ids(
    request: pb.DetokenizeRequest, tokenizer: Tokenizer, *, info: EngineInfo
) -> str:
    """Text for `Detokenize`. Raises ServiceError with every violation at once."""
    complain = Violations()
    skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True

    def decode() -> str:
        check_known(request, complain)
        check_token_ids(request.token_ids, "token_ids", complain, info.vocab_size)
        complain.raise_found()
        return tokenizer.decode(tuple(request.token_ids), skip_special_tokens=skip)

    return await aside(decode, len(request.token_ids) > LARGE)


async def _generate_input(
    request: pb.GenerateRequest, backend: Backend, complain: Complain, limits: RequestLimits
) -> tuple[int, ...] | None:
    vocab_size = backend.scheduler.info.vocab_size
    match request.WhichOneof("input"):
        case "text":
            ids = await _encode_text(request.text, backend.tokenizer, complain, limits)
        case "chat":
            ids = await _encode_chat(request.chat, backend.tokenizer, complain, limits)
        case "tokenized":
            given = request.tokenized
            read = partial(_given_ids, given, complain, vocab_size, limits)
            return await aside(read, len(given.input_ids) > LARGE)
        case _:
            complain("input", "one of text, tokenized and chat is required")
            return None
    if ids and await aside(partial(max, ids), len(ids) > LARGE) >= vocab_size:
        complain("input", f"holds a token beyond the model's vocabulary of {vocab_size}")
        return None
    return ids


def _given_ids(
    tokenized: pb.TokenizedInput, complain: Complain, vocab_size: int, limits: RequestLimits
) -> tuple[int, ...] | None:
    if len(tokenized.original_text) > limits.max_text_chars:
        length = len(tokenized.original_text)
        limit = f"at most {limits.max_text_chars} characters, is {length}"
        complain("tokenized.original_text", limit)
    ids = tuple(tokenized.input_ids)
    if not ids:
        complain("tokenized.input_ids", "must hold at least one id")
        return None
    if max(ids) >= vocab_size:
        check_token_ids(ids, "tokenized.input_ids", complain, vocab_size)
        return None
    return ids


async def _encode_text(
    text: str,
    tokenizer: Tokenizer,
    complain: Complain,
    limits: RequestLimits,
    *,
    special: bool = True,
) -> tuple[int, ...] | None:
    if not text:
        complain("text", "must not be empty")
        return None
    if len(text) > limits.max_text_chars:
        complain("text", f"at most {limits.max_text_chars} characters, is {len(text)}")
        return None
    ids = await aside(
        partial(tokenizer.encode, text, add_special_tokens=special), len(text) > LARGE
    )
    if not ids:
        complain("text", "encodes to no token at all")
        return None
    return ids


async def _encode_chat(
    chat: pb.ChatInput, tokenizer: Tokenizer, complain: Complain, limits: RequestLimits
) -> tuple[int, ...] | None:
    template = tokenizer.chat_template
    if template is None:
        complain("chat", "this model has no chat template; send text or tokenized")
        return None

    def encode() -> tuple[int, ...] | None:
        conversation = read_chat(chat, template.reserved, complain, limits)
        if conversation is None:
            return None
        text = template.render(
            conversation.messages,
            tools=conversation.tools,
            documents=conversation.documents,
            add_generation_prompt=conversation.add_generation_prompt,
            variables=conversation.variables,
            max_chars=limits.max_text_chars,
        )
        # The template writes the special tokens itself.
        return tokenizer.encode(text, add_special_tokens=False)

    try:
        ids = await aside(encode, chat.ByteSize() > LARGE)
    except ChatTemplateError as error:
        complain("chat.messages", f"refused by the model's chat template: {error}")
        return None
    if ids == ():
        complain("chat.messages", "the chat template makes an empty prompt of them")
        return None
    return ids


def _room(
    prompt: int,
    path: str,
    options: Options,
    bounds: Limits,
    limits: RequestLimits,
    complain: Complain,
) -> int:
    """max_tokens of a prompt of `prompt` tokens."""
    room = bounds.room(prompt)
    fits = min(bounds.context_length, bounds.pool_tokens)
    name = "context length" if bounds.context_length <= bounds.pool_tokens else "KV cache size"
    if prompt > bounds.prompt_tokens:
        complain(path, f"has {prompt} tokens; the server takes prompts of {bounds.prompt_tokens}")
    elif room < 1:
        complain(
            path,
            f"has {prompt} tokens; with one token of output the {name} of {fits} is exceeded",
        )
    elif options.max_tokens is None:
        most = min(room, limits.default_max_tokens)
        if options.min_tokens > most:
            complain(
                "sampling_params.min_tokens",
                f"must be at most {most}, the default of max_tokens here, is {options.min_tokens}",
            )
        return most
    elif options.max_tokens > room:
        complain(
            "sampling_params.max_tokens",
            f"must be at most {room} for a prompt of {prompt} tokens "
            f"({name} {fits}), is {options.max_tokens}",
        )
    return options.max_tokens or 1
