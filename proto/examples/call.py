"""Any method of a server by name, with JSON for messages: what the server says of itself by
reflection is enough, no stubs are needed.

    python proto/examples/call.py 127.0.0.1:50051
    python proto/examples/call.py 127.0.0.1:50051 selfdraft.v1.Inference/GetModelInfo
    python proto/examples/call.py 127.0.0.1:50051 selfdraft.v1.Inference/Generate \
        '{"text": "def fib(n):", "samplingParams": {"maxTokens": 16}}'
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import grpc
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)


def methods(channel: grpc.Channel) -> list[str]:
    """Every method the server tells of."""
    database = ProtoReflectionDescriptorDatabase(channel)
    pool = DescriptorPool(database)
    return [
        f"{service}/{method.name}{' (stream)' if method.server_streaming else ''}"
        for service in sorted(database.get_services())
        for method in pool.FindServiceByName(service).methods
    ]


def call(channel: grpc.Channel, path: str, text: str, timeout: float) -> list[str]:
    """Calls a method; the answers as JSON. Raises grpc.RpcError, KeyError for an unknown name."""
    service, _, name = path.rpartition("/")
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    method = pool.FindServiceByName(service).methods_by_name[name]
    request, answer = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
    make: Any = channel.unary_stream if method.server_streaming else channel.unary_unary
    invoke = make(f"/{path}", lambda message: message.SerializeToString(), answer.FromString)
    answers = invoke(json_format.Parse(text, request(), descriptor_pool=pool), timeout=timeout)
    return [
        json_format.MessageToJson(one)
        for one in (answers if method.server_streaming else [answers])
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("target", help="host:port of the server")
    parser.add_argument("method", nargs="?", help="package.Service/Method; a list when absent")
    parser.add_argument("message", nargs="?", default="{}", help="the request as JSON")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds")
    given = parser.parse_args()
    with grpc.insecure_channel(given.target) as channel:
        try:
            if given.method is None:
                lines = methods(channel)
            else:
                lines = call(channel, given.method, given.message, given.timeout)
        except grpc.RpcError as error:
            status: Any = error
            print(f"{status.code().name}: {status.details()}", file=sys.stderr)
            return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
