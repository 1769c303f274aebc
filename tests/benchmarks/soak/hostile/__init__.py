"""Clients that a server on an open network meets. Each module holds one kind.

They run in a process of their own, `python -m tests.benchmarks.soak.hostile`, which prints what
they did as JSON, so that they take neither sockets nor time from the well-behaved.
"""
