"""selfdraft for other people's code: the `selfdraft.v1` stubs and thin async clients."""

from selfdraft.admin import AdminClient
from selfdraft.channel import InsecureTokenError, Tls
from selfdraft.client import Client, Generation
from selfdraft.errors import SelfdraftError, Violation
from selfdraft.retry import Retry

__all__ = [
    "AdminClient",
    "Client",
    "Generation",
    "InsecureTokenError",
    "Retry",
    "SelfdraftError",
    "Tls",
    "Violation",
]
