"""A soak of a real server process: mixed traffic, hostile clients, every request accounted for.

`python -m tests.benchmarks.soak --minutes 60 --output report.json` starts `selfdraft serve` with
the bundled model on loopback, fills it (all rows running, the queue full), then mixes well-behaved
calls of every kind with hostile clients, and at the end joins what clients saw, what the log says
and what the metrics counted. `soak.run.soak` is the same as a function.
"""
