"""From the gateway's request to one of `selfdraft.v1`.

Scalars of this protocol are mostly not `optional`, and the gateway fills in neutral values: 0, or
what changes nothing, means absent. What is set and cannot be honoured is a violation.
"""

from __future__ import annotations

import json
from typing import Final

from llguidance.gbnf_to_lark import any_to_lark
from selfdraft.v1 import selfdraft_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2 as vllm

from service.sampling import Complain
from service.validation import NOT_YET, check_known

_UNSUPPORTED: Final = (
    *("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs"),
    "extra_mm_inputs",
)
_SAME: Final = ("frequency_penalty", "presence_penalty", "top_k", "min_p", "min_tokens")
"""Fields of SamplingParams that mean the same in both, with 0 as neutral value."""
_ZERO_IS_ABSENT: Final = ("top_p", "repetition_penalty", "n")
"""Those of which 0 is no value: a client that left them alone."""

ANY_OBJECT: Final = '{"type":"object"}'


def translate(request: vllm.GenerateRequest, complain: Complain) -> pb.GenerateRequest:
    """The same request in our own API. What has no counterpart there goes to `complain`; the rest
    is checked where every request is."""
    check_known(request, complain)
    given = {field.name for field, _ in request.ListFields()}
    for name in _UNSUPPORTED:
        if name in given:
            complain(name, f"{NOT_YET}: must be absent")
    if request.data_parallel_rank:
        complain("data_parallel_rank", "must be absent or 0: there is one rank")
    ours = pb.GenerateRequest(sampling_params=_sampling(request.sampling_params, complain))
    if request.request_id:
        ours.request_id = request.request_id
    match request.WhichOneof("input"):
        case "tokenized":
            # The original text is there for reference: what counts are the ids.
            ours.tokenized.input_ids.extend(request.tokenized.input_ids)
        case "text":
            ours.text = request.text
    return ours


def _sampling(params: vllm.SamplingParams, complain: Complain) -> pb.SamplingParams:
    # Whether spaces stand between special tokens is about text, which this protocol does not carry.
    ours = pb.SamplingParams(
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        skip_special_tokens=params.skip_special_tokens,
        ignore_eos=params.ignore_eos,
        include_stop_str_in_output=params.include_stop_str_in_output,
    )
    for name in _SAME:
        setattr(ours, name, getattr(params, name))
    for name in _ZERO_IS_ABSENT:
        if value := getattr(params, name):
            setattr(ours, name, value)
    if params.HasField("temperature"):
        ours.temperature = params.temperature
    if params.HasField("max_tokens"):
        ours.max_tokens = params.max_tokens
    if params.HasField("seed"):
        ours.seed = params.seed % 2**64
    if params.HasField("truncate_prompt_tokens"):
        complain("sampling_params.truncate_prompt_tokens", f"{NOT_YET}: must be absent")
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            _count(params, name, ours, complain)
    for token, bias in params.logit_bias.items():
        if token < 0:
            complain(f"sampling_params.logit_bias[{token}]", "ids must be >= 0")
        else:
            ours.logit_bias[token] = bias
    _constraint(params, ours, complain)
    return ours


def _count(
    params: vllm.SamplingParams, name: str, ours: pb.SamplingParams, complain: Complain
) -> None:
    value: int = getattr(params, name)
    if value < 0:
        complain(f"sampling_params.{name}", f"must be >= 0, is {value}: a number has to be named")
    else:
        setattr(ours, name, value)


def _constraint(params: vllm.SamplingParams, ours: pb.SamplingParams, complain: Complain) -> None:
    """Every form runs from the first token on, so `grammar_from_first_token` asks for nothing."""
    match params.WhichOneof("constraint"):
        case "json_schema":
            ours.json_schema = params.json_schema
        case "regex":
            ours.regex = params.regex
        case "grammar":
            ours.grammar = _lark(params.grammar, complain)
        case "structural_tag":
            ours.structural_tag = params.structural_tag
        case "json_object" if params.json_object:
            ours.json_schema = ANY_OBJECT
        case "choice":
            ours.grammar = _one_of(params.choice, complain)


def _lark(grammar: str, complain: Complain) -> str:
    """vLLM takes EBNF (`root ::= …`) as well as Lark (`start: …`) here."""
    if "::=" not in grammar:
        return grammar
    try:
        lark: str = any_to_lark(grammar)
    except Exception as error:  # the converter raises plain Exception
        complain("sampling_params.grammar", f"is no EBNF grammar: {error}")
        return ""
    return lark


def _one_of(choice: vllm.ChoiceConstraint, complain: Complain) -> str:
    choices = list(dict.fromkeys(choice.choices))
    if not choices or "" in choices:
        complain(
            "sampling_params.choice.choices", "must hold at least one text, none of them empty"
        )
        return ""
    # Lark's strings are escaped as JSON's are.
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)
