"""Teams: several peers that form one member of a population, for ordinary training loops."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from p2pavg.base.errors import ConfigError
from p2pavg.base.limits import MAX_RUN_ID_CHARS
from p2pavg.blocking import Averager
from p2pavg.optim.base.arguments import check_averager
from p2pavg.optim.base.batches import NO_METRICS
from p2pavg.optim.base.report import StepReport
from p2pavg.optim.catching_up.run_state import RunState, run_state_of
from p2pavg.peer.shared_states import ShareSettings
from p2pavg.population.copying import Pause
from p2pavg.population.core import Options
from p2pavg.population.lineage import Ancestor
from p2pavg.population.population import LOG_BYTES, Score
from p2pavg.population.report import GenerationReport
from p2pavg.population.settings import PopulationSettings
from p2pavg.population.space import Value
from p2pavg.population.team_history import TeamHistory
from p2pavg.population.team_member import Concluded, TeamMember
from p2pavg.population.team_turn import Held, TurnOptions, Turns
from p2pavg.population.team_words import TEAM_TOPIC
from p2pavg.population.weights import Apply

REFUSED = ("scheduler", "overlap", "process_group", "min_peers")
"""Options of :class:`~p2pavg.optim.AveragedOptimizer` that a team cannot use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamReport:
    """One call of :meth:`TeamPopulation.step`."""

    update: StepReport
    """Progress of the team's training."""
    generation: GenerationReport | None = None
    """The end of a generation, in the call that brought the team's decision."""


def team_run(run_id: str, team: str) -> str:
    """Return the run id of a team: its peers average there."""
    return f"{run_id}/team {team}"


class TeamPopulation:
    """One peer of a team. The peers of a team train together, and the teams compete (PBT).

    The peers of a team take every update together, with an :class:`~p2pavg.optim.AveragedOptimizer` in a run of their
    own, and hold the same bits. Every ``settings.interval`` updates they measure their scores, of which the median is
    the team's, and decide together whether to copy the weights of another team. The decision comes with the next
    update: it needs the votes of more than half of that update's contributors, and all of its members take it. A peer
    that comes late fetches the state of its team, with the hyperparameters.

    Args:
        averager: averager of the population's run, of :mod:`p2pavg.blocking`. This object opens another one of the same
            peer, for the team. Both have the same configuration.
        model: its parameters and averaged buffers are those of the team.
        optimizer: steps the model. It is made with any values of the hyperparameters: this object sets them.
        settings: the rules. All teams need the same. ``interval`` counts updates.
        team: name of the team, at most 64 printable ASCII characters. Its first hyperparameters follow from it.
        target_batch_size: number of samples, of all peers of the team together, for one update.
        apply: as for :class:`~p2pavg.population.Population`.
        start: the first hyperparameters, instead of some that are drawn; the same on all peers of a team.
        state: the model or a :class:`~p2pavg.optim.RunState` of it; the model if not given.
        wait: seconds for which the end of a generation waits at most for the words of the team's other peers and of the
            other teams, and then as long again for the proposals of the team's other peers.
        teams: number of teams, this one included, that this wait expects in the first generation.
        verify, copy_timeout, upload_mbps, download_mbps: as for :class:`~p2pavg.population.Population`.
        options: further options of :class:`~p2pavg.optim.AveragedOptimizer`, but for ``scheduler``, ``overlap``,
            ``process_group`` and ``min_peers``.

    Raises:
        ConfigError: an argument is out of range, or the optimizer lacks a hyperparameter; the message names it.
        TypeError, ValueError: as :class:`~p2pavg.optim.AveragedOptimizer`.
    """

    def __init__(
        self,
        averager: Averager,
        model: nn.Module,
        optimizer: Optimizer,
        settings: PopulationSettings,
        *,
        team: str,
        target_batch_size: float,
        apply: Apply | None = None,
        start: Mapping[str, Value] | None = None,
        state: RunState | nn.Module | None = None,
        wait: float = 30.0,
        teams: int = 0,
        verify: bool = True,
        copy_timeout: float = 600.0,
        upload_mbps: float | None = None,
        download_mbps: float | None = None,
        **options: Any,
    ) -> None:
        check_averager(averager)
        run_state = _checked(averager, model, team, state, options)
        _check_options(wait=wait, members=teams, copy_timeout=copy_timeout)
        first = settings.checked(settings.first(team) if start is None else start)
        self._settings = settings
        averager.declare([torch.zeros(1)])  # states need to know a vector, and this run averages none
        sharing = averager.share_states(
            ShareSettings(log_bytes=LOG_BYTES, upload_mbps=upload_mbps, download_mbps=download_mbps)
        )
        if sharing.belongs_to_several:
            raise ValueError(
                "averager is one of a process that shares its peer with others, whose states are not a team's:"
                " give each process of a team a peer of its own, with open_averager"
            )
        self._board = averager.board(TEAM_TOPIC)
        self._turns = Turns(
            self._board,
            sharing,
            settings,
            TurnOptions(wait=wait, teams=teams, verify=verify, copy_timeout=copy_timeout),
            peer_id=averager.peer_id,
            clock=time.monotonic,
            pause=self._pause,
        )
        self._held: Held | None = None
        config = replace(averager.config, run_id=team_run(averager.config.run_id, team))
        own, self._close = averager.open_sibling(config)
        try:
            self.optimizer = TeamMember(
                optimizer,
                own,
                team=team,
                settings=settings,
                apply=apply,
                start=first,
                ballots=self._turns.ballot,
                state=run_state,
                target_batch_size=target_batch_size,
                **options,
            )
        except BaseException:
            self._close()
            raise

    # ------------------------------------------------------------------ the team

    @property
    def team(self) -> str:
        """Name of the team."""
        return self.optimizer.life.team

    @property
    def is_due(self) -> bool:
        """True if the next :meth:`step` may end a generation, and needs a score."""
        return self.optimizer.life.since + 1 >= self._settings.interval and not self.optimizer.vote

    @property
    def generation(self) -> int:
        """Number of generations that the team has finished."""
        return self.optimizer.life.generation

    @property
    def steps(self) -> int:
        """Updates in the present weights, also those of teams from which they were copied."""
        return self.optimizer.life.steps + self.optimizer.life.since

    @property
    def hyperparameters(self) -> Mapping[str, Value]:
        """Those in force, by name."""
        return MappingProxyType(dict(self.optimizer.life.hyperparameters))

    @property
    def lineage(self) -> tuple[Ancestor, ...]:
        """The generations through which the present weights have gone, the oldest first.

        It is as long as the training of these weights, also if this peer has joined late. A generation on whose score
        the team did not agree is left out.
        """
        return self.optimizer.life.ancestors

    @property
    def history(self) -> TeamHistory:
        """The words of all teams that this peer has seen; :meth:`TeamHistory.svg` draws a line for each team."""
        self._turns.look()
        return self._turns.history

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients; call it before each backward pass."""
        self.optimizer.zero_grad(set_to_none)

    # ------------------------------------------------------------------ training

    def step(
        self,
        score: Score | None = None,
        *,
        samples: float | None = None,
        metrics: Mapping[str, float] = NO_METRICS,
    ) -> TeamReport:
        """Take one batch, whose gradients the parameters hold; take the update and the team's decision if they are due.

        Args:
            score: the present weights' score, or a function that measures it. It is used, or called, only at the end of
                a generation, and should be the same measure on all peers, on each peer's own data. A function lets
                this peer try the weights that its team is to copy; it must leave the parameters as they are.
            samples, metrics: as for :class:`~p2pavg.optim.AveragedOptimizer`; 14 metrics at most.

        Raises:
            ValueError: a generation may end and no score was given; or as :class:`~p2pavg.optim.AveragedOptimizer`.
            ClosedError: the averager is closed.
        """
        self._turns.look()
        if score is None and self.is_due:
            raise ValueError(
                "a generation may end with this step, so it needs a score; give a function, or see is_due"
            )
        member = self.optimizer
        update = member.step(samples=samples, metrics=metrics)
        concluded, member.concluded = member.concluded, None
        report = None if concluded is None else self._report(concluded)
        # Without a score, this call has taken two updates: the next one asks for it.
        if score is not None and member.ends_generation and not member.vote:
            measure = score if callable(score) else _constant(score)
            self._held = self._turns.hold(member, measure, can_repeat=callable(score))
        return TeamReport(update=update, generation=report)

    def _report(self, concluded: Concluded) -> GenerationReport:
        held, self._held = self._held, None
        life, ballot = self.optimizer.life, concluded.ballot
        if ballot is None:
            reason = "no proposal had the votes of more than half of the team: it keeps its weights"
        elif held is not None and held.proposal.ballot.donor == ballot.donor:
            reason = held.proposal.reason
        else:
            reason = "most peers of the team have voted for it"
        own = math.nan if held is None else held.score
        return GenerationReport(
            generation=life.generation,
            score=own if ballot is None else ballot.score,
            reason=reason,
            copied_from=None if concluded.donor is None else concluded.donor.member,
            hyperparameters=dict(life.hyperparameters),
            counted=() if held is None else held.proposal.counted,
            refused={} if held is None else held.proposal.refused,
            failures={} if held is None else held.failures,
            seconds=0.0 if held is None else held.seconds,
        )

    def leave(self) -> None:
        """Stop taking part: other peers of the team do not wait for this one, and its word counts no more."""
        self._turns.leave()
        self.optimizer.leave()

    def close(self) -> None:
        """Leave, and close the averager of the team. It closes with the population's averager at the latest."""
        self.leave()
        self._close()

    def _pause(self, pause: Pause) -> None:
        if pause.transfer is not None:
            pause.transfer.wait(pause.seconds)
        else:
            self._board.wait(pause.version, pause.seconds)


def _constant(score: float) -> Any:
    return lambda: score


def _checked(
    averager: Averager,
    model: nn.Module,
    team: str,
    state: RunState | nn.Module | None,
    options: Mapping[str, Any],
) -> RunState:
    """Check the arguments that no other object checks; return the team's state."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if team == "":
        raise ConfigError("team must be a name: give all peers of a team the same one")
    _check_options(member=team)
    longest = len(team_run(averager.config.run_id, team))
    if longest > MAX_RUN_ID_CHARS:
        raise ConfigError(
            f"team: with the run's name it has {longest} characters, {MAX_RUN_ID_CHARS} are the most"
        )
    for name in REFUSED:
        if name in options:
            raise ConfigError(f"{name} cannot be used by a team of a population")
    run_state = run_state_of(model if state is None else state)
    assert run_state is not None
    if run_state.model is not model:
        raise ConfigError("state must be that of model")
    return run_state


def _check_options(**given: Any) -> None:
    """Check options that have the limits of a single member's."""
    try:
        Options(**given)
    except ConfigError as error:
        raise ConfigError(str(error).replace("member", "team", 1)) from None
