"""Token files: what is in them, who is known, which are refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from service.auth import Identity
from service.reload import FileError
from service.tokens import Tokens, digest_of, entry_text, new_token
from tests.service.books import PAST, Book, silent


def test_a_token_is_256_random_bits_and_the_file_holds_its_hash_only() -> None:
    token = new_token()
    assert token.startswith("sd_")
    assert len(token) == 3 + 43
    assert token != new_token()
    text = entry_text(token, tenant="ada", admin=True, expires=PAST)
    assert token not in text
    assert digest_of(token) in text
    with pytest.raises(FileError, match="tenant: must be 1 … 64"):
        entry_text(token, tenant='x"\nadmin = true')


def test_tokens_are_known_until_they_expire(book: Book) -> None:
    end = datetime(2030, 1, 1, tzinfo=UTC)
    short = book.add("ada", expires=end)
    now = [end - timedelta(seconds=1)]
    tokens = Tokens(book.path, silent(), clock=lambda: now[0])
    assert tokens.identify(book.ada) == Identity(tenant="ada", admin=False)
    assert tokens.identify(book.root) == Identity(tenant="root", admin=True)
    assert tokens.identify(short) == Identity(tenant="ada", admin=False)
    now[0] = end
    assert tokens.identify(short) is None
    assert [w for w in tokens.warnings() if "expired on 2030-01-01" in w]
    for wrong in ("", "x", book.ada[:-1], book.ada + "x", book.ada.upper(), "é", "x" * 600):
        assert tokens.identify(wrong) is None


def test_every_hash_is_compared_whole(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """All entries, each with a comparison whose time does not depend on the bytes."""
    tokens = Tokens(book.path, silent())
    compared: list[tuple[str, str]] = []

    def compare(one: str, other: str) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("service.tokens.hmac.compare_digest", compare)
    assert tokens.identify(book.ada) is not None
    everybody = (book.ada, book.bob, book.root)
    assert [other for _, other in compared] == [digest_of(token) for token in everybody]


def test_a_hash_with_the_right_beginning_is_another_hash(book: Book) -> None:
    digest = digest_of(book.ada)
    other = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    book.write(book.text.replace(digest, other))
    assert Tokens(book.path, silent()).identify(book.ada) is None


BAD = {
    "not TOML": ("[[token", "is not TOML"),
    "a token itself": ('[[token]]\ntenant = "a"\nhash = "sd_secret"', r"token\[0\].hash: must be"),
    "no tenant": (f'[[token]]\nhash = "{digest_of("x")}"', r"token\[0\].tenant: must be"),
    "a tenant with a slash": (
        f'[[token]]\ntenant = "a/b"\nhash = "{digest_of("x")}"',
        r"token\[0\].tenant",
    ),
    "a typing error": (
        f'[[token]]\ntenant = "a"\nhash = "{digest_of("x")}"\nadmim = true',
        r"token\[0\].admim: must be one of admin, expires, hash, tenant",
    ),
    "admin is text": (
        f'[[token]]\ntenant = "a"\nhash = "{digest_of("x")}"\nadmin = "no"',
        r"token\[0\].admin: must be true or false",
    ),
    "no time zone": (
        f'[[token]]\ntenant = "a"\nhash = "{digest_of("x")}"\nexpires = 2030-01-01T00:00:00',
        r"token\[0\].expires: must be a time with its zone",
    ),
    "another table": ('[tokens]\na = "b"', "tokens: there is only"),
    "not tables": ('token = "x"', r"must be \[\[token\]\] tables"),
    "twice": (entry_text("x", tenant="a") + entry_text("x", tenant="b"), "the same hash"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_its_entry_named(name: str, book: Book) -> None:
    text, said = BAD[name]
    book.write(text)
    with pytest.raises(FileError, match=said) as caught:
        Tokens(book.path, silent())
    assert "secret" not in str(caught.value)


def test_a_file_that_others_may_write_is_told(book: Book) -> None:
    tokens = Tokens(book.path, silent())
    assert tokens.warnings() == []
    book.path.chmod(0o660)
    assert "others than its owner can write it" in tokens.warnings()[0]
    book.write("")
    assert "nobody can call" in Tokens(book.path, silent()).warnings()[0]
