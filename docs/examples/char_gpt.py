"""Four peers teach a small GPT to write like Python's documentation, with DiLoCo.

    .venv/bin/python docs/examples/char_gpt.py

The text is that of Python's own help topics. One process trains first. Then four peers begin with its parameters, each
with a quarter of the text. Every 25 steps they average their parameter changes, at 8 bits per parameter. The picture
shows the loss on held-out text: of the peers, and of the process if it continues alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional

import p2pavg
from p2pavg.optim import diloco, sync_parameters
from p2pavg.testing import LocalSwarm, Member

CONTEXT, WIDTH, BATCH = 64, 96, 8
Curve = list[tuple[int, float]]
"""(steps of a peer, held-out loss after them)."""

TEXT = "\n".join(topics[name] for name in sorted(topics))
LETTERS = sorted(set(TEXT))
TOKENS = torch.tensor([LETTERS.index(letter) for letter in TEXT])
TRAIN, HELD_OUT = TOKENS[: len(TOKENS) * 9 // 10], TOKENS[len(TOKENS) * 9 // 10 :]


class GPT(nn.Module):
    """Scores for the next letter: int64 (batch, time) to float32 (batch, time, letters)."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.scores = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the scores; each position sees the letters up to it."""
        time = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time)
        seen = self.letters(tokens) + self.places.weight[:time]
        scores: torch.Tensor = self.scores(self.layers(seen, mask=mask, is_causal=True))
        return scores

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy, in nats per letter, of windows (batch, CONTEXT + 1)."""
        return functional.cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the loss on 256 held-out windows."""
        starts = torch.linspace(0, len(HELD_OUT) - CONTEXT - 1, 256).long()
        return self.loss(windows_of(HELD_OUT, starts)).item()

    @torch.no_grad()
    def write(self, beginning: str, letters: int) -> str:
        """Continue a text, drawing each letter from the predicted distribution."""
        tokens = [LETTERS.index(letter) for letter in beginning]
        draw = torch.Generator().manual_seed(0)
        for _ in range(letters):
            scores = self(torch.tensor([tokens[-CONTEXT:]]))[0, -1]
            tokens.append(int(torch.multinomial(functional.softmax(scores / 0.7, 0), 1, generator=draw)))
        return "".join(LETTERS[token] for token in tokens)


def windows_of(tokens: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return the windows at these starts, (starts, CONTEXT + 1)."""
    return tokens[starts[:, None] + torch.arange(CONTEXT + 1)]


def batches(part: int, parts: int) -> Iterator[torch.Tensor]:
    """Draw batches of windows, (BATCH, CONTEXT + 1), from one part of the text, without end."""
    tokens, draw = TRAIN.chunk(parts)[part], torch.Generator().manual_seed(part)
    while True:
        yield windows_of(tokens, torch.randint(len(tokens) - CONTEXT, (BATCH,), generator=draw))


def inner_optimizer(model: GPT) -> torch.optim.Optimizer:
    """Return the inner optimizer, the same for the peers and the process that trains alone."""
    return torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))


def peer(member: Member) -> None:
    """Train as one of the peers.

    Outside a swarm, ``p2pavg.blocking.open_averager(config, bootstrap=[...])`` makes the averager.
    """
    torch.set_num_threads(1)
    how = member.arguments
    config = p2pavg.AveragingConfig(run_id="char-gpt", group_size=how["peers"], compression="blockwise8")
    model = GPT()
    if member.index == 0:
        model.load_state_dict(torch.load(how["start"]))
    with member.averager(config) as averager:
        sync_parameters(averager, model.parameters(), source=member.index == 0, peers=how["peers"])
        optimizer = diloco(
            inner_optimizer(model),
            averager,
            sync_every=how["sync_every"],
            lr=how["outer_lr"],
            peers_to_start=how["peers"],
        )
        sent = 0
        for step, windows in zip(
            range(1, how["steps"] + 1), batches(member.index, how["peers"]), strict=False
        ):
            optimizer.zero_grad()
            loss = model.loss(windows)
            torch.autograd.backward(loss)
            report = optimizer.step(samples=BATCH, metrics={"loss": loss.item()})
            if report.behind is not None:
                raise SystemExit(f"peer {member.index} was left behind: {report.behind}")
            if isinstance(report.result, p2pavg.Success):
                sent += report.result.bytes_sent
                if member.index == 0:
                    member.report(step=step, held_out=model.held_out_loss(), sent=sent)
        if member.index == 0:
            torch.save(model.state_dict(), how["end"])


def alone(model: GPT, first: int, last: int) -> Curve:
    """Train in one process without peers; return its losses."""
    optimizer, curve = inner_optimizer(model), []
    for step, windows in zip(range(first, last + 1), batches(0, 1), strict=False):
        optimizer.zero_grad()
        torch.autograd.backward(model.loss(windows))
        optimizer.step()
        if step % 100 == 0 or step == last:
            curve.append((step, model.held_out_loss()))
            show(*curve[-1])
    return curve


def together(how: argparse.Namespace, start: Path, end: Path) -> tuple[Curve, int]:
    """Train with peers, from the parameters in one file to those in another; return losses and bytes sent per peer."""
    arguments = {name: getattr(how, name) for name in ("peers", "steps", "sync_every", "outer_lr")}
    arguments |= {"start": str(start.resolve()), "end": str(end.resolve())}
    curve, sent = [], 0
    with LocalSwarm(peer, peers=how.peers, arguments=arguments) as swarm:
        swarm.start()
        for event in swarm.processes[0].events(600.0):
            curve.append((how.first_steps + event["step"], event["held_out"]))
            show(*curve[-1])
            sent = event["sent"]
        swarm.wait_ended(60.0)
    return curve, sent


def show(step: int, loss: float) -> None:
    """Print a line of the run."""
    print(f"  step {step:5}   held-out loss {loss:.3f}", flush=True)


def draw(curves: dict[str, Curve], where: Path) -> None:
    """Draw the losses over the steps of a peer."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), marker=".", label=name)
    axes.set(xlabel="steps of a peer", ylabel="held-out loss, nats a letter")
    axes.legend()
    figure.savefig(where, dpi=120)


def main() -> None:
    """Train first, continue alone and with peers, print and draw the losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=4, help="2 to 16 [%(default)s]")
    parser.add_argument("--first-steps", type=int, default=300, help="of the one process [%(default)s]")
    parser.add_argument("--steps", type=int, default=800, help="of each peer, after that [%(default)s]")
    parser.add_argument("--sync-every", type=int, default=25, help="H: steps between rounds [%(default)s]")
    parser.add_argument("--outer-lr", type=float, default=0.7, help="of the outer step [%(default)s]")
    parser.add_argument("--output", type=Path, default=Path("examples-output"), help="a folder [%(default)s]")
    how = parser.parse_args()
    if not 2 <= how.peers <= 16:
        parser.error("--peers: 2 to 16")
    if how.first_steps < 1 or not 1 <= how.sync_every <= how.steps:
        parser.error("--first-steps and --sync-every: at least 1; --steps: at least --sync-every")
    torch.set_num_threads(1)  # like the peers: so small a model is slower with more threads
    how.output.mkdir(parents=True, exist_ok=True)
    start, end = how.output / "char-gpt-start.pt", how.output / "char-gpt-end.pt"
    torch.manual_seed(0)
    model = GPT()
    print("one process:")
    first = alone(model, 1, how.first_steps)
    torch.save(model.state_dict(), start)
    print("the same process goes on alone:")
    by_itself = alone(model, how.first_steps + 1, how.first_steps + how.steps)
    print(f"{how.peers} peers go on together:")
    with_peers, sent = together(how, start, end)
    curves = {
        "alone": first + by_itself,
        f"{how.peers} peers, a round every {how.sync_every} steps": first[-1:] + with_peers,
    }
    picture = how.output / "char-gpt.png"
    draw(curves, picture)
    model.load_state_dict(torch.load(end))
    print(model.write("The import statement", 200))
    every_step = 4 * sum(p.numel() for p in model.parameters()) * 2 * (how.peers - 1) / how.peers * how.steps
    print(
        f"A peer sent {sent / 1e6:.1f} MB; gradients of every step in fp32 would be {every_step / 1e6:.0f} MB."
    )
    print(f"Held-out loss: {by_itself[-1][1]:.3f} alone, {with_peers[-1][1]:.3f} with peers: {picture}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
