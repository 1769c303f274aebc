"""What the service costs beside the engine: `python -m tests.benchmarks.service`.

One process is measured, `child`: a whole server, gRPC, text, metrics and logs included, on one
engine. Its load comes either from inside, straight into its scheduler (*alone*), or from this
process over loopback (*served*), so that the client's work is never counted and the engine is the
same. Two engines: the bundled model, for what a user sees; and one that emits bursts at once, for
what a token costs.
"""
