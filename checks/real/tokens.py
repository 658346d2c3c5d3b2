"""Token ids of odd texts, and of chats, here and in llama-server, of one GGUF file.

    python -m checks.real.tokens FILE --llama-server PATH

Exits with 1 where a chat's prompt differs. Of odd texts a few may: llama.cpp does not apply the NFC
of Qwen's tokenizer, and reads "</s>" of Qwen's vocabulary as a control token.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

from checks.real.peer import llama_command, posted, served, specrouter_command
from modelpool.gguf.header import read_header

_PORTS = (9314, 9315)
_DRAWN = 300
_PIECES = (
    *" \n\taZ9éß中😀.-_'\"<|>{\\",
    *("the ", "ing", "123", "\u0301", "\u0627", "def ", "    ", "I'll", "\r\n", "\u200b", "\ufeff"),
)
_TEXTS = (
    *("Hello world", "  two  spaces   three", "tabs\tand\nnewlines\n\n\n end", "", "\n", "   "),
    *("don't I'll we've THEY'RE", "1234567 3.14159 0x1F", "日本語のテキスト と 中文", "a\r\nb"),
    *("Ünïcödé naïve café é", "مرحبا بالعالم", "ꙮ𝔘𝔫𝔦", "🇩🇪", "x" * 50, "</think>"),
    *("<|im_start|>user\nhi<|im_end|>", "<start_of_turn>user\nHi<end_of_turn>\n"),
    "def f(x):\n    return x**2  # ok\n",
)
_CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "What is 2+2?"}],
    [
        {"role": "system", "content": "Answer in German."},
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Rot."},
        {"role": "user", "content": "Another."},
    ],
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="checks.real.tokens", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--llama-server", type=Path, metavar="PATH", required=True)
    given = parser.parse_args()
    own, peer = _PORTS
    draws = random.Random(0)
    drawn = ("".join(draws.choices(_PIECES, k=draws.randint(1, 30))) for _ in range(_DRAWN))
    command = llama_command(given.llama_server, given.file, peer, "-c", "512", "-np", "1")
    with (
        served(specrouter_command(given.file, own), own) as here,
        served(command, peer) as there,
    ):
        texts = [*_TEXTS, *drawn]
        differing = [one for one in texts if _ids(here.url, one) != _peer_ids(there.url, one)]
        for text in differing[:10]:
            print(f"differs: {text!r}")
        print(f"{len(differing)} of {len(texts)} odd texts have other ids")
        has_template = "tokenizer.chat_template" in read_header(given.file).facts
        chats = _CHATS if has_template else ()  # else each side has one of its own
        wrong = [chat for chat in chats if not _is_same_prompt(here.url, there.url, chat)]
    print(f"{len(wrong)} of {len(chats)} chats have other prompts")
    return 1 if wrong else 0


def _ids(url: str, text: str) -> Any:
    return posted(f"{url}/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]


def _peer_ids(url: str, text: str, has_begin: bool = False) -> Any:
    body = {"content": text, "add_special": has_begin, "parse_special": True}
    return posted(f"{url}/tokenize", body)["tokens"]


def _is_same_prompt(here: str, there: str, chat: list[dict[str, str]]) -> bool:
    own = posted(f"{here}/tokenize", {"messages": chat})["tokens"]
    prompt = posted(f"{there}/apply-template", {"messages": chat})["prompt"]
    return bool(own == _peer_ids(there, prompt, has_begin=True))


if __name__ == "__main__":
    sys.exit(main())
