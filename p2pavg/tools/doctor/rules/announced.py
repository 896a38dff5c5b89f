"""Addresses that the user wants to announce. No I/O, no clock, no random source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2pavg.net.limits.sources import parse_host
from p2pavg.tools.doctor.findings import Finding, fault, not_known, ok, warning

NAME = "announced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """An address to announce, and what other peers have found out about it."""

    address: str
    host: str
    port: int
    seen_at: tuple[str, ...] = ()
    """IP addresses at which the asked peers see this machine."""
    reached: int = 0
    """Peers that have dialled the address."""
    failures: tuple[str, ...] = ()
    """The reason of each peer that could not dial it."""


def judge_announced(found: Sequence[Announced], *, listens: bool) -> list[Finding]:
    """Judge each address to announce.

    Args:
        listens: false if the examined peer's port could not be listened on, for example because the peer runs.
    """
    if found and not listens:
        return [not_known(NAME, "the port could not be listened on, so no peer could be asked to dial it")]
    return [_judge(each) for each in found]


def _judge(each: Announced) -> Finding:
    if each.reached:
        return ok(NAME, f"{each.reached} other peer{'s' if each.reached > 1 else ''} dialled {each.address}")
    same = [host for host in each.seen_at if _version(host) == _version(each.host)]
    if not same:
        return not_known(
            NAME, f"no peer that could be asked is connected over the kind of IP of {each.address}"
        )
    if each.host not in same:
        return warning(
            NAME,
            f"others see this machine at {', '.join(sorted(set(same)))}, and not at {each.host}",
            f"{each.address} is another machine's address, or an earlier one of this machine",
            "announce the address at which others see this machine, or leave out --announce",
        )
    if not each.failures:
        return not_known(NAME, f"no peer was willing to dial {each.address}")
    return fault(
        NAME,
        f"others cannot dial {each.address}",
        each.failures[0],
        f"forward port {each.port} of the router to the port of --listen on this machine, and allow it in the "
        "firewall; or leave out --announce",
    )


def _version(host: str) -> int | None:
    address = parse_host(host)
    return None if address is None else address.version
