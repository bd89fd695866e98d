"""Trains semantic-tiny on generated conversations and writes its folder.

Knows nothing of MLX; the evaluation checks the written folder there.
Run: python -m tools.tiny_model.train
"""

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from tools.tiny_model import check, seeds
from tools.tiny_model import tokenizer as bpe
from tools.tiny_model.dialogues import dialogue, render
from tools.tiny_model.llama import Llama, Shape, load, round_to_half, save

SEED = 20261120
STEPS = 26_000
PEAK_RATE = 3e-3
BATCH_TOKENS = 65_536
SHARD_TOKENS = 2_097_152
WARM_UP = 300
CONSTANT_SHARE = 0.6
WEIGHT_DECAY = 0.05
OTHER_TOKENS_WEIGHT = 0.02


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the run at one sequence length."""

    length: int
    share: float
    shards: int
    patience: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What identifies a run of the trainer."""

    steps: int
    peak_rate: float
    seed: int
    begin: Path | None


# Short sequences teach the language and copying cheaply; long ones stretch it over distance.
STAGES = (
    Stage(512, 0.40, 128, 0.5),
    Stage(2048, 0.26, 96, 0.7),
    Stage(4096, 0.20, 80, 0.8),
    Stage(8192, 0.14, 48, 0.8),
)


def shard(seed: int, stage: Stage, index: int, rows: int) -> NDArray[np.int16]:
    """Conversations from their first token on, one a row, cut at the end and padded."""
    tokenizer = bpe.loaded()
    end = bpe.special_id("<|end|>")
    table = np.full((rows, stage.length + 1), end, dtype=np.int16)
    for row in range(rows):
        rng = Random(seeds.training(seed, stage.length, index, row))
        characters = max(200, int(stage.length * rng.uniform(1.6, 3.5)) - 300)
        ids = tokenizer.encode(render(dialogue(rng, characters, stage.patience))).ids
        table[row, : len(ids)] = ids[: stage.length + 1]
    return table


Shards = dict[int, list["Future[NDArray[np.int16]]"]]


def order_data(pool: ProcessPoolExecutor, seed: int, scale: float) -> Shards:
    """Starts the making of all data; later stages are made while earlier ones train."""
    return {
        stage.length: [
            pool.submit(
                shard, seed, stage, index, max(1, int(SHARD_TOKENS * scale) // stage.length)
            )
            for index in range(stage.shards)
        ]
        for stage in STAGES
    }


def batches(data: Tensor, rows: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Every row once in random order, then again in another order, for ever."""
    while True:
        order = torch.randperm(len(data), generator=generator)
        for start in range(0, max(1, len(data) - rows + 1), rows):
            yield data[order[start : start + rows].to(data.device)].long()


def loss_weights(tokens: Tensor, targets: Tensor, assistant: int, end: int) -> Tensor:
    """1 where the target is the assistant's, little elsewhere, 0 on padding."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    opened = torch.where(tokens == assistant, positions, -1).cummax(1).values
    closed = torch.where(tokens == end, positions, -1).cummax(1).values
    spoken = (opened > closed).float()
    padding = (tokens == end) & (targets == end)
    return (spoken + (1 - spoken) * OTHER_TOKENS_WEIGHT) * ~padding


def losses(model: Llama, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens).float().flatten(0, 1)
    return functional.cross_entropy(logits, targets.flatten(), reduction="none")


def rate(step: int, steps: int, peak: float) -> float:
    """Warm-up, a long high plateau, then a straight line down."""
    done = step / steps
    falling = 1.0 if done < CONSTANT_SHARE else max(0.01, (1 - done) / (1 - CONSTANT_SHARE))
    return peak * min(1.0, (step + 1) / WARM_UP) * falling


class Trainer:
    """One model, its optimiser and the step count that the learning rate follows."""

    def __init__(self, model: Llama, plan: Plan, device: str) -> None:
        self.assistant = bpe.special_id("<|assistant|>")
        self.end = bpe.special_id("<|end|>")
        self.seed = plan.seed
        self.steps = plan.steps
        self.peak = plan.peak_rate
        self.step = 0
        self.device = device
        self.model = model
        self.losses = torch.compile(losses, dynamic=False) if device == "cuda" else losses
        self.optimiser = torch.optim.AdamW(
            model.parameters(),
            lr=plan.peak_rate,
            betas=(0.9, 0.95),
            weight_decay=WEIGHT_DECAY,
            fused=device == "cuda",
        )

    def loss(self, batch: Tensor) -> Tensor:
        tokens, targets = batch[:, :-1], batch[:, 1:]
        weights = loss_weights(tokens, targets, self.assistant, self.end)
        with torch.autocast(self.device, torch.bfloat16):
            lost = self.losses(self.model, tokens, targets)
        return (lost.view_as(weights) * weights).sum() / weights.sum()

    def advance(self, batch: Tensor) -> Tensor:
        for group in self.optimiser.param_groups:
            group["lr"] = rate(self.step, self.steps, self.peak)
        loss = self.loss(batch)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.step += 1
        return loss.detach()


def run_stage(trainer: Trainer, stage: Stage, data: Tensor, until: int) -> None:
    generator = torch.Generator().manual_seed(trainer.seed + stage.length)
    stream = batches(data, max(1, BATCH_TOKENS // stage.length), generator)
    started, first = time.monotonic(), trainer.step
    while trainer.step < until:
        loss = trainer.advance(next(stream))
        if trainer.step % 500 == 0 or trainer.step == until:
            pace = (time.monotonic() - started) / (trainer.step - first)
            report = f"loss {loss.item():.4f}  {pace * 1000:.1f} ms a step"
            print(f"step {trainer.step}  length {stage.length}  {report}", flush=True)


def train(plan: Plan, shards: Shards, device: str) -> Llama:
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    model = Llama(Shape()).to(device)
    if plan.begin:
        load(model, plan.begin)
    print(f"{model.parameter_count} parameters", flush=True)
    trainer = Trainer(model, plan, device)
    share = 0.0
    for stage in STAGES:
        share += stage.share
        rows = [future.result() for future in shards.pop(stage.length)]
        data = torch.from_numpy(np.concatenate(rows)).to(device)
        print(f"{len(data)} conversations of up to {stage.length} tokens", flush=True)
        run_stage(trainer, stage, data, round(plan.steps * share))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rate", type=float, default=PEAK_RATE, help="the highest rate")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--begin", type=Path, help="a folder of weights to begin with")
    parser.add_argument("--data", type=float, default=1.0, help="share of the data to make")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument(
        "--repeats", type=int, default=check.REPEATS, help="trials of the closing check"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=bpe.FOLDER)
    given = parser.parse_args()
    if not (bpe.FOLDER / "tokenizer.json").exists():
        bpe.write(bpe.trained(bpe.samples(bpe.SAMPLES)), bpe.FOLDER)
    started = time.monotonic()
    plan = Plan(given.steps, given.rate, given.seed, given.begin)
    with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
        shards = order_data(pool, plan.seed, given.data)
        questions = check.order_questions(pool, given.repeats)
        model = train(plan, shards, given.device)
        print(f"trained in {time.monotonic() - started:.0f} s", flush=True)
        round_to_half(model)
        save(model, given.folder, bpe.special_id("<|end|>"))
        check.report(model, questions, given.device)
    print(f"{time.monotonic() - started:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
