"""`specrouter inflate` and `export-gguf`: other checkpoints, made of one that is there."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specrouter.cli.arguments import Commands


def add_inflate(commands: Commands) -> None:
    parser = commands.add_parser(
        "inflate", help="widen and deepen a small checkpoint without changing its function"
    )
    parser.add_argument("source_dir", type=Path, metavar="SOURCE_DIR")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument(
        "--parameters", type=int, default=200_000_000, metavar="N",
        help="of the copy, at least (default: 200000000)",
    )  # fmt: skip
    parser.set_defaults(run=_inflate, log_level=logging.WARNING)


def add_export_gguf(commands: Commands) -> None:
    parser = commands.add_parser(
        "export-gguf", help="write a Llama checkpoint as a GGUF file, for llama.cpp"
    )
    parser.add_argument("source_dir", type=Path, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: NAME-TYPE.gguf, in this folder"
    )
    parser.add_argument(
        "--type", choices=["bf16", "q8_0", "q4_0"], default="bf16",
        help="of matrices (default: bf16)",
    )  # fmt: skip
    parser.add_argument(
        "--pre", metavar="NAME",
        help="llama.cpp's name of how the tokenizer splits text, where it is not known here",
    )  # fmt: skip
    parser.set_defaults(run=_export_gguf, log_level=logging.WARNING)


def _inflate(arguments: argparse.Namespace) -> int:
    from modelpool.inflate.inflate import inflate_to

    source, out = arguments.source_dir, arguments.out_dir
    failed = f"cannot inflate {str(source)!r} to {str(out)!r}"
    with _making("inflate", f"inflating {source}", failed):
        shape = inflate_to(source, out, arguments.parameters)
    print(f"{out}: {shape.parameter_count / 1e6:.1f}M parameters")
    return 0


def _export_gguf(arguments: argparse.Namespace) -> int:
    from modelpool.export.gguf_file import export_gguf

    source: Path = arguments.source_dir
    out = arguments.out or Path(f"{source.resolve().name}-{arguments.type}.gguf")
    failed = f"cannot write {str(source)!r} to {str(out)!r}"
    with _making("export-gguf", f"writing {out}", failed):
        found = export_gguf(source, out, arguments.type, arguments.pre)
    size = found.size_bytes / 1e6
    print(f"{found.path}: {found.tensors} tensors, {size:.1f} MB, pre-tokenizer {found.pre}")
    return 0


@contextmanager
def _making(command: str, doing: str, failed: str) -> Iterator[None]:
    """Says what is being done; what goes wrong is a `ConfigError` of the command."""
    from modelpool.errors import ConfigError
    from modelpool.inflate.inflate import FAULTS
    from specrouter.progress import Progress

    try:
        with Progress(doing):
            yield
    except ConfigError:
        raise
    except FAULTS as error:
        raise ConfigError(command, f"{failed}: {error}") from error
