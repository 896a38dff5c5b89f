"""The optimizer of one peer of a team: it trains with the team's other peers, and decides with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer

from p2pavg.base.result import Success
from p2pavg.blocking import Averager
from p2pavg.consensus.certificate import verified_commit
from p2pavg.optim.base.report import StepReport
from p2pavg.optim.catching_up.common_state import Extra
from p2pavg.optim.catching_up.run_state import RunState
from p2pavg.optim.large_batch.averaged import AveragedOptimizer
from p2pavg.population.settings import PopulationSettings
from p2pavg.population.team_life import TeamLife, pack_life, read_life
from p2pavg.population.team_rules import is_vote, winner
from p2pavg.population.team_words import Ballot
from p2pavg.population.weights import Apply, Loaded, Weights
from p2pavg.population.words import Standing


@dataclass(frozen=True, slots=True)
class Prepared:
    """The weights of another team, which this peer has fetched and checked."""

    donor: Standing
    """With the team's score."""
    loaded: Loaded


@dataclass(frozen=True, slots=True)
class Concluded:
    """The end of a generation, as the team has agreed on it."""

    ballot: Ballot | None
    """``None`` if no outcome had more than half of the votes."""
    donor: Standing | None = None
    """Of the team whose weights were copied."""


@dataclass(frozen=True, slots=True)
class _Decided:
    """The decision that an update has brought."""

    vote: str | None
    """Of more than half of the contributors; ``None`` if no vote is."""
    ballot: Ballot | None
    """The ballot of that vote; ``None`` if this peer does not know it."""
    before: TeamLife
    """The team's life with the update, before the decision."""
    donor: Prepared | None
    """The weights that it copies, if this peer has them."""


class TeamMember(AveragedOptimizer):
    """An :class:`~p2pavg.optim.AveragedOptimizer` among the peers of one team.

    Made by :class:`~p2pavg.population.TeamPopulation`, which says what holds.

    Args:
        averager: averager of the team's run.
        team, settings: the team's name, and the population's rules.
        apply: sets the hyperparameters; see :class:`~p2pavg.population.weights.Weights`.
        start: the team's first hyperparameters.
        ballots: returns the ballot of a peer of the team for an outcome, by its vote; ``None`` if none is known.
        state: of the team's model.
        target_batch_size, options: for :class:`~p2pavg.optim.AveragedOptimizer`.
    """

    def __init__(
        self,
        inner: Optimizer,
        averager: Averager,
        *,
        team: str,
        settings: PopulationSettings,
        apply: Apply | None,
        start: Mapping[str, Any],
        ballots: Callable[[str], Ballot | None],
        state: RunState,
        target_batch_size: float,
        **options: Any,
    ) -> None:
        self._settings = settings
        self._ballots = ballots
        self._first = dict(start)
        self.life = TeamLife(team=team, hyperparameters=dict(start))
        """The team's generations, up to this peer's last update."""
        self.peers: tuple[str, ...] = ()
        """The peers of the update that ended the present generation; empty before, or if this peer does not know."""
        self.vote = ""
        """This peer's vote on the decision that the next update brings; empty if it has none."""
        self.prepared: dict[bytes, Prepared] = {}
        """Weights for that decision, by the donor's claim."""
        self.concluded: Concluded | None = None
        """The end of a generation, until :class:`~p2pavg.population.TeamPopulation` takes it."""
        self._has_switched = False
        names = list(settings.space)
        self.weights = Weights(state.model, inner, apply, names, buffers=())
        self.weights.apply(self.life.hyperparameters)
        super().__init__(inner, averager, target_batch_size=target_batch_size, state=state, **options)
        self.weights = Weights(state.model, inner, apply, names, buffers=tuple(self._parts.common))

    def _join(self, **given: Any) -> None:
        own = (
            ("team", self.life.team),
            ("population", self._settings.digest.hex()),
            *((f"first {name}", value) for name, value in sorted(self._first.items())),
        )
        super()._join(**{**given, "rules": (*given["rules"], *own)})

    @property
    def ends_generation(self) -> bool:
        """True if the present generation is over, and this peer was in its last update."""
        return self.life.is_over(self._settings.interval) and self._averager.peer_id in self.peers

    def restore_buffers(self) -> None:
        """Reset the averaged buffers to their values after the last update."""
        self._parts.restore()

    # ------------------------------------------------------------------ steps

    def _take_batch(self, samples: float, metrics: Mapping[str, float]) -> StepReport:
        self._has_switched = False
        return super()._take_batch(samples, metrics)

    def _step(self, samples: float, metrics: Mapping[str, float]) -> StepReport:
        return super()._step(samples, {**metrics, self.vote: 1.0} if self.vote else metrics)

    def _must_follow(self, report: StepReport) -> bool:
        # Peers that have copied the donor before this one looked ahead of it when the report was made.
        return super()._must_follow(replace(report, behind=None) if self._has_switched else report)

    def _updated(self, report: StepReport, rates: tuple[float, ...]) -> StepReport:
        shown = {name: value for name, value in report.metrics.items() if not is_vote(name)}
        return super()._updated(replace(report, metrics=shown), rates)

    def _took(self, success: Success) -> None:
        decided = self._count(success)
        super()._took(success)  # a checkpoint of this update has the life after it
        self._carry_out(decided, success)

    def replay(self, averaged: list[Any], success: Success) -> None:
        """See :class:`~p2pavg.optim.catching_up.following.Replays`."""
        super().replay(averaged, success)
        self._carry_out(self._count(success), success)

    def adopted(self) -> None:
        """See :class:`~p2pavg.optim.catching_up.following.Replays`."""
        super().adopted()
        self._forget_turn()

    def _forget_turn(self) -> None:
        self.vote, self.peers, self.prepared = "", (), {}

    # ------------------------------------------------------------------ decisions

    def _count(self, success: Success) -> _Decided | None:
        """Count an update; return the decision that it has brought, if it was due. All its members find the same one.

        Until the decision is carried out, the team has kept its weights.
        """
        interval, before = self._settings.interval, self.life.trained()
        if not self.life.is_over(interval):
            self.life = before
            if before.is_over(interval):
                self.peers = tuple(_votes(success))
            return None
        vote, prepared = winner(_votes(success)), self.prepared
        ballot = None if vote is None else self._ballots(vote)
        self._forget_turn()
        self.life = before.kept(interval, None if ballot is None else ballot.score)
        donor = None if ballot is None or not ballot.donor else prepared.get(ballot.donor)
        return _Decided(vote, ballot, before, donor)

    def _carry_out(self, decided: _Decided | None, success: Success) -> None:
        if decided is None:
            return
        vote, ballot = decided.vote, decided.ballot
        if vote is None or (ballot is not None and not ballot.donor):
            self.concluded = Concluded(ballot)
        elif ballot is not None and decided.donor is not None:
            self._switch(ballot, decided.donor, decided.before, success, vote)
        else:
            self._reload()

    def _reload(self) -> None:
        """Fetch the state of the team's other peers: this one cannot do what they have decided."""
        assert self._states is not None
        self._states.follower.reload()

    def _switch(
        self, ballot: Ballot, prepared: Prepared, before: TeamLife, success: Success, vote: str
    ) -> None:
        """Go on with another team's weights. It counts as an update, so peers that do not do it are behind."""
        prepared.loaded.take()
        hyperparameters = dict(ballot.hyperparameters)
        self.weights.apply(hyperparameters)
        donor = replace(prepared.donor, score=ballot.donor_score)
        self.life = before.copied(donor, prepared.loaded.ancestors, hyperparameters)
        self._parts.begin()
        self._averager.clear()
        self.zero_grad()
        self._together.took(success, vote.encode())
        self._together.run.say(0.0, waiting=False)
        assert self._states is not None
        self._states.replaced()
        self._has_switched = True
        self.concluded = Concluded(ballot, donor)

    # ------------------------------------------------------------------ states of other peers

    def _extra(self) -> Extra:
        return _LifeInStates(self)

    def read_life(self, value: object) -> TeamLife:
        """Read the team's life from a state; see :func:`~p2pavg.population.team_life.read_life`."""
        return read_life(value, self.life.team, self._settings)

    def load_life(self, life: TeamLife) -> None:
        """Go on with the team's life of a state that was loaded."""
        self.life = life
        self.weights.apply(life.hyperparameters)


class _LifeInStates:
    """The team's life as a part of the state that its peers share."""

    def __init__(self, member: TeamMember) -> None:
        self._member = member

    def kept(self) -> Any:
        return pack_life(self._member.life)

    def prepare(self, value: object) -> Callable[[], None]:
        life = self._member.read_life(value)

        def take() -> None:
            self._member.load_life(life)

        return take


def _votes(success: Success) -> dict[str, Sequence[str]]:
    """Return the names of the metrics that each contributor of an update has signed."""
    if not success.certificate:
        return {}
    roster, _ = verified_commit(success.certificate)
    return {member.peer_id: [name for name, _ in member.metrics] for member in roster.contributors}
