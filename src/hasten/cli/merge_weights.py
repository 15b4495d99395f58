"""`hasten merge-weights`: one file of plain weights from the shards of a checkpoint."""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Write the file; returns the exit code. By default the arguments are this process's own."""
    options = _parser().parse_args(arguments)
    from hasten.checkpoint.merge import merge_fsdp_weights

    try:
        merge_fsdp_weights(
            options.checkpoint_directory,
            options.output_path,
            not options.unsafe_serialization,
            options.remove_checkpoint_dir,
        )
    except (OSError, ValueError, RuntimeError) as error:
        print(f"hasten merge-weights: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hasten merge-weights",
        description="Write the weights of a sharded model (SHARDED_STATE_DICT) as one file; one tensor at a time is in memory.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "checkpoint_directory",
        help="the folder of shards, such as checkpoint/pytorch_model_fsdp_0; if each process has its own file, the checkpoint",
    )
    parser.add_argument(
        "output_path", nargs="?", default=".", help="the folder for the file; by default the current one"
    )
    parser.add_argument(
        "--unsafe_serialization",
        "--unsafe-serialization",
        action="store_true",
        help="write pytorch_model.bin and not model.safetensors",
    )
    parser.add_argument(
        "--remove_checkpoint_dir",
        "--remove-checkpoint-dir",
        action="store_true",
        help="remove the shards afterwards",
    )
    return parser
