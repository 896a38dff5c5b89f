"""The user's settings, which every training process is given."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`compression` names a codec of p2pavg. A calm run has no late peer, and the launcher kills none."""

    peers: int = 4
    steps: int = 120
    batch_size: int = 16
    compression: str = "blockwise8"
    seed: int = 0
    calm: bool = False

    @property
    def late_peer(self) -> int | None:
        """The index of the peer that starts when the others have taken a sixth of the updates, if there is one."""
        return self.peers - 1 if self.peers >= 3 and not self.calm else None

    @property
    def killed_peer(self) -> int | None:
        """The index of the peer that the launcher kills after a third of the updates, if it kills one."""
        return None if self.calm else 1

    @property
    def peers_to_start(self) -> int:
        """The number of peers with which the first update is taken."""
        return self.peers - (self.late_peer is not None)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        return cls(**json.loads(text))
