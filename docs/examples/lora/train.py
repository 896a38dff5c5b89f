"""Finetunes a causal language model with LoRA on all peers of the run: only the adapters are averaged.

Runs alone with ``python train.py``, and as a job. It needs ``transformers`` and ``peft``.
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import p2pavg
from p2pavg.optim import AveragedOptimizer, RunState

UPDATES = int(sys.argv[1]) if len(sys.argv) > 1 else 20
TEXT = (
    "the adapters travel, the base stays. each peer has its own batches. all hold the same bits. " * 40
).encode()
BLOCK = 32

# The base, the same on every peer. A real one is a larger file of the job, [[files]] in job.toml, and is read by
# GPT2LMHeadModel.from_pretrained(Path(__file__).parent / "base").
torch.manual_seed(0)
base = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=BLOCK, n_embd=64, n_layer=2, n_head=2))
model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True))
adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
torch.seed()

letters = torch.tensor(list(TEXT))
blocks = TensorDataset(letters.unfold(0, BLOCK, BLOCK // 2))

with p2pavg.job() as job:
    samples = job.samples(blocks)
    optimizer = AveragedOptimizer(
        torch.optim.AdamW(adapters, lr=1e-2),
        job.averager,
        target_batch_size=64,
        state=RunState(model, job.scratch / "checkpoints", every=10, data=samples),
        min_peers=job.min_peers,
    )
    loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(blocks, batch_size=8, sampler=samples)
    for (batch,) in loader:
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        report = optimizer.step(samples=len(batch), metrics={"loss": loss.item()})
        if isinstance(report.result, p2pavg.Success):
            averaged = report.result.averaged
            sent = sum(map(torch.numel, averaged.values() if isinstance(averaged, dict) else averaged))
            print(
                f"update {report.epoch}: loss {report.metrics['loss']:.3f}, {sent} numbers averaged",
                flush=True,
            )
        if optimizer.epoch >= UPDATES:
            break
    job.averager.end()

# The adapters alone, and the whole model, for programs that know nothing of p2pavg or peft.
model.save_pretrained(str(job.scratch / "adapters"))
model.merge_and_unload().save_pretrained(job.scratch / "model")  # type: ignore[operator]
print("saved in", job.scratch, flush=True)
