"""The user's settings, which every training process is given."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`compression` names a codec of p2pavg; `match_timeout` is in seconds."""

    peers: int = 4
    steps: int = 120
    batch_size: int = 16
    compression: str = "blockwise8"
    seed: int = 0
    match_timeout: float = 5.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        return cls(**json.loads(text))
