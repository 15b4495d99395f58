"""Train a small GPT on the source code of Python's standard library: a whole run in one readable file.

    hasten launch --cpu --num_processes 2 examples/language_model.py              two processes on a laptop
    hasten launch examples/language_model.py --size base                          one process per GPU
    hasten launch --cpu --num_processes 2 examples/language_model.py --resume     go on after an interruption

The text is what every machine with Python has, the modules of the standard library, byte by byte; one file in ten is
held out for validation. A run that is killed at any moment and resumed ends with the same losses, bit for bit, as one
that was left alone. --output_dir receives the checkpoints, the losses as numbers and as a picture.
"""

import argparse
import json
import math
import shutil
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hasten import Accelerator
from hasten.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

# (bytes to train on, bytes to validate with), and the shape of the model.
SIZES = {
    "tiny": ((32_000, 5_000), dict(length=32, layers=1, heads=2, width=32)),
    "small": ((1_000_000, 60_000), dict(length=128, layers=4, heads=4, width=128)),
    "base": ((4_000_000, 400_000), dict(length=512, layers=8, heads=8, width=512)),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small", help="size of the model and of the text")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the text")
    parser.add_argument("--batch_size", type=int, default=48, help="sequences per step, in all processes together")
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="the highest one, after the warm-up")
    parser.add_argument("--save_every", type=int, default=100, help="steps between validations and checkpoints")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/language_model"))
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    return parser.parse_args()


def read_standard_library(train_bytes: int, held_out_bytes: int) -> tuple[bytes, bytes]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[!_]*.py"))
    train = b"".join(file.read_bytes() for number, file in enumerate(files) if number % 10 != 0)
    held_out = b"".join(file.read_bytes() for number, file in enumerate(files) if number % 10 == 0)
    return train[:train_bytes], held_out[:held_out_bytes]


class Sequences(Dataset):
    """The text cut into sequences of `length` bytes, each with the byte that follows it."""

    def __init__(self, text: bytes, length: int):
        self.text, self.length = torch.frombuffer(bytearray(text), dtype=torch.uint8), length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.text[start : start + self.length + 1].long()


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # (batch, length, 3 * width) -> three tensors of (batch, heads, length, width of a head)
        q, k, v = self.query_key_value(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.project(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, length: int, layers: int, heads: int, width: int, vocabulary: int = 256, dropout: float = 0.1):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(self.dropout(x))))


def token_losses(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross-entropy, in nats, of each byte but the first: (batch, length + 1) -> (batch, length)."""
    return F.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:], reduction="none")


@torch.no_grad()
def validate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Exact mean loss over the held-out text.

    The last batch is uneven: the loader repeats sequences so that every process has equally many, and
    `gather_for_metrics` drops the repetitions.
    """
    model.eval()
    losses = torch.cat([accelerator.gather_for_metrics(token_losses(model, batch).mean(1)) for batch in loader])
    model.train()
    assert len(losses) == len(loader.dataset)
    return losses.double().mean().item()


@torch.no_grad()
def write(model: GPT, prompt: bytes, count: int, seed: int, temperature: float = 0.7) -> str:
    """Text that the model writes after the prompt."""
    model.eval()
    window, device = len(model.positions.weight), model.head.weight.device
    random = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(count):
        probabilities = (model(tokens[:, -window:])[0, -1].float() / temperature).softmax(0)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=random)[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


class History:
    """Where the run stands; registered for checkpointing, so saved and restored together with the weights."""

    def __init__(self) -> None:
        self.step = 0
        self.train: list[tuple[int, float]] = []  # steps and losses
        self.validation: list[tuple[int, float]] = []

    def state_dict(self) -> dict:
        return vars(self)

    def load_state_dict(self, state: dict) -> None:
        vars(self).update(state)

    def draw(self, file: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(*zip(*self.train, strict=True), alpha=0.6, label="training, one batch")
        axes.plot(*zip(*self.validation, strict=True), marker="o", label="validation, all held-out text")
        axes.set(xlabel="step", ylabel="loss (nats per byte)", title="A small GPT learns Python's standard library")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(file, dpi=100)


class Display:
    """A progress bar on a terminal, lines of text elsewhere."""

    def __init__(self, step: int, total: int, tokens_per_step: int):
        self.step, self.total, self.tokens_per_step, self.time = step, total, tokens_per_step, time.perf_counter()
        news = TextColumn("loss {task.fields[loss]:.3f}, {task.fields[speed]:,.0f} tokens/s, time left")
        self.bar = Progress(BarColumn(), MofNCompleteColumn(), news, TimeRemainingColumn())
        if self.bar.console.is_terminal:
            self.bar.start()
        self.task = self.bar.add_task("train", total=total, completed=step, loss=math.nan, speed=math.nan)

    def update(self, step: int, loss: float) -> None:
        now = time.perf_counter()
        speed = (step - self.step) * self.tokens_per_step / (now - self.time)
        self.step, self.time = step, now
        self.bar.update(self.task, completed=step, loss=loss, speed=speed)
        if not self.bar.console.is_terminal:
            seconds = (self.total - step) * self.tokens_per_step / speed
            print(f"step {step}/{self.total}  loss {loss:.3f}  {speed:,.0f} tokens/s  {seconds:.0f} s left", flush=True)


def main() -> None:
    args = parse_arguments()
    (train_bytes, held_out_bytes), shape = SIZES[args.size]
    accelerator = Accelerator(
        # Folders checkpoint_0, checkpoint_1, ... of which the newest two are kept.
        project_config=ProjectConfiguration(str(args.output_dir), automatic_checkpoint_naming=True, total_limit=2),
        # Each batch is split among the processes: any number of them takes the same steps on the same batches, with
        # the same learning rates. The order of the sequences follows from the seed and the epoch alone.
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=args.seed),
    )
    set_seed(args.seed, device_specific=True)  # every process draws a dropout of its own

    train_text, held_out_text = read_standard_library(train_bytes, held_out_bytes)
    train_set, held_out_set = Sequences(train_text, shape["length"]), Sequences(held_out_text, shape["length"])
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, generator=torch.Generator())
    held_out_loader = DataLoader(held_out_set, args.batch_size, generator=torch.Generator())
    total = args.epochs * len(train_loader)
    model = GPT(**shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)

    def learning_rate(step: int, warmup: int = max(1, total // 20)) -> float:
        """Share of the highest learning rate: a straight line up, then a cosine down to a tenth."""
        return min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * max(0, step - warmup) / (total - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    model, optimizer, scheduler, train_loader, held_out_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, held_out_loader
    )
    history = History()
    accelerator.register_for_checkpointing(history)
    checkpoints = args.output_dir / "checkpoints"
    if args.resume and any(checkpoints.glob("checkpoint_*")):
        accelerator.load_state()
    elif accelerator.is_main_process:
        shutil.rmtree(checkpoints, ignore_errors=True)  # of an earlier run, which this one replaces

    accelerator.print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(train_set):,} + {len(held_out_set):,} sequences "
        f"of {shape['length']} bytes, {accelerator.num_processes} x {accelerator.device.type}, step {history.step} of {total}"
    )
    display = Display(history.step, total, args.batch_size * shape["length"]) if accelerator.is_main_process else None
    first_epoch, batches_done = divmod(history.step, len(train_loader))
    for epoch in range(first_epoch, args.epochs):
        train_loader.set_epoch(epoch)
        for batch in accelerator.skip_first_batches(train_loader, batches_done):
            loss = token_losses(model, batch).mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            history.step += 1
            if history.step % 10 == 0 or history.step == total:
                history.train.append((history.step, accelerator.reduce(loss.detach(), "mean").item()))
                if display:
                    display.update(*history.train[-1])
            if history.step % args.save_every == 0 or history.step == total:
                history.validation.append((history.step, validate(accelerator, model, held_out_loader)))
                accelerator.save_state()
        batches_done = 0

    if accelerator.is_main_process:
        display.bar.stop()
        (args.output_dir / "losses.json").write_text(json.dumps(dict(train=history.train, validation=history.validation)))
        history.draw(args.output_dir / "losses.png")
        print(write(accelerator.unwrap_model(model), b"def ", 400, args.seed))
        print(f"final losses: training {history.train[-1][1]!r}, validation {history.validation[-1][1]!r}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
