"""What the demo's sessions ask for: code to continue, of different lengths and temperatures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One session's request."""

    name: str
    prompt: str
    max_tokens: int
    temperature: float
    top_p: float = 1.0
    chat: bool = False


_FIBONACCI: Final = '''\
def fibonacci(n):
    """Return the n-th Fibonacci number."""
'''

_STACK: Final = '''\
class Stack:
    """A last-in, first-out stack."""

    def __init__(self):
        self._items = []

    def push(self, item):
        self._items.append(item)

    def pop(self):
'''

_CSV: Final = '''\
import csv
from pathlib import Path


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read a CSV file with a header line into a list of dictionaries."""
    with path.open(newline="") as file:
'''

_SHORT: Final = "import os\nimport sys\n"

_TEST: Final = '''\
import unittest


def normalize(text):
    """Collapse runs of white space and strip both ends."""
    return " ".join(text.split())


class NormalizeTest(unittest.TestCase):
    def test_empty(self):
        self.assertEqual(normalize(""), "")

    def test_spaces(self):
        self.assertEqual(normalize("  a   b "), "a b")

    def test_newlines(self):
'''

_INVENTORY: Final = '''\
from dataclasses import dataclass, field


@dataclass
class Item:
    name: str
    price: float
    quantity: int = 0

    @property
    def total(self) -> float:
        return self.price * self.quantity


@dataclass
class Inventory:
    items: dict[str, Item] = field(default_factory=dict)

    def add(self, name: str, price: float, quantity: int = 1) -> None:
        """Add items of one kind, or more of a kind that is there."""
        if name in self.items:
            self.items[name].quantity += quantity
        else:
            self.items[name] = Item(name, price, quantity)

    def remove(self, name: str, quantity: int = 1) -> None:
        """Remove items. Raises KeyError when there are too few."""
        item = self.items[name]
        if item.quantity < quantity:
            raise KeyError(name)
        item.quantity -= quantity

    def total(self) -> float:
        """The value of all items."""
'''

ASKS: Final = (
    Ask(name="fibonacci", prompt=_FIBONACCI, max_tokens=96, temperature=0.0),
    Ask(name="stack", prompt=_STACK, max_tokens=128, temperature=0.0),
    Ask(name="csv", prompt=_CSV, max_tokens=112, temperature=0.3),
    Ask(name="imports", prompt=_SHORT, max_tokens=144, temperature=0.6, top_p=0.95),
    Ask(name="unittest", prompt=_TEST, max_tokens=128, temperature=0.7, top_p=0.9),
    Ask(name="inventory", prompt=_INVENTORY, max_tokens=96, temperature=1.0),
    Ask(
        name="chat: loop",
        prompt="Write a Python function that counts the words in a file.",
        max_tokens=96,
        temperature=0.5,
        chat=True,
    ),
    Ask(
        name="chat: class",
        prompt="Write a Python class for a queue with put and get methods.",
        max_tokens=80,
        temperature=0.0,
        chat=True,
    ),
)


def asks(sessions: int) -> list[Ask]:
    """As many requests as there are sessions."""
    return [ASKS[n % len(ASKS)] for n in range(sessions)]
