"""A small internet in network namespaces, with the kernel's address translation at the routers of its sites.

The internet is a router in a namespace of its own. Each site has a public network 5.N.0.0/24, of which 5.N.0.1 is the
internet's end and 5.N.0.2 belongs to the site's host or router. miniupnpd takes the ranges for documentation
(203.0.113.0/24 and others) for private ones, so real addresses stand in: packets of a lab never leave it. All homes
use the same private network, as most homes do. The internet drops what is sent to a private address without a word.

A lab may have IPv6 beside it. Then each public host, and each host behind a router of the kind ``DUAL``, has a global
address of it: 2a00:N:1::2 and 2a00:N:2::H. Routers translate no IPv6, and let through what was asked for from inside.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tests.nat.delay import DelayLine
from tests.nat.namespaces import LabError, Namespaces, inside, ip, ip_json, link, may_map_ports, run, settings
from tests.nat.routers import (
    FORWARDED_PORT,
    LAN,
    WAN,
    PortMappingDaemon,
    forget_connections,
    make_filter6,
    make_router,
    mapped_ports,
)

HOME_LAN = "192.168.1"
PROVIDERS_LAN = "100.64.0"
MAX_SITES = 200
INTERFACE = "eth0"
"""The interface of every host."""

# Bucket and queue of a limited link, as scripts/benchmarks/netns.py has them.
_BURST_SECONDS = 0.004
_LEAST_BURST_BYTES = 32 * 1024
_QUEUE_SECONDS = 0.05
_LEAST_QUEUE_BYTES = 64 * 1024


class Kind(StrEnum):
    """Kinds of sites."""

    PUBLIC = "public"
    """No router: the host has a public address."""
    FORWARDED = "forwarded"
    """A router that keeps ports, of which one port is forwarded to the first host."""
    UPNP = "upnp"
    """A router that keeps ports, and maps ports for hosts that ask by UPnP or NAT-PMP."""
    CONE = "cone"
    """A router that keeps ports and drops what comes unasked."""
    REJECTING = "rejecting"
    """A router that keeps ports and answers what comes unasked with a reset, as RFC 5382 forbids and some do."""
    SYMMETRIC = "symmetric"
    """A router that gives each connection a random port."""
    DUAL = "dual"
    """A router that is symmetric for IPv4, and only filters IPv6; for a lab with IPv6."""
    CGNAT = "cgnat"
    """A router that keeps ports, behind a provider's router that does too."""


@dataclass
class Site:
    """One public address, with the hosts behind it."""

    kind: Kind
    index: int
    lan: str = HOME_LAN
    router: str = ""
    """Namespace of the router; empty at a public site."""
    provider: str = ""
    """Namespace of the provider's router, if there is one."""
    port_mapping: PortMappingDaemon | None = None
    """The daemon of the router, if it maps ports."""
    hosts: list[Host] = field(default_factory=list)
    made: int = 0
    """Number of the hosts that were ever made here, from which their addresses follow."""

    @property
    def public(self) -> str:
        """The address of this site that others see."""
        return f"5.{self.index}.0.2"

    @property
    def edge(self) -> str:
        """The namespace that has the public address."""
        return self.provider or self.router or self.hosts[0].namespace

    def mapped_ports(self) -> set[int]:
        """Return the outer ports that the router has mapped because a host asked for it."""
        return mapped_ports(self.router) if self.kind is Kind.UPNP else set()


@dataclass
class Host:
    """One computer, in a namespace of its own."""

    namespace: str
    site: Site
    address: str
    address6: str = ""
    """The host's address of IPv6; empty if it has none."""

    @property
    def listen(self) -> list[str]:
        """The addresses on which a peer of this host listens."""
        port = FORWARDED_PORT if self.is_forwarded else 0
        return [f"/ip4/0.0.0.0/tcp/{port}", *(["/ip6/::/tcp/0"] if self.address6 else [])]

    @property
    def announce(self) -> list[str]:
        """The address that a user of this host has to announce, because only the user knows of it."""
        return [f"/ip4/{self.site.public}/tcp/{FORWARDED_PORT}"] if self.is_forwarded else []

    @property
    def is_forwarded(self) -> bool:
        """Return whether the site's forwarded port leads to this host."""
        return self.site.kind is Kind.FORWARDED and self.site.hosts[:1] == [self]

    def bytes(self) -> tuple[int, int]:
        """Return how many bytes the host has sent and received, with the headers of all layers."""
        found = ip_json(self.namespace, "-s", "link", "show", INTERFACE)[0]["stats64"]
        return found["tx"]["bytes"], found["rx"]["bytes"]

    def connections(self) -> list[tuple[str, int, str, int]]:
        """Return the established TCP connections: own address and port, address and port of the other end."""
        found = []
        for line in inside(self.namespace, "ss", "-Htn", "state", "established").splitlines():
            ends = [end.rpartition(":") for end in line.split()[2:4]]
            (own, _, own_port), (other, _, other_port) = ends
            found.append((_plain(own), int(own_port), _plain(other), int(other_port)))
        return found


def _plain(address: str) -> str:
    return address.strip("[]").removeprefix("::ffff:").partition("%")[0]


class Lab:
    """A small internet. Made by :func:`lab`."""

    def __init__(
        self, namespaces: Namespaces, folder: Path, stack: ExitStack, delay_ms: float, ipv6: bool
    ) -> None:
        self._namespaces = namespaces
        self._ipv6 = ipv6
        self._stack = stack
        self.folder = folder
        """For the files of the lab, such as the logs of peers."""
        self._internet = namespaces.add("net")
        settings(self._internet, ipv4__ip_forward=1)
        private = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
        ip(self._internet, *(f"route add blackhole {network}" for network in private))
        if ipv6:
            settings(self._internet, ipv6__conf__all__forwarding=1)
        self._sites: list[Site] = []
        self._hosts = 0
        self._delay = None
        if delay_ms > 0:
            self._delay = DelayLine(self._internet, delay_ms / 1000)
            stack.callback(self._delay.stop)

    def site(
        self,
        kind: Kind,
        hosts: int = 1,
        *,
        lan: str = HOME_LAN,
        rate_mbps: float | None = None,
        provider_of: Site | None = None,
    ) -> Site:
        """Add a site.

        Args:
            hosts: number of hosts, of which a public site has one.
            lan: the first three numbers of the home's private network.
            rate_mbps: of the site's link to the internet, each way; ``None`` is without limit.
            provider_of: for CGNAT, a site whose provider serves this one too. Both then have one public address.
        """
        index = len(self._sites) + 1
        if index > MAX_SITES:
            raise LabError(f"a lab has at most {MAX_SITES} sites")
        site = Site(kind, index, lan)
        self._sites.append(site)
        if kind is not Kind.PUBLIC:
            site.router = self._namespaces.add(f"router{index}")
            self._attach_router(site, provider_of)
            self._make_lan(site)
        for _ in range(hosts):
            self.host(site)
        if rate_mbps is not None:
            _limit(site.edge, WAN if site.router else INTERFACE, rate_mbps)
            _limit(self._internet, f"site{site.index}", rate_mbps)
        return site

    def host(self, site: Site) -> Host:
        """Add a host to a site."""
        self._hosts += 1
        host = Host(self._namespaces.add(f"host{self._hosts}"), site, "")
        self._attach_host(host, site)
        return host

    def move(self, host: Host, site: Site) -> None:
        """Take a host to another site, as a laptop is taken: its interface loses one address and gets another."""
        if host.site.kind is Kind.PUBLIC or site.kind is Kind.PUBLIC:
            raise LabError("hosts move between homes only")
        ip(host.namespace, f"link delete {INTERFACE}")
        host.site.hosts.remove(host)
        self._attach_host(host, site)

    def forget(self, site: Site) -> None:
        """Let the site's routers forget all connections and mappings, as if they had been restarted."""
        for router in filter(None, (site.router, site.provider)):
            forget_connections(router)

    def forget_idle(self, site: Site, seconds: int) -> None:
        """Let the site's routers forget connections from now on that carry nothing for so many seconds."""
        for router in filter(None, (site.router, site.provider)):
            settings(router, netfilter__nf_conntrack_tcp_timeout_established=seconds)

    def cut(self, site: Site) -> None:
        """Cut the site's link to the internet."""
        ip(self._internet, f"link set site{site.index} down")

    def mend(self, site: Site) -> None:
        """Mend a link that was cut."""
        ip(self._internet, f"link set site{site.index} up")

    def _attach_router(self, site: Site, provider_of: Site | None) -> None:
        if site.kind is not Kind.CGNAT:
            self._attach_to_internet(site.router, WAN, site.index)
        else:
            if provider_of is None:
                site.provider = self._namespaces.add(f"provider{site.index}")
                self._attach_to_internet(site.provider, WAN, site.index)
                ip(site.provider, "link add name inside type bridge", "link set inside up")
                ip(site.provider, f"address add {PROVIDERS_LAN}.1/24 dev inside")
                make_router(site.provider)
            else:
                site.provider, site.index = provider_of.provider, provider_of.index
            self._attach_to_provider(site)
        make_router(
            site.router,
            symmetric=site.kind in (Kind.SYMMETRIC, Kind.DUAL),
            rejects=site.kind is Kind.REJECTING,
            forward_to=f"{site.lan}.2" if site.kind is Kind.FORWARDED else "",
            port=FORWARDED_PORT,
        )

    def _attach_to_provider(self, site: Site) -> None:
        number = len(self._sites)
        link(site.router, WAN, site.provider, f"home{number}")
        ip(site.provider, f"link set home{number} master inside")
        ip(
            site.router,
            f"address add {PROVIDERS_LAN}.{number + 1}/24 dev {WAN}",
            f"route add default via {PROVIDERS_LAN}.1",
        )

    def _attach_to_internet(self, namespace: str, interface: str, index: int) -> None:
        link(namespace, interface, self._internet, f"site{index}")
        ip(self._internet, f"address add 5.{index}.0.1/24 dev site{index}")
        if self._delay is not None:
            self._delay.delay(f"site{index}")
        ip(namespace, f"address add 5.{index}.0.2/24 dev {interface}", f"route add default via 5.{index}.0.1")
        if self._ipv6:
            ip(self._internet, f"address add 2a00:{index}:1::1/64 dev site{index} nodad")
            ip(
                namespace,
                f"address add 2a00:{index}:1::2/64 dev {interface} nodad",
                f"route add default via 2a00:{index}:1::1",
            )

    def _make_lan(self, site: Site) -> None:
        ip(site.router, f"link add name {LAN} type bridge", f"link set {LAN} up")
        ip(site.router, f"address add {site.lan}.1/24 dev {LAN}")
        if self._has_ipv6(site):
            ip(site.router, f"address add 2a00:{site.index}:2::1/64 dev {LAN} nodad")
            ip(self._internet, f"route add 2a00:{site.index}:2::/64 via 2a00:{site.index}:1::2")
            make_filter6(site.router)
        if site.kind is Kind.UPNP:
            if reason := may_map_ports():
                raise LabError(reason)
            site.port_mapping = PortMappingDaemon(site.router, self.folder)
            self._stack.callback(site.port_mapping.stop)

    def _attach_host(self, host: Host, site: Site) -> None:
        host.site = site
        site.hosts.append(host)
        site.made += 1
        if site.kind is Kind.PUBLIC:
            host.address = site.public
            host.address6 = f"2a00:{site.index}:1::2" if self._ipv6 else ""
            self._attach_to_internet(host.namespace, INTERFACE, site.index)
            return
        host.address = f"{site.lan}.{site.made + 1}"
        port = f"host{site.made}"
        link(host.namespace, INTERFACE, site.router, port)
        ip(site.router, f"link set {port} master {LAN}")
        ip(
            host.namespace,
            f"address add {host.address}/24 dev {INTERFACE}",
            f"route add default via {site.lan}.1",
        )
        if self._has_ipv6(site):
            host.address6 = f"2a00:{site.index}:2::{site.made + 1}"
            ip(
                host.namespace,
                f"address add {host.address6}/64 dev {INTERFACE} nodad",
                f"route add default via 2a00:{site.index}:2::1",
            )

    def _has_ipv6(self, site: Site) -> bool:
        return self._ipv6 and site.kind is Kind.DUAL


@contextmanager
def lab(delay_ms: float = 0.0, *, ipv6: bool = False) -> Iterator[Lab]:
    """Provide a lab without sites, and remove it on every kind of exit.

    Args:
        delay_ms: of each packet between two sites, one way.
        ipv6: give IPv6 to public hosts and to sites of the kind ``DUAL``.

    Raises:
        LabError: :func:`tests.nat.namespaces.may_run` says why.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="p2pavg-lab-")))
        namespaces = stack.enter_context(Namespaces())
        yield Lab(namespaces, folder, stack, delay_ms, ipv6)


def _limit(namespace: str, interface: str, rate_mbps: float) -> None:
    bytes_a_second = rate_mbps * 1e6 / 8
    burst = int(max(bytes_a_second * _BURST_SECONDS, _LEAST_BURST_BYTES))
    limit = burst + int(max(bytes_a_second * _QUEUE_SECONDS, _LEAST_QUEUE_BYTES))
    bucket = f"rate {rate_mbps * 1e6:.0f}bit burst {burst} limit {limit}".split()
    run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *bucket)
