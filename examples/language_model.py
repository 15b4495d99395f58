"""Train a small GPT on the source code of Python's standard library: a whole run in one readable file.

    hasten launch --cpu --num_processes 2 examples/language_model.py              two processes on a laptop
    hasten launch --cpu --num_processes 2 examples/language_model.py --resume     go on after an interruption
    hasten launch examples/language_model.py --size base                          one process per GPU

The text is what every machine with Python has, the modules of the standard library, byte by byte; one file in ten is
held out for validation. A run killed at any moment and resumed ends with the same losses, bit for bit, as any other.
"""

import argparse
import atexit
import json
import shutil
import sysconfig
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

from hasten import Accelerator, DataLoaderConfiguration, ProjectConfiguration, set_seed

# Bytes to train on, bytes to validate with, highest learning rate, and the shape of the model.
SIZES = {
    "tiny": (32_000, 5_000, 4e-3, {"length": 32, "layers": 1, "heads": 2, "width": 32}),
    "small": (1_600_000, 60_000, 4e-3, {"length": 128, "layers": 3, "heads": 4, "width": 96}),
    "base": (3_000_000, 300_000, 1e-3, {"length": 512, "layers": 8, "heads": 8, "width": 512}),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small", help="size of the text and of the model")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the text")
    parser.add_argument("--batch_size", type=int, default=12, help="sequences per step, in all processes together")
    parser.add_argument("--save_every", type=int, default=200, help="steps between validations, each with a checkpoint")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/language_model"))
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, where there is one")
    return parser.parse_args()


def read_standard_library(train_bytes: int, held_out_bytes: int) -> tuple[bytes, bytes]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[!_]*.py"))
    texts = [file.read_bytes().replace(b"    ", b"\t") for file in files]  # indented with tabs they are shorter
    train, held_out = [text for number, text in enumerate(texts) if number % 10 != 0], texts[::10]
    return b"".join(train)[:train_bytes], b"".join(held_out)[:held_out_bytes]


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
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.project(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, length: int, layers: int, heads: int, width: int, vocabulary: int = 256, dropout: float = 0.05):
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
    return functional.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:], reduction="none")


@torch.no_grad()
def validate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """The exact mean loss over the held-out text: of the last, uneven batch nothing is left out or counted twice."""
    model.eval()
    # The loader repeats sequences so that every process has equally many; gather_for_metrics drops the repetitions.
    losses = torch.cat([accelerator.gather_for_metrics(token_losses(model, batch).mean(1)) for batch in loader])
    model.train()
    assert len(losses) == len(loader.dataset)
    return losses.double().mean().item()


@torch.no_grad()
def write(model: GPT, prompt: bytes, count: int, seed: int, temperature: float = 0.8) -> str:
    """The prompt and what the model writes after it."""
    model.eval()
    window, device = len(model.positions.weight), model.head.weight.device
    random = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(count):
        probabilities = (model(tokens[:, -window:])[0, -1].float() / temperature).softmax(0)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=random)[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace").expandtabs(4)


class History:
    """Where the run stands; registered for checkpointing, so that it is saved and restored with the weights."""

    def __init__(self) -> None:
        self.step, self.train, self.validation = 0, [], []  # the lists hold (step, loss)

    def state_dict(self) -> dict:
        return vars(self)

    def load_state_dict(self, state: dict) -> None:
        vars(self).update(state)

    def draw(self, file: Path) -> None:
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(*zip(*self.train, strict=True), alpha=0.5, label="training, one batch")
        axes.plot(*zip(*self.validation, strict=True), marker="o", label="validation, all held-out text")
        axes.set(xlabel="step", ylabel="loss (nats per byte)", title="A small GPT learns Python's standard library")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(file, dpi=100)


class Display:
    """A progress bar on a terminal, lines of text elsewhere."""

    def __init__(self, step: int, total: int, tokens_per_step: int):
        self.step, self.time, self.total, self.tokens_per_step = step, time.perf_counter(), total, tokens_per_step
        text = TextColumn("{task.fields[now]}, time left")
        self.bar = Progress(BarColumn(20), MofNCompleteColumn(), text, TimeRemainingColumn())
        self.task = self.bar.add_task("train", total=total, completed=step, now="starting")
        if self.bar.console.is_terminal:
            self.bar.start()
            atexit.register(self.bar.stop)  # gives the cursor back after Ctrl-C

    def update(self, step: int, loss: float) -> None:
        now = time.perf_counter()
        speed = (step - self.step) * self.tokens_per_step / (now - self.time)
        self.step, self.time = step, now
        self.bar.update(self.task, completed=step, now=f"loss {loss:.3f}, {speed:,.0f} tokens/s")
        if not self.bar.console.is_terminal and (step % 50 == 0 or step == self.total):
            left = (self.total - step) * self.tokens_per_step / speed
            print(f"step {step}/{self.total}  loss {loss:.3f}  {speed:,.0f} tokens/s  {left:.0f} s left", flush=True)


def main() -> None:
    args = parse_arguments()
    train_bytes, held_out_bytes, highest_rate, shape = SIZES[args.size]
    accelerator = Accelerator(
        # Folders checkpoint_0, checkpoint_1, ... of which the newest two are kept.
        project_config=ProjectConfiguration(str(args.output_dir), automatic_checkpoint_naming=True, total_limit=2),
        # The processes share each batch, so any number of them takes the same steps at the same learning rates; and loaders go on
        # where they were.
        dataloader_config=DataLoaderConfiguration(split_batches=True, resume="position"),
    )
    set_seed(args.seed, device_specific=True)  # every process draws its own dropout

    texts, length = read_standard_library(train_bytes, held_out_bytes), shape["length"]
    train_set, held_out_set = (Sequences(text, length) for text in texts)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
    held_out_loader = DataLoader(held_out_set, args.batch_size)
    total = args.epochs * len(train_loader)
    model = GPT(**shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=highest_rate, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = OneCycleLR(optimizer, highest_rate, total, pct_start=0.05, cycle_momentum=False)  # warm-up, cosine
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    train_loader, held_out_loader = accelerator.prepare(train_loader, held_out_loader)
    history = History()
    accelerator.register_for_checkpointing(history)
    checkpoints = args.output_dir / "checkpoints"
    if args.resume and any(checkpoints.glob("checkpoint_*")):
        accelerator.load_state()
    elif accelerator.is_main_process:
        shutil.rmtree(checkpoints, ignore_errors=True)  # of an earlier run, which this one replaces
    parameters = sum(parameter.numel() for parameter in model.parameters())
    accelerator.print(
        f"{accelerator.num_processes} processes, {parameters:,} parameters, step {history.step} of {total}"
    )

    display = Display(history.step, total, args.batch_size * length) if accelerator.is_main_process else None
    if history.step == 0:
        history.validation.append((0, validate(accelerator, model, held_out_loader)))
    for _ in range(train_loader.iteration, args.epochs):
        for batch in train_loader:
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

    if display:
        display.bar.stop()
        (args.output_dir / "losses.json").write_text(json.dumps(history.state_dict()))
        history.draw(args.output_dir / "losses.png")
        print(write(accelerator.unwrap_model(model), b"def ", 400, args.seed))
        print(f"final losses: training {history.train[-1][1]!r}, validation {history.validation[-1][1]!r}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
