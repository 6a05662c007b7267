"""Connections to checked addresses: a host is looked up once, and only what was checked is connected to."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, TypeAlias

import httpcore

from app.media.limits import Refused

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network
Resolver: TypeAlias = Callable[[str, int], Awaitable[list[str]]]

GLOBAL_UNICAST = ip_network("2000::/3")
NAT64 = ip_network("64:ff9b::/96")
ATTEMPT_S = 0.5
"""Longest attempt at one of several addresses, in seconds: a route for IPv6 may lead nowhere."""
CONNECT_S = 5.0
"""Longest attempt at a single one: one whose caller has gone ends by then."""
MAX_LOOKUPS = 16


def is_public(address: Address) -> bool:
    """Whether an address is one of the internet's, and belongs to a single host."""
    if address.is_multicast or address.is_reserved or address.is_unspecified or not address.is_global:
        return False
    return isinstance(address, IPv4Address) or address in GLOBAL_UNICAST


def reached(address: Address) -> Address:
    """Where packets for an address end: some of IPv6 are IPv4 addresses behind a translator or tunnel."""
    if isinstance(address, IPv4Address):
        return address
    if address in NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    tunnel = address.teredo[1] if address.teredo else None
    return address.ipv4_mapped or address.sixtofour or tunnel or address


def is_allowed(address: Address, networks: Iterable[Network]) -> bool:
    """Whether an address is public, or in one of the networks that are allowed all the same."""
    end = reached(address)
    return is_public(end) or any(end.version == network.version and end in network for network in networks)


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """The network of a connection pool, in which only allowed addresses can be connected to.

    Args:
        networks: those that are not public and may be reached all the same.
        resolve: host and port to addresses; default: the system's, on threads of its own.
        inner: makes the connection, to an address.
    """

    def __init__(
        self,
        networks: Sequence[str],
        resolve: Resolver | None = None,
        inner: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self._networks = [ip_network(network) for network in networks]
        # Not the loop's own threads: a name server that is silent would take them all.
        self._lookups = ThreadPoolExecutor(max_workers=MAX_LOOKUPS, thread_name_prefix="media-lookup")
        self._resolve = resolve or self._look_up
        self._inner = inner or httpcore.AnyIOBackend()
        self._closing: set[asyncio.Task[None]] = set()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first of a host's addresses that answers.

        Raises:
            Refused: one of its addresses is not allowed, or it has none.
        """
        addresses = await self._allowed(host, port)
        limit = CONNECT_S if len(addresses) == 1 else ATTEMPT_S
        for address in addresses[:-1]:
            try:
                return await self._connect(address, port, limit)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._connect(addresses[-1], port, limit)

    async def _connect(self, address: str, port: int, limit_s: float) -> httpcore.AsyncNetworkStream:
        """Connect in a task of its own: cut off half-way, the library would leave the socket open."""
        task = asyncio.ensure_future(self._inner.connect_tcp(address, port, limit_s))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            closing = asyncio.ensure_future(_close(task))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            raise

    async def _allowed(self, host: str, port: int) -> list[str]:
        addresses = await self._resolve(host, port)
        if not addresses:
            raise Refused(f"{host:.100} has no address")
        if not all(is_allowed(ip_address(address), self._networks) for address in addresses):
            raise Refused(
                f"{host:.100} is not at a public address, nor in one of the service's setting allowed_media_networks"
            )
        return sorted(addresses, key=lambda address: ":" in address)

    async def _look_up(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._lookups, _addresses, host, port)
        except (OSError, UnicodeError) as error:
            raise Refused(f"{host:.100} cannot be resolved") from error
        return found

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Never."""
        raise Refused("sockets of this machine are not connected to")

    async def sleep(self, seconds: float) -> None:
        """Wait between attempts; the pool makes one only."""
        await asyncio.sleep(seconds)

    def close(self) -> None:
        """Start no more look-ups."""
        self._lookups.shutdown(wait=False, cancel_futures=True)


async def _close(connecting: "asyncio.Future[httpcore.AsyncNetworkStream]") -> None:
    """Close a connection that nobody waits for any more, once it is there."""
    with contextlib.suppress(Exception):
        await (await connecting).aclose()


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
