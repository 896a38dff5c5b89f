"""Contacts: a peer id, and addresses at which the peer may be reached. No I/O, no clock."""

import re
from dataclasses import dataclass

from p2pavg_dht.identity import PeerIdError, public_key_of

MAX_ADDRESSES = 16
# The longest in use, a relayed WebSocket address with two peer ids, has about 200 characters.
MAX_ADDRESS_LENGTH = 256
_PRINTABLE = re.compile(r"/[!-~]+")


class ContactError(ValueError):
    """A contact is invalid; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Contact:
    """A peer id and at most 16 addresses, each printable ASCII of at most 256 characters that begins with "/".

    Addresses are hints: the peer that answers there must prove its id to the transport. The constructor raises
    ContactError if a part is invalid.
    """

    peer_id: str
    addresses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if type(self.peer_id) is not str:
            raise ContactError("a peer id is a text")
        try:
            public_key_of(self.peer_id)
        except PeerIdError as error:
            raise ContactError(str(error)) from error
        check_addresses(self.addresses)


def check_addresses(addresses: object) -> None:
    """Raise ContactError unless `addresses` is a tuple of at most 16 possible multiaddresses."""
    if type(addresses) is not tuple or len(addresses) > MAX_ADDRESSES:
        raise ContactError(f"a contact has a tuple of at most {MAX_ADDRESSES} addresses")
    for address in addresses:
        _check_address(address)


def _check_address(address: object) -> None:
    if type(address) is not str or not 1 < len(address) <= MAX_ADDRESS_LENGTH:
        raise ContactError(f"an address is a text of 2 to {MAX_ADDRESS_LENGTH} characters")
    # Addresses appear in logs and terminals: no blanks, no control characters, no look-alikes.
    if _PRINTABLE.fullmatch(address) is None:
        raise ContactError('an address is printable ASCII and begins with "/"')
