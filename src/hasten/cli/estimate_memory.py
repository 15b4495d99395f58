"""`hasten estimate-memory`: what a model needs in memory, in several types, to be loaded and to be trained."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.cli.model_sizes import (
    LIBRARIES,
    import_hub,
    library_in,
    read_config,
    sizes_of_model,
    sizes_of_path,
    sizes_on_hub,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hasten.cli.model_sizes import Sizes

# Into how many parts of a float32 each type divides.
_SHARES = {"float32": 1, "float16": 2, "int8": 4, "int4": 8}
_HEADERS = ["dtype", "Largest Layer", "Total Size", "Training using Adam"]
_HALF = ("float16", "bfloat16", "fp8")
_FILES = (".safetensors", ".bin", ".pt", ".pth", ".json")


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `hasten estimate-memory`; as a command of `subparsers`, if given."""
    description = (
        "Print how much memory a model needs to be loaded, and to be trained with Adam. Nothing of its values is read. A folder or "
        "file of weights needs no network; a name is looked for in the Hugging Face cache and on the Hub."
    )
    if subparsers is None:
        parser = argparse.ArgumentParser("hasten estimate-memory", description=description, allow_abbrev=False)
    else:
        parser = subparsers.add_parser("estimate-memory", description=description)
        parser.set_defaults(func=estimate_command)
    parser.add_argument(
        "model_name",
        help="a folder with weights or a config.json, a file of weights or an index of such files, or a model's name on the Hub",
    )
    parser.add_argument(
        "--library_name", "--library-name", choices=LIBRARIES,
        help="build the model with this library, without values; by default the one that its files or the Hub name",
    )  # fmt: skip
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=list(_SHARES),
        default=list(_SHARES),
        help="the types to show; by default all of them",
    )
    parser.add_argument(
        "--trust_remote_code", "--trust-remote-code", action="store_true",
        help="allow code from the model's repository to run on this machine; read it first",
    )  # fmt: skip
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    try:
        estimate_command(estimate_command_parser().parse_args(arguments))
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        print(f"hasten estimate-memory: {error}", file=sys.stderr)
        return 1
    return 0


def estimate_command(args: argparse.Namespace) -> None:
    """Print the table for what `estimate_command_parser` has parsed.

    Raises:
        ImportError: a library that is needed is not installed.
        OSError: there is no such model, it is gated, or there is no connection.
        ValueError: nothing says which library it is for.
        RuntimeError: that library cannot build it, or a file is damaged.
    """
    sizes = _measure(args)
    rows = [
        [dtype, *map(_convert_bytes, (layer, total)), _training(usage)]
        for dtype, layer, total, usage in _rows(args, sizes)
    ]
    print(create_ascii_table(_HEADERS, rows, f"Memory Usage for loading `{args.model_name}`"))
    print(f"{sizes.parameters:,} parameters; the largest layer is {sizes.layer}.")
    if sizes.stored:
        parts = ", ".join(f"{_convert_bytes(size)} {dtype}" for dtype, size in sizes.stored.items())
        print(f"Stored: {parts}.")
    if any("int" in dtype and size > sizes.total // 2 for dtype, size in sizes.stored.items()):
        print(
            "Most of it is stored as integers, which may be packed or quantized weights: the sizes count them as they are."
        )


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """The rows of the table: type, bytes of the largest layer, bytes of all, and the parts of training (-1: not possible).

    Raises:
        Exception: see `estimate_command`.
    """
    return _rows(args, _measure(args))


def estimate_training_usage(bytes: int, mixed_precision: str, msamp_config: str | None = None) -> dict[str, int]:
    """Bytes that training with Adam needs for each of its parts; the largest of them is what has to be there.

    Args:
        bytes: size of the model in float32.
        mixed_precision: "float32", or "float16" for mixed precision; others give -1, since nothing trains in them.
        msamp_config: without effect.
    """
    if mixed_precision == "float32":
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes, "step": bytes * 4}
    if mixed_precision in _HALF:
        return {"model": bytes, "optimizer": bytes * 2, "gradients": bytes + bytes // 2, "step": bytes * 2}
    return dict.fromkeys(("model", "optimizer", "gradients", "step"), -1)


def create_ascii_table(headers: list[str], rows: list[list[str]], title: str) -> str:
    """A table with lines around its cells and a title over it."""
    widths = [max(len(str(row[column])) for row in [headers, *rows]) for column in range(len(headers))]
    inner = sum(widths) + len(widths) - 1
    if len(title) > inner:
        widths[-1] += len(title) + 2 - inner
        inner = len(title) + 2

    def line(left: str, cross: str, right: str) -> str:
        return left + cross.join("─" * width for width in widths) + right

    def cells(row: Sequence[Any]) -> str:
        return "│" + "│".join(str(cell).center(width) for cell, width in zip(row, widths, strict=True)) + "│"

    top = [f"┌{'─' * inner}┐", f"│{title.center(inner)}│", line("├", "┬", "┤"), cells(headers), line("├", "┼", "┤")]
    return "\n".join([*top, *map(cells, rows), line("└", "┴", "┘")])


# -- models by name --------------------------------------------------------------------------------------------------


def add_timm_hub_prefix(model_name: str) -> str:
    """The name by which timm looks for a repository of the Hub: `hf-hub:owner/name`; other names stay as they are."""
    return f"hf-hub:{model_name}" if "/" in model_name and ":" not in model_name else model_name


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """What the Hub knows of a repository; "gated" if it asks for permission, "repo" if it does not exist.

    Raises:
        ImportError: huggingface_hub is not installed.
        OSError: there is no connection.
    """
    hub = import_hub(repo)
    try:
        return hub.model_info(repo, token=token)
    except hub.errors.GatedRepoError:
        return "gated"
    except (hub.errors.RepositoryNotFoundError, hub.errors.HFValidationError):
        return "repo"
    except Exception as error:
        # The errors of a missing connection belong to the HTTP library of the installed version, and are no OSErrors there.
        if isinstance(error, OSError) or type(error).__module__.partition(".")[0].startswith(
            ("http", "requests", "urllib")
        ):
            raise OSError(
                f"The Hugging Face Hub cannot be asked for {repo} ({error}), and it is not in the cache. Give a folder or a file "
                "of weights, which needs no network."
            ) from error
        raise


def check_has_model(error: BaseException) -> str:
    """The library whose way it is to say with this error that a repository holds none of its models, or "unknown"."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = str(error)
    if (isinstance(error, KeyError) and error.args[:1] == ("architecture",)) or "Unknown model" in text:
        return "timm"
    if (
        "Unrecognized model in" in text
        or "does not appear to have a file named" in text
        or "EntryNotFoundError" in kinds
    ):
        return "transformers"
    return "unknown"


def create_empty_model(
    model_name: str, library_name: str | None, trust_remote_code: bool = False, access_token: str | None = None
) -> Any:
    """A model of transformers or timm on the meta device, by its name on the Hub or its folder.

    Raises:
        ImportError: the library is not installed.
        OSError: there is no such model, it is gated, or there is no connection.
        ValueError: nothing says which library it is for.
        RuntimeError: it is no model of that library.
    """
    library = library_name or _library_of(model_name, access_token)
    if library not in LIBRARIES:
        raise ValueError(f"Library `{library}` is not supported; {' and '.join(LIBRARIES)} are.")
    build = _build_timm if library == "timm" else _build_transformers
    try:
        return build(model_name, trust_remote_code, access_token)
    except Exception as error:
        if check_has_model(error) == "unknown":
            raise
        raise RuntimeError(
            f"Tried to load `{model_name}` with `{library}`, but it is no model of that library ({error}). Give another "
            f"--library_name: {', '.join(LIBRARIES)}."
        ) from error


def _library_of(name: str, token: str | None) -> str:
    """The library that a folder, the cache or the Hub names for a model."""
    config = read_config(Path(name).expanduser() / "config.json") or _cached_config(name)
    if library := library_in(config):
        return library
    if os.path.exists(os.path.expanduser(name)):
        raise ValueError(f"{name} does not say which library it is for; give --library_name.")
    info = verify_on_hub(name, token)
    if info == "gated":
        raise OSError(
            f"Repo for model `{name}` is gated. Ask for access on its page, then log in with `hf auth login`."
        )
    if info == "repo":
        raise OSError(
            f"Repo for model `{name}` does not exist on the Hub, or is private and you are not logged in (`hf auth login`); nor is "
            "there such a folder here."
        )
    if not info.library_name:
        raise ValueError(
            f"Model `{name}` does not have any library metadata on the Hub, please manually pass in a `--library_name` to use "
            "(such as `transformers`)"
        )
    return str(info.library_name)


def _cached_config(name: str) -> dict[str, Any]:
    """The configuration of a model that is in the Hugging Face cache; empty if it is not there."""
    try:
        found = import_hub(name).try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):
        return {}
    return read_config(Path(found)) if isinstance(found, str) else {}


def _build_timm(name: str, trust_remote_code: bool, token: str | None) -> Any:
    timm = _import_library("timm", name)
    import torch

    folder = Path(name).expanduser()
    with torch.device("meta"):
        return timm.create_model(
            f"local-dir:{folder}" if folder.is_dir() else add_timm_hub_prefix(name), pretrained=False
        )


def _build_transformers(name: str, trust_remote_code: bool, token: str | None) -> Any:
    transformers = _import_library("transformers", name)
    import torch

    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, token=token)
    custom = [kind for kind in getattr(config, "auto_map", None) or {} if kind.startswith("AutoModelFor")]
    kind = getattr(transformers, custom[0] if custom else "AutoModel")
    with torch.device("meta"):
        return kind.from_config(config, trust_remote_code=trust_remote_code)


def _import_library(library: str, name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(library)
    except ImportError as error:
        raise ImportError(
            f"To build `{name}`, {library} must be installed: pip install {library}. A folder or file of weights needs no library."
        ) from error


# -- measuring -------------------------------------------------------------------------------------------------------


def _measure(args: argparse.Namespace) -> Sizes:
    """The sizes of the model that was asked for: of files where there are files, else of the built model."""
    name, library = args.model_name, args.library_name
    path = Path(name).expanduser()
    if not path.exists() and (path.is_absolute() or name.startswith((".", "~")) or path.suffix in _FILES):
        raise FileNotFoundError(f"There is no file or folder {name}.")
    if path.exists() and library is None:
        try:
            return sizes_of_path(name)
        except FileNotFoundError:
            if not library_in(read_config(path / "config.json")):
                raise
    try:
        return sizes_of_model(create_empty_model(name, library, args.trust_remote_code))
    except (ImportError, OSError) as error:
        sizes = None if path.exists() or library is not None else _without_library(name, error)
        if sizes is None:
            raise
        return sizes


def _without_library(name: str, cause: Exception) -> Sizes | None:
    """The sizes by the headers of a model's files in the cache, else on the Hub; None if there are none."""
    try:
        return sizes_of_path(name)
    except FileNotFoundError:
        return sizes_on_hub(name) if isinstance(cause, ImportError) and "huggingface_hub" not in str(cause) else None


def _rows(args: argparse.Namespace, sizes: Sizes) -> list[list[Any]]:
    return [
        [
            dtype,
            sizes.largest / _SHARES[dtype],
            sizes.total / _SHARES[dtype],
            estimate_training_usage(sizes.total, dtype),
        ]
        for dtype in args.dtypes
    ]


def _training(usage: dict[str, int]) -> str:
    most = max(usage.values())
    return "N/A" if most < 0 else _convert_bytes(most)


def _convert_bytes(size: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


if __name__ == "__main__":
    raise SystemExit(main())
