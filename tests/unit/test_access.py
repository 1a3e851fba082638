"""Users and their passwords: what is right, what every answer costs, and who waits for whom."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_hpc_exporter import access
from gpu_hpc_exporter.access import Access, BusyError, Users
from gpu_hpc_exporter.yaml_file import ConfigError
from web_files import PASSWORD, WITH_TLS, basic, hash_of, make_site, with_users

T = TypeVar("T")
PEER = "192.0.2.1"
COST = 9
"""About 30 ms of a CPU: far more than all else that a request costs."""


def asked(what: Callable[[Users], Awaitable[T]], cost: int = 4) -> T:
    """The result of `what` with one user, called scraper."""

    async def ask() -> T:
        users = Users({"scraper": hash_of(cost=cost)})
        try:
            return await what(users)
        finally:
            users.close()

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("header", "is_right"),
    [
        (basic(), True),
        (basic().replace("Basic", "bASIC"), True),
        (basic(password=PASSWORD + "!"), False),
        (basic(password=""), False),
        (basic("Scraper"), False),
        (basic("root"), False),
        (basic("", ""), False),
        (basic().replace("Basic", "Bearer"), False),
        ("Basic", False),
        ("Basic !!!", False),
        ("Basic " + base64.b64encode(b"scraper").decode(), False),
        ("", False),
    ],
)
def test_who_is_let_in(header: str, *, is_right: bool) -> None:
    """The right password of the right user, and nothing else."""
    assert asked(lambda users: users.admits(header, PEER)) == is_right


@given(st.text() | st.binary().map(lambda octets: "Basic " + base64.b64encode(octets).decode()))
def test_any_header_is_an_answer(header: str) -> None:
    """No header of a stranger raises, whatever bytes, lengths or NULs are in it, and none is right."""
    assert not asked(lambda users: users.admits(header, PEER))


def test_bcrypt_looks_at_72_bytes() -> None:
    """A longer password is compared as everywhere else, and is no error."""
    long = "x" * 100
    hashes = {"scraper": hash_of(long[:72])}
    assert asyncio.run(Users(hashes).admits(basic(password=long), PEER))


@pytest.mark.parametrize("user", ["scraper", "nobody"])
def test_every_wrong_answer_costs_a_bcrypt(user: str) -> None:
    """A user who is not there is compared with a hash of the same cost, every time anew: measured on the CPU."""
    began = time.process_time()
    for _ in range(3):
        assert not asked(lambda users: users.admits(basic(user, "wrong"), PEER), COST)
    wrong_s = time.process_time() - began
    began = time.process_time()
    for _ in range(3):
        assert asked(lambda users: users.admits(basic(), PEER), COST)
    right_s = time.process_time() - began  # with as many hashes made
    assert wrong_s == pytest.approx(right_s, rel=0.5)


def test_a_right_password_costs_once() -> None:
    """What was right is known from then on; a hundred scrapes more cost less than one bcrypt."""

    async def ask(users: Users) -> tuple[float, float]:
        began = time.process_time()
        assert await users.admits(basic(), PEER)
        first_s = time.process_time() - began
        for _ in range(100):
            assert await users.admits(basic(), "192.0.2.77")
        return first_s, time.process_time() - began - first_s

    first_s, more_s = asked(ask, COST)
    assert more_s < first_s


def test_what_is_known_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some time after its last use, and where more passwords are known than are kept, bcrypt is asked again."""

    async def cost_s(users: Users) -> float:
        began = time.process_time()
        assert await users.admits(basic(), PEER)
        return time.process_time() - began

    async def ask(users: Users) -> list[float]:
        costs = [await cost_s(users), await cost_s(users)]
        monkeypatch.setattr(access, "_MAX_KNOWN", 1)
        assert await users.admits(basic("other"), PEER)
        costs.append(await cost_s(users))
        monkeypatch.setattr(access, "_KNOWN_S", 0.0)
        return [*costs, await cost_s(users), await cost_s(users)]

    hashed = hash_of(cost=COST)
    first_s, *later_s = asyncio.run(ask(Users({"scraper": hashed, "other": hashed})))
    assert [cost > first_s / 3 for cost in later_s] == [False, True, False, True]


def test_one_peer_does_not_keep_another_out() -> None:
    """A flood of wrong passwords waits for itself: at most 8 of it, one at a time, and others come in between."""

    async def ask(users: Users) -> tuple[list[str], int]:
        ended: list[str] = []

        async def attack(number: int) -> None:
            await users.admits(basic(password=f"wrong {number}"), "198.51.100.9")
            ended.append("attack")

        async def scrape() -> None:
            assert await users.admits(basic(), PEER)
            ended.append("scrape")

        attacks = [asyncio.create_task(attack(number)) for number in range(50)]
        await asyncio.sleep(0)
        scraping = asyncio.create_task(scrape())
        outcomes = await asyncio.gather(*attacks, return_exceptions=True)
        await scraping
        return ended, sum(isinstance(outcome, BusyError) for outcome in outcomes)

    ended, refused = asked(ask, COST)
    assert refused == 42
    assert ended.count("attack") == 8
    assert ended.index("scrape") <= 3


def test_the_event_loop_goes_on() -> None:
    """While bcrypt runs, whatever else there is to do is done."""

    async def ask(users: Users) -> int:
        turns = 0
        pending = asyncio.create_task(users.admits(basic(), PEER))
        while not pending.done():
            turns += 1
            await asyncio.sleep(0)
        assert await pending
        return turns

    assert asked(ask, 11) > 100


def test_a_mistake_at_the_start_is_raised(tmp_path: Path) -> None:
    """There are no older rules to go on with."""
    with pytest.raises(ConfigError, match="unknown key"):
        Access(make_site(tmp_path, "users: {}\n").file)


def test_reloading(tmp_path: Path) -> None:
    """A broken file keeps the rules as they are; one that changes no user keeps what is known of them."""
    site = make_site(tmp_path, WITH_TLS + with_users())
    text = site.file.read_text()
    held = Access(site.file)
    before = held.rules
    site.write("users: {}\n")
    assert "unknown key `users`" in held.reload()
    assert held.rules is before
    site.write(text + "rate_limit: {interval: 1s, burst: 5}\n")
    assert (held.reload(), held.problem) == ("", "")
    assert held.rules.users is before.users
    assert held.rules.tls is not before.tls
    site.write(WITH_TLS)
    assert held.reload() == ""
    assert held.rules.users is None


def test_changes_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A new connection finds a changed certificate; what is broken is told once, and tried again when it changes."""
    monkeypatch.setattr(access, "_CHECK_S", 0.0)
    site = make_site(tmp_path, WITH_TLS)

    async def look() -> None:
        held = Access(site.file)
        before = await held.fresh_rules()
        assert await held.fresh_rules() is before
        site.issue()
        after = await held.fresh_rules()
        assert after is not before
        (tmp_path / "server.key").write_text("broken\n")
        for _ in range(3):
            assert await held.fresh_rules() is after
        assert "PEM" in held.problem
        site.issue()
        assert await held.fresh_rules() is not after
        assert held.problem == ""
        held.close()

    asyncio.run(look())
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1


def test_tokens_come_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """rate_limit: a burst at once, then one for each interval."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    bucket = Access(make_site(tmp_path, "rate_limit: {interval: 500ms, burst: 2}\n").file).rules.bucket
    assert [bucket.take() for _ in range(3)] == [True, True, False]
    now += 0.5
    assert [bucket.take() for _ in range(2)] == [True, False]
    now += 60
    assert [bucket.take() for _ in range(3)] == [True, True, False]
