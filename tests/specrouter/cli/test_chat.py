"""A conversation on the terminal, with a bundled model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from specrouter import ChainRouter, Delta, SamplingParams
from specrouter.cli.main import main

TEMPLATE = (
    "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)
ARGV = ["chat", "tiny-1m", "--max-new-tokens", "6", "--system", "S"]


class Terminal:
    """What is typed, a None for Ctrl-C; the prompts and texts of answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, template: Path) -> None:
        self._template = template
        self._patch = monkeypatch
        self.prompts = list[str]()
        self.answers = list[str]()
        self.stops_at: int | None = None  # an answer's part, of the first one
        self.asked = list[SamplingParams]()

    def type(self, *lines: str | None, argv: Sequence[str] = ARGV, templated: bool = True) -> int:
        left = iter(lines)

        def read(_: str) -> str:
            line = next(left, EOFError)
            if line is EOFError:
                raise EOFError
            if line is None:
                raise KeyboardInterrupt
            return str(line)

        self._patch.setattr("builtins.input", read)
        self._patch.setattr(ChainRouter, "stream", self._streaming(ChainRouter.stream))
        own = ["--set", f"server.chat_template={self._template}"] if templated else []
        return main([*argv, *own])

    def _streaming(self, real: object) -> object:
        def stream(
            router: ChainRouter, prompt: list[int], params: SamplingParams
        ) -> Iterator[Delta]:
            self.prompts.append(str(router.tokenizer.decode(prompt, skip_special_tokens=True)))
            self.asked.append(params)
            self.answers.append("")
            for number, delta in enumerate(real(router, prompt, params)):  # type: ignore[operator]
                if number == self.stops_at:
                    self.stops_at = None
                    raise KeyboardInterrupt
                self.answers[-1] += delta.text
                yield delta

        return stream


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Terminal:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    return Terminal(monkeypatch, file)


def test_what_was_said_before_is_in_the_prompt_until_it_is_reset(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    assert terminal.type("one", "", "two", None, "/reset", "three") == 0
    first, second, third = terminal.answers
    assert terminal.prompts == [
        "<system>S<user>one<answer>",
        f"<system>S<user>one<assistant>{first}<user>two<answer>",
        "<system>S<user>three<answer>",
    ]
    out, err = capsys.readouterr()
    assert out == f"{first}\n{second}\n\n{third}\n\n"
    told = err.splitlines()
    assert told[-4] == "tiny-1m: Ctrl-C stops an answer, /reset begins anew, Ctrl-D ends"
    for line in told[-3:]:
        assert line.startswith("6 tokens (length) | ")
        assert " tokens/s | " in line
        assert "acceptance length" in line


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_came(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal.stops_at = 2
    assert terminal.type("one", "two") == 0
    part = terminal.answers[0]
    assert part
    assert terminal.prompts[1] == f"<system>S<user>one<assistant>{part}<user>two<answer>"
    assert "\nstopped\n" in capsys.readouterr().err


def test_an_answer_that_is_stopped_at_once_leaves_nothing(terminal: Terminal) -> None:
    terminal.stops_at = 0
    assert terminal.type("one", "two") == 0
    assert terminal.prompts[1] == "<system>S<user>two<answer>"


def test_a_model_without_a_template_is_told_and_what_does_not_fit_ends_nothing(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["chat", "tiny-1m", "--max-model-len", "40"]
    assert terminal.type("word " * 99, "hi", argv=argv, templated=False) == 0
    assert terminal.prompts[-1] == "User: hi\n\nAssistant:"
    told = capsys.readouterr().err
    assert "tiny-1m has no chat template: it reads a transcript in plain text (--set server" in told
    assert "(/reset begins anew)" in told
    most = 40 - terminal.asked[-1].max_new_tokens
    assert 0 < most < 40, "what is left of the context"


@pytest.mark.parametrize(("is_literal", "left"), [("true", "<|endoftext|>"), ("false", "")])
def test_special_tokens_that_are_typed_are_text_where_the_setting_says_so(
    is_literal: str, left: str, terminal: Terminal
) -> None:
    argv = [*ARGV, "--set", f"server.literal_user_text={is_literal}"]
    assert terminal.type("a<|endoftext|>b", argv=argv) == 0
    assert terminal.prompts == [f"<system>S<user>a{left}b<answer>"]
