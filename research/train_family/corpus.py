"""Text for the bundled family: gathers documents per domain, trains the tokenizer, encodes.

Contract: `load_corpus(data_dir, work_dir)` returns token arrays per domain and split, and the
tokenizer, and keeps both under `work_dir`, so that a second run starts at once. Domains:

- `code`:  the Python standard library of the interpreter that runs this (PSF licence);
- `prose`: `peps_public_domain.rst`, the Python Enhancement Proposals (public domain);
- `math`:  `gsm8k_train.jsonl`, questions with worked answers (MIT).

One document in `VALIDATION_EVERY` goes to the validation split. Nothing is downloaded.
"""

import json
import logging
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

DOMAINS = ("code", "prose", "math")
VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
VALIDATION_EVERY = 50

# GPT-2's pattern with digits one by one, so that arithmetic has a stable spelling, and with
# runs of blanks kept together, which indentation needs.
_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_SKIPPED_FOLDERS = {"site-packages", "test", "tests", "encodings", "idlelib", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Token ids, [n] uint16, per domain."""

    train: dict[str, NDArray[np.uint16]]
    validation: dict[str, NDArray[np.uint16]]
    tokenizer: PreTrainedTokenizerFast


def _code_documents() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            text = path.read_text(encoding="utf-8", errors="replace")
            if len(text) > 200:
                yield text


def _prose_documents(data_dir: Path) -> Iterator[str]:
    text = (data_dir / "peps_public_domain.rst").read_text(encoding="utf-8")
    for part in re.split(r"^\.\. FILE .*$", text, flags=re.MULTILINE):
        if part.strip():
            yield part.strip() + "\n"


def _math_documents(data_dir: Path) -> Iterator[str]:
    for line in (data_dir / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        # The calculator annotations <<48/2=24>> are GSM8K's own mark-up, not text.
        answer = re.sub(r"<<.*?>>", "", row["answer"])
        yield f"Question: {row['question']}\nAnswer: {answer}\n"


def _train_tokenizer(documents: dict[str, list[str]]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    # Every domain weighs about the same number of bytes in the merges.
    share = min(sum(map(len, texts)) for texts in documents.values())
    sample: list[str] = []
    for texts in documents.values():
        stride = max(1, sum(map(len, texts)) // share)
        sample += texts[::stride]
    tokenizer.train_from_iterator(sample, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _encode(
    texts: list[str], tokenizer: PreTrainedTokenizerFast
) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    train: list[int] = []
    validation: list[int] = []
    for number, text in enumerate(texts):
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        (validation if number % VALIDATION_EVERY == 7 else train).extend(ids)
    return np.array(train, dtype=np.uint16), np.array(validation, dtype=np.uint16)


def load_corpus(data_dir: Path, work_dir: Path) -> Corpus:
    """Reads the texts under `data_dir`, or the arrays kept from an earlier run in `work_dir`."""
    arrays = work_dir / "corpus.npz"
    if not arrays.exists():
        documents = {
            "code": list(_code_documents()),
            "prose": list(_prose_documents(data_dir)),
            "math": list(_math_documents(data_dir)),
        }
        logger.info("training the tokenizer")
        tokenizer = _train_tokenizer(documents)
        tokenizer.save_pretrained(work_dir / "tokenizer")
        kept: dict[str, NDArray[np.uint16]] = {}
        for domain, texts in documents.items():
            kept[f"{domain}_train"], kept[f"{domain}_validation"] = _encode(texts, tokenizer)
            logger.info("%s: %d training tokens", domain, len(kept[f"{domain}_train"]))
        np.savez(arrays, **kept)  # type: ignore[arg-type]
    loaded = np.load(arrays)
    return Corpus(
        train={d: loaded[f"{d}_train"] for d in DOMAINS},
        validation={d: loaded[f"{d}_validation"] for d in DOMAINS},
        tokenizer=PreTrainedTokenizerFast.from_pretrained(work_dir / "tokenizer"),
    )
