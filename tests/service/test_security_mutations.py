"""For each guarantee of security one planted fault, and proof that a check sees it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from scheduler.prefix import ROOT, PrefixCache
from service.auth import Identity, Scope
from service.config import SecurityConfig
from service.errors import Reason, ServiceError
from service.guard import AuthInterceptor
from service.reload import Reloading
from service.tls import Tls
from service.tokens import Tokens, digest_of
from tests.scheduler import test_salt
from tests.service import (
    test_admin,
    test_auth,
    test_auth_tenants,
    test_errors,
    test_tls,
    test_tokens,
)
from tests.service.books import Book
from tests.service.test_admin import Site
from tests.service.test_tls import Files

pytestmark = pytest.mark.anyio

Patch = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[Path, pytest.MonkeyPatch], Awaitable[None] | None]
MUTATIONS: dict[str, tuple[Patch, Check]] = {}

SEEN = (Exception, BaseExceptionGroup, pytest.fail.Exception)


def seen_by(check: Check) -> Callable[[Patch], Patch]:
    def add(patch: Patch) -> Patch:
        MUTATIONS[patch.__name__] = (patch, check)
        return patch

    return add


def every_method(folder: Path, patch: pytest.MonkeyPatch) -> Awaitable[None]:
    return test_auth.test_every_method_of_every_service_needs_a_token_unless_listed(Book(folder))


def skipping(patch: pytest.MonkeyPatch, skips: Callable[[str], bool]) -> None:
    well = AuthInterceptor.intercept_service

    async def intercept(self: AuthInterceptor, continuation: Any, details: Any) -> Any:
        if skips(details.method):
            return await continuation(details)
        return await well(self, continuation, details)

    patch.setattr(AuthInterceptor, "intercept_service", intercept)


@seen_by(every_method)
def one_method_is_open(patch: pytest.MonkeyPatch) -> None:
    skipping(patch, lambda method: method.endswith("/Detokenize"))


@seen_by(every_method)
def services_nobody_thought_of_are_open(patch: pytest.MonkeyPatch) -> None:
    skipping(patch, lambda method: not method.startswith("/selfdraft.v1."))


@seen_by(lambda folder, _: test_auth.test_only_admins_administer(Book(folder)))
def everybody_is_an_admin(patch: pytest.MonkeyPatch) -> None:
    well = Tokens.identify

    def identify(self: Tokens, token: str) -> Identity | None:
        found = well(self, token)
        return found and Identity(tenant=found.tenant, admin=True)

    patch.setattr(Tokens, "identify", identify)


@seen_by(lambda f, _: test_tokens.test_a_hash_with_the_right_beginning_is_another_hash(Book(f)))
def hashes_are_compared_by_their_beginning(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("service.tokens.hmac.compare_digest", lambda a, b: a[:40] == b[:40])


@seen_by(lambda f, patch: test_tokens.test_every_hash_is_compared_whole(Book(f), patch))
def comparing_ends_with_the_first_match(patch: pytest.MonkeyPatch) -> None:
    def identify(self: Tokens, token: str) -> Identity | None:
        digest = digest_of(token)
        return next((e.identity for e in self.entries if e.digest == digest), None)

    patch.setattr(Tokens, "identify", identify)


@seen_by(lambda folder, _: test_tokens.test_tokens_are_known_until_they_expire(Book(folder)))
def an_expired_token_is_accepted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tokens, "_expired", lambda self, entry: False)


@seen_by(lambda folder, _: test_auth.test_what_is_wrong_with_a_token_is_not_told(Book(folder)))
def an_expired_token_is_told(patch: pytest.MonkeyPatch) -> None:
    identify, refuse = Tokens.identify, AuthInterceptor._refuse
    known = [False]

    def remember(self: Tokens, token: str) -> Identity | None:
        known[0] = any(entry.digest == digest_of(token) for entry in self.entries)
        return identify(self, token)

    def tell(self: AuthInterceptor, reason: Any, message: str, service: str) -> Any:
        return refuse(self, reason, f"{message}, expired: {known[0]}", service)

    patch.setattr(Tokens, "identify", remember)
    patch.setattr(AuthInterceptor, "_refuse", tell)


@seen_by(lambda folder, _: test_auth.test_the_file_is_read_again(Book(folder)))
def a_withdrawn_token_still_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reloading, "_reload", lambda self: None)


@seen_by(lambda folder, _: test_auth.test_secrets_are_in_no_log_and_no_error(Book(folder)))
def a_refused_token_is_logged(patch: pytest.MonkeyPatch) -> None:
    well = Tokens.identify

    def identify(self: Tokens, token: str) -> Identity | None:
        self._entries._logger.info("who is this", token=token)
        return well(self, token)

    patch.setattr(Tokens, "identify", identify)


def sessions(folder: Path, patch: pytest.MonkeyPatch) -> Awaitable[None]:
    return test_auth_tenants.test_sessions_are_their_tenants_own(Book(folder))


@seen_by(sessions)
def another_tenants_session_is_visible(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scope, "outside", lambda self, name: name.partition("/")[2])


@seen_by(lambda folder, _: test_auth_tenants.test_requests_are_their_tenants_own(Book(folder)))
def ids_are_everybodys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scope, "inside", lambda self, name: name)
    patch.setattr(Scope, "outside", lambda self, name: name)


@seen_by(
    lambda f, _: test_auth_tenants.test_one_tenant_cannot_tell_what_another_has_sent(Book(f), False)
)
def prefixes_are_everybodys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SecurityConfig, "cache_salt", lambda self, tenant: "")


@seen_by(lambda _, __: test_salt.test_prompts_and_ends_are_found_under_their_own_salt_only())
def a_salt_is_left_out_of_the_hashes(patch: pytest.MonkeyPatch) -> None:
    for room in ("prefill", "keeping"):
        patch.setattr(f"scheduler.{room}.root", lambda salt: [ROOT])


@seen_by(lambda _, __: test_salt.test_where_a_prompt_is_cut_does_not_tell_either())
def a_branch_is_looked_for_under_every_salt(patch: pytest.MonkeyPatch) -> None:
    well = PrefixCache.common

    def common(self: PrefixCache, prompt: Any, hashes: Any) -> int:
        return max((well(self, prompt, entry.hashes) for entry in self), default=0)

    patch.setattr(PrefixCache, "common", common)


@seen_by(lambda f, patch: test_admin.test_a_name_is_no_path("../x", Site(f), f, patch))
def a_name_is_a_path(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("service.sessionfiles.NAME", re.compile(r"[\s\S]*"))


@seen_by(lambda folder, _: test_admin.test_a_link_leads_nowhere(Site(folder), folder))
def links_are_followed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Path, "is_symlink", lambda self: False)


@seen_by(
    lambda f, _: test_tls.test_mtls_refuses_clients_without_a_certificate_of_the_right_root(
        Files(f)
    )
)
def client_certificates_are_not_asked_for(patch: pytest.MonkeyPatch) -> None:
    import grpc

    well = grpc.dynamic_ssl_server_credentials

    def lax(initial: Any, fetch: Any, require_client_authentication: bool = False) -> Any:
        return well(initial, fetch, require_client_authentication=False)

    patch.setattr(grpc, "dynamic_ssl_server_credentials", lax)


@seen_by(
    lambda f, _: test_tls.test_half_written_files_leave_the_last_good_pair_and_one_line(Files(f))
)
def pairs_that_do_not_match_are_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("service.tls._public", lambda key: b"")


@seen_by(
    lambda f, _: test_tls.test_a_new_pair_is_shown_to_new_connections_and_old_ones_go_on(Files(f))
)
def a_new_certificate_is_never_shown(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tls, "_fetch", lambda self: None)


@seen_by(
    lambda f, _: test_tls.test_plain_text_stays_on_this_machine_unless_told_otherwise(Files(f))
)
def plain_text_goes_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("service.gate.check_exposure", lambda config: None)


@seen_by(
    lambda f, _: test_auth_tenants.test_a_token_travels_in_plain_text_on_this_machine_only(
        "example.com:1", False
    )
)
def tokens_go_anywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("selfdraft.channel.is_loopback", lambda target: True)


@seen_by(lambda f, _: test_errors.test_a_client_sees_each_error_whole(Reason.QUEUE_FULL, f))
def a_delay_is_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ServiceError, "_retry_info", lambda self: [])


@pytest.mark.parametrize("name", MUTATIONS)
async def test_a_planted_fault_is_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, check = MUTATIONS[name]
    plant(monkeypatch)
    with pytest.raises(SEEN):
        await run(check, tmp_path, monkeypatch)


async def run(check: Check, folder: Path, patch: pytest.MonkeyPatch) -> None:
    with anyio.fail_after(20):
        running = check(folder, patch)
        if running is not None:
            await running
