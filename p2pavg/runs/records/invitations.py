"""The protocol of invitation links: a newcomer sends a token, and the delegate answers with a certificate.

The newcomer is authenticated by the stream, so a certificate is never for another peer than the one that asks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import trio
from msgspec import Meta

from p2pavg.base.errors import (
    BootstrapError,
    ClosedError,
    ConfigError,
    InvitationError,
    RemoteProtocolError,
    StreamBrokenError,
    UnreachableError,
)
from p2pavg.base.files import PRIVATE, read_text, replace_file
from p2pavg.base.limits import MAX_CERTIFICATE_BYTES, REPLY_SECONDS
from p2pavg.base.messages import Message, cut
from p2pavg.base.threads.workers import RunInThread
from p2pavg.net.transport import PeerId, Stream, Transport, receive_message, send_message
from p2pavg.runs.membership.certificate import (
    Certificate,
    MemberCertificateError,
    Role,
    date_of,
    read_certificate,
    refusal,
)
from p2pavg.runs.membership.membership import Membership
from p2pavg.runs.membership.run_file import MAX_RUN_FILE_BYTES, RunFile, parse_run_file
from p2pavg.runs.membership.tokens import (
    MAX_TOKEN_BYTES,
    MAX_USED_BYTES,
    InvitationLink,
    UsedTokens,
    certify,
    parse_used_tokens,
    read_token,
    token_key,
)
from p2pavg.runs.records.bootstrap import BootstrapDials
from p2pavg_dht import Ed25519Signer

logger = logging.getLogger(__name__)

PROTOCOL = "/p2pavg/invite/2"
MAX_STREAMS = 8  # that a delegate serves at once, one of each peer
MAX_REQUEST_BYTES = MAX_TOKEN_BYTES + 16
MAX_ANSWER_BYTES = 8192
MAX_REASON_CHARS = 300
REDEEM_SECONDS = 2 * REPLY_SECONDS
_ONLINE = (
    "start the program on the machine that made the link, and then this one again: links work while it runs. If it"
    " runs, `p2pavg doctor` on both machines finds what lies between them; `p2pavg run link FOLDER --address` makes a"
    " link to another address"
)


class TokenRequest(Message, frozen=True, tag=2):
    """A newcomer's request."""

    token: Annotated[bytes, Meta(max_length=MAX_TOKEN_BYTES)]


class AdmissionAnswer(Message, frozen=True, kw_only=True, tag=2):
    """The delegate's answer: the run file and the newcomer's certificate, or the reason why there is none."""

    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARS)] = ""
    run_file: Annotated[str, Meta(max_length=MAX_RUN_FILE_BYTES)] = ""
    certificate: Annotated[bytes, Meta(max_length=MAX_CERTIFICATE_BYTES)] = b""

    def __post_init__(self) -> None:
        # The delegate's words go to the newcomer's terminal.
        cut(self, reason=MAX_REASON_CHARS)


@dataclass(frozen=True, slots=True)
class Delegate:
    """A delegate's run, identity and memory.

    Args:
        run: the run file, which newcomers get.
        membership: the delegate's own one. While it refuses the delegate, no peer is admitted.
        seed: private key of the delegate's identity.
        used_file: file of the links that were used, made when missing.

    Raises:
        ConfigError: the delegate's certificate does not let it admit peers.
    """

    run: RunFile
    membership: Membership
    seed: bytes
    used_file: Path

    def __post_init__(self) -> None:
        if Role.DELEGATE not in self.membership.access.roles:
            raise ConfigError(
                "certificate: it does not have the role delegate; ask the run's operator for one that "
                "`p2pavg run delegate` has made"
            )


class Invitations:
    """Serves invitation links as a delegate.

    Raises:
        ConfigError: the file of used links cannot be read or is damaged; the message names it.
    """

    def __init__(
        self, delegate: Delegate, *, wall_clock: Callable[[], float], run_in_thread: RunInThread
    ) -> None:
        self._delegate = delegate
        self._wall_clock = wall_clock
        self._run_in_thread = run_in_thread
        self._key = token_key(delegate.seed, delegate.run.authority)
        self._signer = Ed25519Signer(delegate.seed)
        self._used = _read_used(delegate.used_file)
        self._unsaved = False
        self._saving = trio.Lock()
        self._served: set[PeerId] = set()

    async def serve(self, stream: Stream) -> None:
        """Answer one newcomer. A peer beyond the limits loses its stream."""
        # The end of the stream tells the newcomer that this delegate is busy.
        if len(self._served) >= MAX_STREAMS or stream.remote in self._served:
            return
        with self._place(stream.remote), trio.move_on_after(REPLY_SECONDS):
            request = await receive_message(stream, max_bytes=MAX_REQUEST_BYTES)
            if request is None:
                return
            token = TokenRequest.decode(request).token
            try:
                certificate = await self._admit(stream.remote, token)
            except InvitationError as error:
                answer = AdmissionAnswer(reason=str(error))
            else:
                answer = AdmissionAnswer(run_file=self._delegate.run.text, certificate=certificate.data)
                logger.info("admitted %s with an invitation link", stream.remote)
            await send_message(stream, answer.encode())
            await stream.aclose()

    @contextmanager
    def _place(self, peer_id: PeerId) -> Iterator[None]:
        self._served.add(peer_id)
        try:
            yield
        finally:
            self._served.discard(peer_id)

    async def _admit(self, peer_id: PeerId, data: bytes) -> Certificate:
        """Return a newcomer's certificate. Raise InvitationError with a sentence for it."""
        try:
            # First, because it checks that this delegate has made the token. Nothing else in it is believed before.
            token = read_token(self._key, data)
        except RemoteProtocolError:
            raise InvitationError(
                "this delegate has not made this link, or the link is damaged; copy all of it"
            ) from None
        now = self._wall_clock()
        membership = self._delegate.membership
        # Members would refuse what a delegate signs whose own certificate was revoked or has expired.
        if (wrong := membership.own_refusal(now)) is not None:
            raise InvitationError(f"this delegate admits no peer: {wrong}")
        # The peer that has used the link may ask again, since the first answer may have been lost.
        if (wrong := self._used.refusal(token, peer_id, now)) is not None:
            raise InvitationError(wrong)
        own = read_certificate(membership.access.certificate)
        try:
            certificate = certify(token, peer_id, own, self._signer.sign)
        except MemberCertificateError as error:
            raise InvitationError(f"this delegate can no longer grant what the link says: {error}") from None
        # No wait stands between the check above and this line, so two streams cannot both use one token.
        self._unsaved |= self._used.use(token, peer_id, now)
        await self._save()
        return certificate

    async def _save(self) -> None:
        """Write the used links before the newcomer hears that it is admitted."""
        # One write after the other, so that no older text replaces a newer one.
        async with self._saving:
            if not self._unsaved:
                return
            # The flag is cleared before the write: a use that is noted meanwhile sets it again, and is written next.
            file, text = self._delegate.used_file, self._used.text
            self._unsaved = False
            saved = False
            try:
                await self._run_in_thread(partial(replace_file, file, text.encode("ascii"), mode=PRIVATE))
                saved = True
            except OSError as error:
                logger.error("cannot write the used links %s: %s", file, error.strerror)  # noqa: TRY400
                raise InvitationError(
                    "the delegate cannot note that the link is used; try again later"
                ) from None
            finally:
                # After a cancellation it is not known whether the file was written.
                self._unsaved |= not saved


def _read_used(file: Path) -> UsedTokens:
    if not file.exists():
        return UsedTokens()
    text = read_text(file, "file of used links", max_bytes=MAX_USED_BYTES)
    try:
        return parse_used_tokens(text)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


async def redeem(transport: Transport, link: InvitationLink, *, now: float) -> tuple[RunFile, Certificate]:
    """Ask the delegate of a link for this peer's certificate.

    Args:
        now: wall clock, seconds.

    Returns:
        The run file, and a valid certificate of its run for this peer.

    Raises:
        UnreachableError: the delegate could not be reached within 20 s, or did not answer within 20 s more.
        InvitationError: the delegate refused the link, or its answer is none.
    """
    # The program on the delegate's machine may have been started a moment ago, and not listen yet.
    dials = BootstrapDials(transport, [link.address], each=REDEEM_SECONDS, seconds=REDEEM_SECONDS)
    try:
        await dials.until_one_answers()
    except BootstrapError as error:
        raise UnreachableError(
            f"the peer that made the link did not answer: {error}", remedy=_ONLINE
        ) from None
    answer = None
    with trio.move_on_after(REDEEM_SECONDS):
        stream = await transport.open_stream(
            link.delegate, PROTOCOL, addresses=[link.address], timeout=REDEEM_SECONDS
        )
        try:
            await send_message(stream, TokenRequest(link.token).encode())
            answer = await receive_message(stream, max_bytes=MAX_ANSWER_BYTES)
        except (StreamBrokenError, ClosedError, RemoteProtocolError) as error:
            raise UnreachableError(f"the delegate gave no answer; try again: {error}") from None
        finally:
            await stream.reset()
    if answer is None:
        raise UnreachableError("the delegate gave no answer; it may be busy: try again")
    return _read_answer(answer, transport.peer_id, link.delegate, now)


def _read_answer(answer: bytes, peer_id: PeerId, delegate: PeerId, now: float) -> tuple[RunFile, Certificate]:
    try:
        said = AdmissionAnswer.decode(answer)
        if said.reason:
            raise InvitationError(said.reason)
        run = parse_run_file(said.run_file)
        certificate = read_certificate(said.certificate)
    except (RemoteProtocolError, ConfigError) as error:
        raise InvitationError(f"the delegate's answer is damaged: {error}") from None
    # Run file and certificate come from the same delegate. This shows that they fit together, and not whose run it is.
    wrong = refusal(said.certificate, authority=run.authority, peer_id=peer_id, now=now)
    if wrong is None and (certificate.issuer is None or certificate.issuer.peer_id != delegate):
        wrong = "another peer has signed it"
    if wrong is not None and now < certificate.not_before:
        # Signed a moment ago, by the delegate's clock.
        raise InvitationError(
            f"this machine's clock, which says {date_of(now)}, or the delegate's is wrong: {wrong}",
            remedy="set the clock, and start the command again: the link is still this peer's",
        )
    if wrong is not None:
        raise InvitationError(f"the delegate sent a certificate that is not valid: {wrong}")
    return run, certificate
