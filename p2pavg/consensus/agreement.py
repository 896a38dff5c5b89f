"""One member's state machine for the agreement on how a round ends, as a table of transitions.

It has no I/O, no clock and no random source. :func:`advance` takes an event and returns the member's next state and the
actions to carry out. ``docs/explanation/round.md`` explains the protocol, and its diagram is generated from
:data:`TABLE`. Members are named by their position in the roster.

Theory of operation
-------------------

**The problem.** After the exchange of parts, each member must know whether the others hold the same result before it
uses the result. Members crash, pause, lose connections, and may lie. They share no clock.

**The guarantees.** No two honest members commit different results. A member commits only if every member of the
ballot's view has said that it holds the result. A contribution counts at most once. Every member that stays alive ends
its round.

**The protocol** is Paxos (Lamport 1998) with one decision, where the value is a result: an attempt, its members, and
the view, i.e. the members that must hold it. Ballots have numbers, and the number names the ballot's leader. A member
follows the first member of the roster that it has not lost.

* Ballot 0 begins by itself with all members (:class:`RunAttempt`). Each member that completes the attempt *accepts* and
  tells its leader (``ResultHeld``), with its signature. The leader commits when all members of the view hold the same
  digests, and sends ``ResultCommit`` with these signatures.
* When a member loses another one, it tells its leader (``Trouble``). A leader that cannot commit *prepares* the next
  ballot (``Gather``). Each member answers with a *promise* (``Promise``), which says what it holds and what it accepted
  last, and tells it to all members. After a promise to a newer ballot a member refuses all older ones (``StaleBallot``
  is the nack).
* From a quorum of promises :func:`~p2pavg.consensus.choice.choose` picks the ballot's value (``Begin``). If an older
  ballot may have committed a result, the value is that result. Otherwise it is an attempt among the members that are
  left.
* If too few members answer, a member waits (*astray*) until it hears how the round ended.

**The proof.** A member signs the group, the attempt, the attempt's members and the digest of the whole result. It
signs neither ballot nor view: what a member holds does not depend on who asks, and one signature serves all ballots
about one result. A commit counts for a member if every member of the attempt that needs the result has signed, except
those that this member has lost itself (``proven``).

* *Why all, and not a quorum:* a commit ends the round for all that are counted in it. Each of them must have the
  result, or its contribution is used up for nothing.
* *Why a lost member may be missing:* it may be dead, and its ballot's view excludes it. No member can prove to others
  that a process has ended, so each member relies on what it saw itself. A leader's view is no reason: a leader that
  lies could begin a ballot about an old result with one other member as its view. So a member waits with a commit
  until it has lost the missing members as well, or has their signatures.
* *Why a member that gave up may not be missing:* it keeps its contribution, so a result may count it only when it is
  dead.
* *What a member without the result believes:* that it was passed over, if the others are a quorum, all that have
  signed say so, and the leader of the attempt has not signed. The others take over a result only when its leader does
  not answer, and one of them alone may lie.
* *Auxiliaries* need no result. They sign nothing, send no digests, and no commit waits for them.

Signatures are checked before a vote comes here (``p2pavg.round.signing``). A signature that does not verify, and a
commit that is impossible, cost their sender. A commit with too few signatures costs no member: an honest member passes
on what was enough for itself, and another one may have lost fewer members.

**The release.** A leader may lie, so a member does not follow a ballot at its word alone. Every other holder that it
has not lost itself has to have promised that ballot, or a newer one, to it directly (``is_released``). And a member
that has promised commits the result of an attempt before that ballot only when every other such holder says that it
follows the same commit, or has given up with that result (``is_confirmed``). So two honest members that have not lost
each other do not end with different results.

* *Why promises are not signed:* each member hears them from their senders themselves, over authenticated streams. None
  is passed on, so a signature would add nothing.
* *Why some members are blamed and not lost* (``MemberState.blamed``): a lie can bring one honest member to accuse
  another one. If it lost that one, each of the two could go on with the liar. A blamed member still has to promise.
* *Why a member promises along* (``is_overtaken``): a leader asks no member that it has lost, but others may need the
  promise of that member.

**Disputes.** A leader to which two members name different digests believes neither of them. It has each reducer's
signature of its share (``OwnResult.outputs``), and shows it (``SignedOutput``) to a member that names another digest. A
member that is honest has the reducer's other signature, and shows it before it promises: the two convict the reducer. A
member that shows none lied, and is left out. So the word of one member costs no third one its place.

**Why a table.** Events arrive in any order, between any two members, at any time. A table can be searched: the tests
explore every order of messages, crashes and suspicions for small groups, and check the guarantees in every state
(``tests/unit/consensus``). Each row is one sentence, one condition and one function.

**What liars can do.** A vote that contradicts what this member knows (``is_impossible``, ``is_false_promise``,
``is_false_held``, ``is_false_commit``) drops its sender from this round, and never stops the program. A lie that
cannot be detected may cost the round, and the members do not wait for the liar again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from msgspec import structs

from p2pavg.base.result import FailedCode
from p2pavg.consensus import conditions as when
from p2pavg.consensus.choice import Stuck, ballot_leader, next_ballot, share_in_dispute
from p2pavg.consensus.member import (
    FINAL,
    LIVE,
    MemberState,
    OwnResult,
    Pending,
    RoundPhase,
    has_it,
    is_bound,
    is_confirmed,
    is_left_out,
    lacks_it,
    proven,
)
from p2pavg.consensus.statements import result_digest
from p2pavg.consensus.votes import (
    Accepted,
    Action,
    Begin,
    Complete,
    Completed,
    Dead,
    Drop,
    Event,
    Exclude,
    Gather,
    GivenUp,
    Left,
    Lost,
    PassOn,
    Promise,
    Readmit,
    ResultCommit,
    ResultHeld,
    RunAttempt,
    SignedOutput,
    StaleBallot,
    TakeFrom,
    Tell,
    Trouble,
    Unknown,
    Vote,
    VoteHeard,
)


class _Draft:
    """A member's next state and the actions to carry out."""

    def __init__(self, member: MemberState) -> None:
        # A shallow copy suffices: the fields' values are immutable. The old state stays valid for the
        # search and for the caller, which compares the two.
        self.m = copy.copy(member)
        self.actions: list[Action] = []

    def tell(self, peer: int, vote: Vote) -> None:
        # A loss resets the stream of votes in both directions, so a vote to a lost member would not arrive.
        if peer not in self.m.lost and peer != self.m.me:
            self.actions.append(Tell(peer, vote))

    def tell_all(self, vote: Vote) -> None:
        for peer in range(self.m.size):
            self.tell(peer, vote)


# ---------------------------------------------------------------------- the rows' actions


def _note_completed(draft: _Draft, event: Completed) -> None:
    m = draft.m
    m.complete = Complete(m.begun.attempt, m.begun.members)
    digest = result_digest(event.digests) if event.digests else b""
    m.own = OwnResult(event.digests, digest, event.signature, event.outputs)
    _renew_own_promise(m)  # a leader that gathers decides from it


def _accept(draft: _Draft, event: Completed | None = None) -> None:
    m = draft.m
    if event is not None:
        _note_completed(draft, event)
    m.accepted = Accepted(m.begun.ballot, m.begun.attempt, m.begun.members, m.begun.view, m.begun.must)
    # A member that needs no result accepts an older one that it does not hold. It then names no digests and signs
    # nothing, which is what `is_false_held` demands of it.
    has = m.complete == Complete(m.begun.attempt, m.begun.members)
    held = ResultHeld(m.begun.ballot, m.own.digests if has else (), m.own.signature if has else b"")
    leader = ballot_leader(m.begun.ballot, m.size)
    if leader == m.me:
        _add_held(m, m.me, held)
    else:
        draft.tell(leader, held)


def _add_held(m: MemberState, sender: int, vote: ResultHeld) -> None:
    held = [*(entry for entry in m.pending.held if entry[0] != sender), (sender, vote.digests)]
    signatures = [entry for entry in m.pending.signatures if entry[0] != sender]
    # An auxiliary holds no result, so it has nothing to sign. The commit must not name it as a signer.
    if vote.digests:
        signatures.append((sender, vote.signature))
    m.pending = replace(m.pending, held=tuple(sorted(held)), signatures=tuple(sorted(signatures)))


def _note_held(draft: _Draft, event: VoteHeard) -> None:
    assert isinstance(event.vote, ResultHeld)
    _add_held(draft.m, event.sender, event.vote)


def _lose(draft: _Draft, event: Lost) -> None:
    # A member follows no member that it has left out. So a leader is lost even if its votes still arrive.
    if event.reachable and event.peer != draft.m.leader:
        _blame(draft, event.peer, hostile=event.hostile, reason=event.reason)
    else:
        _lose_one(draft, event.peer, hostile=event.hostile, reason=event.reason)


def _blame(draft: _Draft, peer: int, *, hostile: bool, reason: str) -> None:
    """Leave a member out of the next attempt without losing it: it still has to promise."""
    m = draft.m
    if peer in m.apart or peer == m.me:
        return
    m.blamed |= {peer}
    if hostile:
        m.hostile |= {peer}
    _report(draft, peer, concerned=peer in m.begun.view, hostile=hostile, reason=reason)


def _lose_one(draft: _Draft, peer: int, *, hostile: bool, reason: str = "") -> None:
    m = draft.m
    if peer in m.lost or peer == m.me:
        return
    # The ballot can commit without a member that is outside of its view. It cannot begin without its leader.
    concerned = peer in m.begun.view or peer == ballot_leader(m.promised, m.size)
    m.lost |= {peer}
    if hostile:
        m.hostile |= {peer}
    m.pending = replace(
        m.pending,
        # A view is chosen from those that promised and can still be reached. The ballot of a lost leader is not
        # followed: the next member of the roster asks.
        promises=tuple(entry for entry in m.pending.promises if entry[0] != peer),
        asked=tuple(entry for entry in m.pending.asked if entry[0] != peer),
        begin=None if peer == ballot_leader(m.promised, m.size) else m.pending.begin,
    )
    m.heard = tuple(entry for entry in m.heard if entry[0] != peer)
    _report(draft, peer, concerned=concerned, hostile=hostile, reason=reason)
    if m.leader in m.blamed:  # a member that this one does not want cannot lead it
        draft.actions.append(Drop(m.leader, "it would lead, and was left out before"))
        _lose_one(draft, m.leader, hostile=False)


def _report(draft: _Draft, peer: int, *, concerned: bool, hostile: bool, reason: str) -> None:
    """Tell the leader of a loss, or add it to the own promise."""
    m = draft.m
    # A leader that gathers decides from promises, so a loss goes into its own. In other phases no promises are held,
    # and the loss of a member outside of the view changes nothing.
    if m.phase is RoundPhase.GATHERING or not concerned:
        _renew_own_promise(m)
        return
    # If this member leads, `must_lead` fits now. That includes the case that the lost member was the leader.
    m.trouble = True
    if m.leader != m.me:
        draft.tell(m.leader, Trouble(peer, hostile, reason))


def _renew_own_promise(m: MemberState) -> None:
    """Change the own promise of a leader that gathers: it has lost or left out another member, or readmitted one."""
    promises = tuple(
        (position, _own_promise(m)) if position == m.me else (position, promise)
        for position, promise in m.pending.promises
    )
    m.pending = replace(m.pending, promises=promises)


def _note_dead(draft: _Draft, event: Dead) -> None:
    if event.peer in draft.m.lost:
        draft.m.dead |= {event.peer}
        # A quorum counts only members that are not gone, so each death makes it
        # smaller. A member that is astray may go on now.
        draft.m.trouble |= draft.m.phase is RoundPhase.ASTRAY


def _hear_unknown(draft: _Draft, event: VoteHeard) -> None:
    _lose_one(draft, event.sender, hostile=False, reason="it does not know this round")
    # A process that has forgotten the round was restarted, and cannot decide it any more. It is as good as dead.
    _note_dead(draft, Dead(event.sender))


def _hear_left(draft: _Draft, event: VoteHeard) -> None:
    assert isinstance(event.vote, Left)
    known = dict(draft.m.left)
    # What it accepted counts like a promise: a result that it held may have been
    # committed, and one that it never held was not.
    known[event.sender] = event.vote.accepted
    draft.m.left = tuple(sorted(known.items()))
    _lose_one(draft, event.sender, hostile=False, reason=f"it gave the round up: {event.vote.reason}")
    draft.m.trouble |= draft.m.phase is RoundPhase.ASTRAY


def _hear_gather(draft: _Draft, event: VoteHeard) -> None:
    assert isinstance(event.vote, Gather)
    pending = draft.m.pending
    # The sender may not be the leader here yet. Its question is kept until the members before it are lost here, too.
    others = tuple(entry for entry in pending.asked if entry[0] != event.sender)
    draft.m.pending = replace(pending, asked=tuple(sorted((*others, (event.sender, event.vote.ballot)))))
    _note_heard(draft.m, event.sender, event.vote)


def _note_heard(m: MemberState, sender: int, vote: Gather | Promise) -> None:
    known = {position: (ballot, attempt) for position, ballot, attempt in m.heard}
    # A promise of a ballot that has begun here releases no newer one, and a late promise must not hide a newer one.
    if vote.ballot > max(m.begun.ballot, known.get(sender, (0, 0))[0]):
        known[sender] = (vote.ballot, vote.attempt)
        m.heard = tuple(sorted((position, *said) for position, said in known.items()))


def _hear_promise(draft: _Draft, event: VoteHeard) -> None:
    assert isinstance(event.vote, Promise)
    _note_heard(draft.m, event.sender, event.vote)


def _own_promise(m: MemberState) -> Promise:
    digest = m.own.digest if m.complete is not None else b""
    return Promise(m.promised, m.begun.attempt, m.accepted, m.complete, m.apart, m.hostile, digest)


def _promise(draft: _Draft) -> None:
    m = draft.m
    asked = dict(m.pending.asked)
    leader = m.leader
    # From here on this member accepts no older ballot. What it had noted as the leader of
    # one, or of one that was about to begin, is void.
    m.promised = asked.pop(leader)
    asked_later = tuple(sorted(asked.items()))
    m.pending = replace(m.pending, held=(), signatures=(), promises=(), begin=None, asked=asked_later)
    # The promise itself reports the losses, so there is no trouble left to tell.
    m.trouble = False
    # It goes to all members: none of them follows this ballot without the promise (`is_released`).
    draft.tell_all(_own_promise(m))


def _promise_along(draft: _Draft) -> None:
    """Promise a ballot of a leader that this member has lost and another one follows, so that it need not wait."""
    m = draft.m
    m.promised = when.newest_of_lost(m)
    # The questions in `asked` stay. They come from leaders that this member may still follow.
    m.pending = replace(m.pending, held=(), signatures=(), promises=(), begin=None)
    draft.tell_all(_own_promise(m))


def _refuse(draft: _Draft) -> None:
    m = draft.m
    asked = dict(m.pending.asked)
    leader = m.leader
    del asked[leader]
    m.pending = replace(m.pending, asked=tuple(sorted(asked.items())))
    # Without a nack the leader would wait for this answer until the round's time is over.
    draft.tell(leader, StaleBallot(m.promised))


def _gather(draft: _Draft) -> None:
    m = draft.m
    # The ballot has to be newer than all that this member knows of. Members
    # that have promised one of those would refuse it.
    newest = max([m.promised, when.newest_of_lost(m), *(ballot for _, ballot in m.pending.asked)])
    m.promised = next_ballot(m.me, m.size, newest)
    m.pending = replace(
        m.pending, held=(), signatures=(), promises=((m.me, _own_promise(m)),), begin=None, asked=()
    )
    # The own promise contains the losses so far. A later one changes it (`_report`).
    m.trouble = False
    # Blamed members are asked as well: the ballot may begin only with their promises.
    draft.tell_all(Gather(m.promised, m.begun.attempt))


def _gather_again(draft: _Draft, event: VoteHeard) -> None:
    assert isinstance(event.vote, StaleBallot)
    # The next ballot is above this number. Answers to the old question name another ballot and are not counted.
    draft.m.promised = max(draft.m.promised, event.vote.promised)
    _gather(draft)


def _note_promise(draft: _Draft, event: VoteHeard) -> None:
    assert isinstance(event.vote, Promise)
    pending = draft.m.pending
    others = tuple(entry for entry in pending.promises if entry[0] != event.sender)
    # A member that accused another one before must not promise without it, and accuse again in the next ballot.
    promise = _with_accusations(pending, event.sender, event.vote)
    promises = tuple(sorted((*others, (event.sender, promise)), key=lambda entry: entry[0]))
    draft.m.pending = replace(pending, promises=promises)
    _note_heard(draft.m, event.sender, event.vote)


def _with_accusations(pending: Pending, sender: int, promise: Promise) -> Promise:
    """Return a promise that includes every accusation of its sender, made before or after the promise."""
    said = {(accused, hostile) for accuser, accused, hostile in pending.accusations if accuser == sender}
    return structs.replace(
        promise,
        apart=promise.apart | {accused for accused, _ in said},
        hostile=promise.hostile | {accused for accused, hostile in said if hostile},
    )


def _accuse(draft: _Draft, event: VoteHeard) -> None:
    assert isinstance(event.vote, Trouble)
    pending = draft.m.pending
    accusation = (event.sender, event.vote.peer, event.vote.hostile)
    draft.m.pending = replace(pending, accusations=pending.accusations | {accusation})


def _hear_trouble(draft: _Draft, event: VoteHeard) -> None:
    _accuse(draft, event)
    draft.m.trouble = True


def _add_trouble(draft: _Draft, event: VoteHeard) -> None:
    """Add an accusation to the promise that its sender gave earlier."""
    _accuse(draft, event)
    pending = draft.m.pending
    promises = tuple(
        (position, _with_accusations(pending, position, promise) if position == event.sender else promise)
        for position, promise in pending.promises
    )
    draft.m.pending = replace(pending, promises=promises)


def _drop_liar(draft: _Draft, event: VoteHeard) -> None:
    reason = f"it sent an impossible vote: {type(event.vote).__name__}"
    _lose_one(draft, event.sender, hostile=True, reason=reason)
    draft.actions.append(Drop(event.sender, reason))


def _begin(draft: _Draft) -> None:
    """Begin the ballot that this leader has decided."""
    m = draft.m
    decision = when.decide(m)
    assert isinstance(decision, Begin)
    # A member outside of the view is not told: it hears the end from a commit, or by asking.
    for position in sorted(decision.view):
        draft.tell(position, decision)
    _take_up(draft, decision)


def _take_up(draft: _Draft, begin: Begin) -> None:
    m = draft.m
    # The leader chose the view from promises. If this member has lost a member of it since, the ballot cannot commit.
    m.begun, m.trouble = structs.replace(begin, lacking=frozenset()), bool(begin.view & m.apart)
    # These three outlive a ballot. Signatures name an attempt and no ballot, and accusations last for the round.
    m.pending = Pending(asked=m.pending.asked, commits=m.pending.commits, accusations=m.pending.accusations)
    m.heard = tuple(entry for entry in m.heard if entry[1] > begin.ballot)
    # `is_released` has refused each ballot about another attempt than that of
    # `ready`. So this ballot is about the same result.
    m.ready = None
    if m.accepted is not None and m.accepted.attempt != begin.attempt:
        m.accepted = None  # a quorum has answered, so no ballot committed it
    # A new attempt discards the result of the one before. An older result is accepted at once if it is here as a
    # whole. Otherwise `Completed` follows when the missing shares have come.
    if begin.attempt == begin.ballot:
        m.complete, m.own = None, OwnResult()
        draft.actions.append(RunAttempt(begin.attempt, begin.members))
    elif when.holds(m, begin):
        _accept(draft)
    gone = begin.members - begin.view
    if begin.source == m.me and begin.lacking:
        draft.actions.append(PassOn(gone, begin.lacking))
    elif m.me in begin.lacking:
        draft.actions.append(TakeFrom(begin.source, gone))
    # The leader has to hear of each loss that its view does not reflect, or it would wait for this member in vain.
    for peer in sorted(begin.view & m.apart):
        draft.tell(m.leader, Trouble(peer, peer in m.hostile, "it was lost before"))


def _note_begin(draft: _Draft, event: VoteHeard) -> None:
    assert isinstance(event.vote, Begin)
    draft.m.pending = replace(draft.m.pending, begin=event.vote)


def _follow_begin(draft: _Draft) -> None:
    begin = draft.m.pending.begin
    assert begin is not None
    _take_up(draft, begin)


def _signed_commit(m: MemberState) -> ResultCommit:
    """Return the commit of the ballot that this member leads, signed by all members that hold its result."""
    needs = m.begun.members & m.seat.holders
    # All holders name the same digests: the table settles a dispute before it commits.
    digests = next((digests for position, digests in m.pending.held if position in needs), ())
    signatures = tuple(entry for entry in m.pending.signatures if entry[0] in needs)
    return ResultCommit(
        m.begun.attempt, m.begun.members, result_digest(digests) if digests else b"", signatures
    )


def _note_commit(draft: _Draft, event: VoteHeard) -> None:
    assert isinstance(event.vote, ResultCommit)
    # One commit is kept for each sender. So a liar takes one place, and cannot replace what others told.
    commits = dict(draft.m.pending.commits) | {event.sender: event.vote}
    noted = tuple(sorted(commits.items(), key=lambda entry: entry[0]))
    draft.m.pending = replace(draft.m.pending, commits=noted)


def _commit(draft: _Draft) -> None:
    """Commit, and tell all members: the leader may have died before it told each of them."""
    # Only the ballot's leader makes a commit of its own, from the signatures that it collected. Other members pass on
    # a proven one, also if they end without the result.
    vote = proven(draft.m) or _signed_commit(draft.m)
    draft.m.committed = vote
    draft.tell_all(vote)


def _get_ready(draft: _Draft) -> None:
    """Tell all members a commit that this member will follow, and nothing else, once they follow it too."""
    commit = proven(draft.m)
    assert commit is not None
    draft.m.ready = commit
    draft.tell_all(commit)


def _left_out(draft: _Draft) -> None:
    draft.m.reason = "the others gave this peer up, and ended the round without it"
    draft.m.code = FailedCode.LEFT_OUT
    _commit(draft)


def _too_late(draft: _Draft) -> None:
    draft.m.reason = "the others committed a result with this peer's contribution, but this peer lacks it"
    draft.m.code = FailedCode.RESULT_MISSED
    _commit(draft)


def _fail(draft: _Draft, event: GivenUp | None = None) -> None:
    m = draft.m
    # Rows that fail for a reason of their own have set it. They call this without an event.
    if not m.reason and event is not None:
        m.reason, m.code = event.reason, event.code
    draft.tell_all(Left(-1 if m.accepted is None else m.accepted.ballot, m.reason))


def _fail_stuck(draft: _Draft) -> None:
    decision = when.decide(draft.m)
    assert isinstance(decision, Stuck)
    draft.m.reason, draft.m.code = decision.reason, FailedCode.PEERS_LOST
    _fail_with_contribution(draft)


def _fail_too_few(draft: _Draft) -> None:
    draft.m.reason = "fewer members are left than this peer's min_group_size"
    draft.m.code = FailedCode.PEERS_LOST
    _fail_with_contribution(draft)


def _fail_with_contribution(draft: _Draft) -> None:
    """Fail, and tell the others that this member keeps its contribution: a quorum says that it was not committed."""
    # If `Left` named the accepted ballot, another member could take its
    # result for committed, and count this contribution.
    draft.m.accepted = None
    _fail(draft)


def _fail_at_odds(draft: _Draft) -> None:
    draft.m.reason = "this peer holds another result than the other members"
    draft.m.code = FailedCode.RESULTS_DIFFER
    _fail(draft)


def _go_astray(draft: _Draft) -> None:
    """Wait. The members that this leader does not want are let go, so that they can go on without it."""
    # When this member can go on, all others are asked again. They may have moved on in the meantime.
    draft.m.pending = replace(draft.m.pending, promises=())
    for peer in sorted(draft.m.blamed - draft.m.lost):
        draft.actions.append(Drop(peer, "it was left out before, and too few are left without it"))
        _lose_one(draft, peer, hostile=False)


NO_SUCH_SHARE = "it names a digest of a share that the share's reducer has not signed"
TWO_AVERAGES = "it sent different results to different members, and signed both"


def _settle_dispute(draft: _Draft) -> None:
    """Leave out each member that names another digest than a reducer has signed, and show it that signature.

    Either that member lies, or the reducer has signed both. In the latter case the member shows the other signature
    before it promises, and is in the next view (:func:`_convict`). The word of one member costs no third one its place.
    """
    m = draft.m
    reducers, named = sorted(m.begun.members), dict(m.pending.held)
    for peer in sorted(when.odd_members(m)):
        share = share_in_dispute(m.own.digests, m.own.outputs, named[peer])
        # Votes arrive in order. The member sees the signature before it is asked for a
        # promise, so it can answer with its own first.
        if share is not None:
            draft.tell(
                peer,
                SignedOutput(m.begun.attempt, reducers[share], m.own.digests[share], m.own.outputs[share]),
            )
        # Its votes still arrive: if it is honest, this member may go on only with its promise.
        _blame(draft, peer, hostile=False, reason=NO_SUCH_SHARE)
        draft.actions.append(Exclude(peer, NO_SUCH_SHARE))
    # Without `held` this row does not fit again. The trouble makes the leader ask for promises next.
    m.pending, m.trouble = replace(m.pending, held=(), signatures=()), True


def _convict(draft: _Draft, event: VoteHeard) -> None:
    """Lose a reducer that has signed two averages of one share, and take its accuser back."""
    vote = event.vote
    assert isinstance(vote, SignedOutput)
    m = draft.m
    own = when.own_output(m, vote)
    assert own is not None
    if event.sender == m.leader:
        draft.tell(event.sender, own)  # before this member's promise, which may follow from the loss
    # The accuser told the truth, so its own exclusion ends.
    if event.sender in m.blamed:
        m.blamed -= {event.sender}
        draft.actions.append(Readmit(event.sender))
        _renew_own_promise(m)
    if vote.reducer not in m.lost:
        draft.actions.append(Drop(vote.reducer, TWO_AVERAGES))
        _lose_one(draft, vote.reducer, hostile=True, reason=TWO_AVERAGES)


def _learn(draft: _Draft, event: VoteHeard) -> None:
    _note_commit(draft, event)
    _believe(draft)


def _believe(draft: _Draft) -> None:
    commit = proven(draft.m)
    # The first commit that is believed stays: this member tells it to each member that asks.
    if draft.m.committed is None and commit is not None and is_confirmed(draft.m, commit):
        draft.m.committed = commit


def _note_gone(draft: _Draft, event: VoteHeard) -> None:
    if isinstance(event.vote, Left):
        _hear_left(draft, event)
    else:
        _hear_unknown(draft, event)
    _believe(draft)


def _tell_the_end(draft: _Draft, event: VoteHeard) -> None:
    m = draft.m
    if m.committed is not None:
        draft.tell(event.sender, m.committed)
    else:
        draft.tell(event.sender, Left(-1 if m.accepted is None else m.accepted.ballot, m.reason))


# ---------------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class Row:
    """One transition: in one of ``phases``, on event ``on``, if ``when`` holds, call ``do`` and enter ``becomes``.

    The first row that fits is taken. ``on`` holds types of events, or types of votes that were heard. ``None`` in it
    stands for a transition without an event: such rows are tried after every event. If ``becomes`` is ``None``, the
    phase stays.
    """

    phases: frozenset[RoundPhase]
    on: tuple[type | None, ...]
    when: Callable[..., bool] | None
    do: Callable[..., None] | None
    becomes: RoundPhase | None
    text: str


def _row(
    phases: RoundPhase | Iterable[RoundPhase],
    on: type | tuple[type, ...] | None,
    when: Callable[..., bool] | None,
    do: Callable[..., None] | None,
    becomes: RoundPhase | None,
    text: str,
) -> Row:
    found = frozenset([phases]) if isinstance(phases, RoundPhase) else frozenset(phases)
    return Row(found, on if isinstance(on, tuple) else (on,), when, do, becomes, text)


_E, _H, _G, _P, _A, _C, _F = tuple(RoundPhase)  # exchanging, holding, gathering ...: in its order
_EH = (_E, _H)

TABLE: tuple[Row, ...] = (
    # Events of this member itself.
    # A member that has promised a newer ballot notes a result that it completes, and does not accept
    # it: the older ballot must not commit any more.
    _row(_E, Completed, when.not_outvoted, _accept, _H, "has the whole result: tells the leader"),
    _row(LIVE, Completed, when.is_attempt, _note_completed, None, "has the whole result"),
    _row(LIVE, Lost, None, _lose, None, "lost a member: tells the leader"),
    _row(LIVE, Dead, None, _note_dead, None, "a lost member is known to be dead"),
    _row(LIVE, GivenUp, None, _fail, _F, "out of time, or given up by the caller"),
    # Votes of other members.
    # For each kind of vote, the row for a lie stands before the row that believes it.
    _row(_EH, ResultHeld, when.is_false_held, _drop_liar, None, "an impossible result: gives its sender up"),
    _row(_EH, ResultHeld, when.leads_ballot, _note_held, None, "a member holds the result"),
    _row(
        LIVE, SignedOutput, when.contradicts_own, _convict, None, "a reducer signed two averages: gives it up"
    ),
    _row(
        LIVE,
        ResultCommit,
        when.is_false_commit,
        _drop_liar,
        None,
        "an impossible commit: gives its sender up",
    ),
    # A commit may come before this member has the result, or before it has lost a member whose signature is missing.
    # So it is kept in each phase, and the rows without an event find it later.
    _row(LIVE, ResultCommit, None, _note_commit, None, "a commit, which counts once its signatures prove it"),
    _row(LIVE, Gather, when.is_ahead, _hear_gather, None, "a member asks"),
    _row(_G, Promise, when.is_false_promise, _drop_liar, None, "an impossible answer: gives its sender up"),
    _row(_G, Promise, when.answers_me, _note_promise, None, "a member answers"),
    # Members that have lost different members follow different leaders. Their promises release this member, too.
    _row(LIVE, Promise, when.is_near, _hear_promise, None, "a member promises another leader's ballot"),
    # A member that follows this leader had promised a newer ballot: to a leader that it
    # has lost since, or along with another member.
    _row(
        _G,
        StaleBallot,
        when.outpaces,
        _gather_again,
        None,
        "a newer ballot was promised: asks with a newer one",
    ),
    _row(_P, Begin, when.is_impossible, _drop_liar, None, "an impossible ballot: gives its leader up"),
    _row(
        _P, Begin, when.is_due, _note_begin, None, "a ballot, which counts once the others have promised it"
    ),
    # A member that answered the leader may lose another one while the leader still waits for others.
    _row(_G, Trouble, when.is_of_another, _add_trouble, None, "a member has trouble with another"),
    _row(
        (_E, _H, _P, _A), Trouble, when.concerns_me, _hear_trouble, None, "a member has trouble with another"
    ),
    _row(LIVE, Left, None, _hear_left, None, "a member gave up"),
    _row(LIVE, Unknown, None, _hear_unknown, None, "a member has forgotten the round"),
    # Transitions without an event.
    # A proof ends the round, whatever else is going on, so these rows come first.
    _row(LIVE, None, has_it, _commit, _C, "the group has committed, by proof"),
    _row(LIVE, None, lacks_it, _too_late, _F, "committed with its contribution, but it lacks the result"),
    _row(LIVE, None, is_left_out, _left_out, _F, "committed without this member, by proof"),
    _row(LIVE, None, is_bound, _get_ready, None, "a proven commit, which it follows once the others do"),
    # A question that was kept counts as soon as its sender leads here: the members before it are lost.
    _row(LIVE, None, when.leader_asks_anew, _promise, _P, "answers its leader"),
    _row(LIVE, None, when.leader_asks, _refuse, None, "has promised a newer ballot, and says so"),
    # All of the view has answered. A dispute about the bits is settled before anything is committed. A leader whose
    # own share is damaged would otherwise blame all others for it.
    _row(_EH, None, when.own_fault, _fail_at_odds, _F, "holds another result than the others"),
    _row(
        _EH,
        None,
        when.at_odds,
        _settle_dispute,
        None,
        "a member names a digest that its reducer did not sign: leaves it out",
    ),
    _row(_EH, None, when.in_result, _commit, _C, "all members hold the result: commits"),
    _row(_EH, None, when.all_hold, _left_out, _F, "all members hold a result without this one"),
    _row((_E, _H, _P), None, when.must_lead, _gather, _G, "leads, and the ballot cannot commit: asks"),
    # Another member follows a leader that is lost here, and cannot go on without this member's promise. The
    # question of a newer ballot is such a promise, too.
    _row(
        LIVE,
        None,
        when.leads_overtaken,
        _gather,
        _G,
        "another member follows a lost leader: asks with a newer ballot",
    ),
    _row(
        (_E, _H, _P),
        None,
        when.is_overtaken,
        _promise_along,
        _P,
        "another member follows a lost leader: promises too",
    ),
    # The leader has begun, and the others have released this member. A group may be large enough for its leader and
    # too small for a member with a larger `min_group_size`.
    _row(_P, None, when.too_few, _fail_too_few, _F, "fewer are left than it needs"),
    _row(_P, None, when.is_new, _follow_begin, _E, "a new attempt"),
    _row(_P, None, when.is_held, _follow_begin, _H, "an older result, which it holds or need not hold"),
    _row(_P, None, when.is_lacking, _follow_begin, _E, "an older result, which it lacks in part"),
    # All members that can be reached have promised. The last two rows take what remains: no later
    # message helps, or the others may still go on.
    _row(_G, None, when.begins_anew, _begin, _E, "begins a new attempt with those that are left"),
    _row(_G, None, when.begins_held, _begin, _H, "goes on with an older result, which it holds"),
    _row(_G, None, when.begins_lacking, _begin, _E, "goes on with an older result, which it lacks in part"),
    _row(_G, None, when.stuck_for_good, _fail_stuck, _F, "too few contributors are left"),
    _row(_G, None, when.stuck, _go_astray, _A, "too few answer"),
    _row(_A, None, when.may_go_on, _gather, _G, "others have died, and those that answer may decide"),
    # After the end.
    # A member that failed with a result in its hands does not know whether
    # the others committed. Each answer may decide it.
    _row(_F, ResultCommit, when.is_unknown, _learn, None, "hears how the others ended"),
    _row(_F, (Left, Unknown), None, _note_gone, None, "hears that a member does not know either"),
    # A member that still votes has not heard the end: the commit did not reach it.
    _row(FINAL, Gather, None, _tell_the_end, None, "says how it ended"),
    _row(FINAL, Trouble, None, _tell_the_end, None, "says how it ended"),
    _row(FINAL, ResultHeld, None, _tell_the_end, None, "says how it ended"),
)


_ENDS = (
    ResultCommit,
    Left,
    Unknown,
)  # the only votes that a lost member may still send, as answers to a question


def advance(member: MemberState, event: Event) -> tuple[MemberState, list[Action]]:
    """Return a member's state after an event, and the actions to carry out."""
    draft = _Draft(member)
    if isinstance(event, VoteHeard) and event.sender in member.lost and type(event.vote) not in _ENDS:
        return member, []  # the sender sent it before this member gave it up
    on = type(event.vote) if isinstance(event, VoteHeard) else type(event)
    # If no row fits, the state does not change. No transition without an
    # event fits then either: all were taken before.
    for row in _ROWS.get((member.phase, on), ()):
        if row.when is None or row.when(draft.m, event):
            if row.do is not None:
                row.do(draft, event)
            draft.m.phase = row.becomes or draft.m.phase
            _follow(draft)
            break
    if draft.m.phase in FINAL:
        _forget(draft.m)
    return draft.m, draft.actions


def _forget(m: MemberState) -> None:
    """Forget what only a member that has not ended needs. The search then visits fewer states."""
    m.pending, m.heard = Pending(commits=m.pending.commits), ()
    m.ready, m.trouble = None, False


def _follow(draft: _Draft) -> None:
    """Apply the transitions without an event until none fits."""
    # This ends: each of these rows makes its own condition false, or ends the round.
    while (row := _next_row(draft.m)) is not None:
        if row.do is not None:
            row.do(draft)
        draft.m.phase = row.becomes or draft.m.phase


def _next_row(member: MemberState) -> Row | None:
    for row in _ROWS.get((member.phase, None), ()):
        if row.when is not None and row.when(member):
            return row
    return None


_ROWS: dict[tuple[RoundPhase, type | None], list[Row]] = {}
for _each in TABLE:
    for _phase in _each.phases:
        for _on in _each.on:
            _ROWS.setdefault((_phase, _on), []).append(_each)
