"""Only public addresses, or those of networks that are allowed, are ever connected to."""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import httpcore
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.media.addresses import CheckedNetwork, is_allowed, reached
from app.media.limits import Refused
from tests.media.support import Recorder

PRIVATE = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",
    "172.16.0.1",
    "192.168.1.1",
    "192.0.2.1",
    "198.18.0.1",
    "203.0.113.9",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:0:127.0.0.1",
    "64:ff9b::10.0.0.1",
    "64:ff9b::169.254.169.254",
    "64:ff9b:1::1",
    "100::1",
    "2001:db8::1",
    "2002:7f00:1::1",
    "2002:a00:1::",
    "2001:0:4136:e378:8000:63bf:f5ff:fffe",
    "fc00::1",
    "fd12::1",
    "fe80::1",
    "fe80::1%1",
    "fec0::1",
    "ff02::1",
]
PUBLIC = ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "64:ff9b::8.8.8.8", "::ffff:8.8.8.8", "2002:808:808::1"]


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_public_is_not_allowed(address: str) -> None:
    assert not is_allowed(ip_address(address), [])


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_allowed(address: str) -> None:
    assert is_allowed(ip_address(address), [])


@pytest.mark.parametrize(
    ("address", "network", "expected"),
    [
        ("10.1.2.3", "10.0.0.0/8", True),
        ("11.1.2.3", "10.0.0.0/8", True),
        ("10.1.2.3", "10.2.0.0/16", False),
        ("127.0.0.1", "10.0.0.0/8", False),
        ("::1", "::1/128", True),
        ("::1", "127.0.0.0/8", False),
        ("::ffff:10.1.2.3", "10.0.0.0/8", True),
        ("::ffff:127.0.0.1", "10.0.0.0/8", False),
        ("64:ff9b::10.1.2.3", "10.0.0.0/8", True),
        ("64:ff9b::127.0.0.1", "64:ff9b::/96", False),
        ("fd00::1", "fd00::/8", True),
    ],
)
def test_a_network_may_be_allowed(address: str, network: str, expected: bool) -> None:
    assert is_allowed(ip_address(address), [ip_network(network)]) is expected


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_in_any_of_its_ipv6_forms_is_judged_as_itself(address: IPv4Address) -> None:
    number = int(address)
    forms = [
        IPv6Address(0xFFFF << 32 | number),
        IPv6Address(int(IPv6Address("64:ff9b::")) | number),
        IPv6Address(0x2002 << 112 | number << 80),
        IPv6Address(0x20010000 << 96 | number ^ 0xFFFFFFFF),
    ]
    for form in forms:
        assert reached(form) == address
        assert is_allowed(form, []) == is_allowed(address, [])


@given(st.ip_addresses())
def test_whatever_is_allowed_is_public_to_python_as_well(address: IPv4Address | IPv6Address) -> None:
    if is_allowed(address, []):
        assert reached(address).is_global


async def connect(names: dict[str, list[str]], host: str, networks: Sequence[str] = ()) -> Recorder:
    recorder = Recorder(names)
    network = CheckedNetwork(networks, recorder.resolve, recorder)
    with pytest.raises((Refused, httpcore.ConnectError)) as caught:
        await network.connect_tcp(host, 80)
    network.close()
    assert isinstance(caught.value, Refused) == (not recorder.connected)
    return recorder


async def test_what_is_connected_to_is_the_checked_address_not_the_name() -> None:
    recorder = await connect({"cdn.example.com": ["8.8.8.8"]}, "cdn.example.com")

    assert recorder.connected == [("8.8.8.8", 80)]
    assert recorder.looked_up == ["cdn.example.com"]


@pytest.mark.parametrize("address", PRIVATE)
async def test_nothing_is_connected_to_when_the_name_is_one_of_a_private_address(address: str) -> None:
    assert (await connect({"cdn.example.com": [address]}, "cdn.example.com")).connected == []


async def test_one_private_address_among_public_ones_is_enough_to_refuse() -> None:
    assert (await connect({"a": ["8.8.8.8", "10.0.0.1"]}, "a")).connected == []


async def test_a_name_without_addresses_is_refused() -> None:
    assert (await connect({}, "a")).connected == []


async def test_the_next_address_is_tried_ipv4_first() -> None:
    recorder = await connect({"a": ["2606:4700::1", "8.8.8.8", "1.1.1.1"]}, "a")

    assert [address for address, _ in recorder.connected] == ["8.8.8.8", "1.1.1.1", "2606:4700::1"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "0177.0.0.1", "127.1", "0", "::1"])
async def test_no_way_of_writing_this_machine_gets_past_the_systems_own_look_up(host: str) -> None:
    recorder = Recorder()
    network = CheckedNetwork((), inner=recorder)

    with pytest.raises(Refused, match=r"not at a public address|cannot be resolved"):
        await network.connect_tcp(host, 80)

    assert recorder.connected == []
    network.close()


async def test_a_name_that_cannot_be_resolved_is_refused() -> None:
    network = CheckedNetwork((), inner=Recorder())
    for host in ("a" * 300, "bad..name"):
        with pytest.raises(Refused, match="cannot be resolved"):
            await network.connect_tcp(host, 80)
    network.close()


async def test_sockets_of_this_machine_are_out_of_reach() -> None:
    with pytest.raises(Refused):
        await CheckedNetwork(()).connect_unix_socket("/run/docker.sock")
