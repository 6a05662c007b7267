"""Hosts that may be fetched from, and the bytes of a request."""

import pytest

from app.media.limits import ByteBudget, Refused
from tests.media.support import limits


@pytest.mark.parametrize(
    ("domain", "host", "expected"),
    [
        ("example.com", "example.com", True),
        ("example.com", "EXAMPLE.com", True),
        ("Example.com", "example.com", True),
        ("example.com", "example.com.", True),
        ("example.com", "a.example.com", False),
        ("example.com", "badexample.com", False),
        ("example.com", "example.com.evil.org", False),
        (".example.com", "a.example.com", True),
        (".example.com", "a.b.example.com", True),
        (".example.com", "example.com", False),
        (".example.com", ".example.com", False),
        (".example.com", "badexample.com", False),
        ("127.0.0.1", "127.0.0.1", True),
        ("[::1]", "::1", True),
        ("::1", "::1", True),
        ("example.com", "", False),
    ],
)
def test_a_host_is_allowed_by_its_name_or_by_what_it_ends_with(domain: str, host: str, expected: bool) -> None:
    assert limits(domains=("other.org", domain)).allow_host(host) is expected


def test_no_host_is_allowed_unless_named() -> None:
    assert not limits().allow_host("example.com")


def test_bytes_are_counted_up_to_the_limit() -> None:
    budget = ByteBudget(10)
    budget.take(4)
    budget.check(6)
    budget.take(6)

    with pytest.raises(Refused, match="10 bytes in all"):
        budget.take(1)
    with pytest.raises(Refused):
        budget.check(1)
