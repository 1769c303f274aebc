"""`vllm.grpc.engine.VllmEngine`, the protocol by which the Shepherd Model Gateway drives a worker.

Requests become those of `selfdraft.v1` and take the same way through the service; answers are
turned back. The messages are those of the `smg-grpc-proto` package.
"""
