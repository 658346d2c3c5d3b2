"""`specrouter export-gguf`: a checkpoint as llama.cpp reads it."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from specrouter.cli.arguments import Commands


def add_export_gguf(commands: Commands) -> None:
    parser = commands.add_parser(
        "export-gguf", help="write a Llama checkpoint as a GGUF file, for llama.cpp"
    )
    parser.add_argument("source_dir", type=Path, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: NAME-TYPE.gguf, in this folder"
    )
    parser.add_argument(
        "--type", choices=["bf16", "q8_0"], default="bf16", help="of matrices (default: bf16)"
    )
    parser.add_argument(
        "--pre", metavar="NAME",
        help="llama.cpp's name of how the tokenizer splits text, where it is not known here",
    )  # fmt: skip
    parser.set_defaults(run=_export_gguf, log_level=logging.WARNING)


def _export_gguf(arguments: argparse.Namespace) -> int:
    from modelpool.errors import ConfigError
    from modelpool.export.gguf_file import export_gguf
    from modelpool.inflate.inflate import FAULTS
    from specrouter.bench.progress import Progress

    source: Path = arguments.source_dir
    out = arguments.out or Path(f"{source.resolve().name}-{arguments.type}.gguf")
    try:
        with Progress(f"writing {out}"):
            found = export_gguf(source, out, arguments.type, arguments.pre)
    except ConfigError:
        raise
    except FAULTS as error:
        reason = f"cannot write {str(source)!r} to {str(out)!r}: {error}"
        raise ConfigError("export-gguf", reason) from error
    size = found.size_bytes / 1e6
    print(f"{found.path}: {found.tensors} tensors, {size:.1f} MB, pre-tokenizer {found.pre}")
    return 0
