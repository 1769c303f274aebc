"""selfdraft for other people's code: the `selfdraft.v1` stubs and a thin async client."""

from selfdraft.client import Client, Generation, SelfdraftError, Violation

__all__ = ["Client", "Generation", "SelfdraftError", "Violation"]
