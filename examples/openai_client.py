"""A chat and a completion through the `openai` package, against a running `specrouter serve`.

    pip install openai
    python -m examples.openai_client [--url http://127.0.0.1:8000] [--api-key KEY]

The answer is streamed; a chunk has all tokens that one pass of the target committed. Options that
OpenAI's interface lacks go into `extra_body`: here, the same request with and without speculation,
whose texts are equal because they have the same seed.
"""

import argparse
import sys
from typing import Any

PROMPT = "def fib(n):"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--api-key", default="none", help="where the service asks for one")
    parser.add_argument("--max-tokens", type=int, default=48, help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        import openai
    except ImportError:
        print("this example needs the openai package: pip install openai", file=sys.stderr)
        return 1
    client = openai.OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key)
    try:
        model = client.models.list().data[0].id
    except openai.APIConnectionError:
        print(f"no service at {options.url}: start one with `make serve`", file=sys.stderr)
        return 1
    except openai.APIStatusError as error:  # its message says what is wrong, such as the key
        print(f"{options.url} answers {error.status_code}: {error.message}", file=sys.stderr)
        return 1
    print(f"{model} answers:")
    _chat(client, model, options.max_tokens)
    texts = [
        _completion(client, model, options.max_tokens, speculation) for speculation in (None, "off")
    ]
    equal = "the same text" if texts[0] == texts[1] else "another text: see docs/results.md"
    print(f"\nspeculation off, same seed: {equal}")
    return 0


def _chat(client: Any, model: str, max_tokens: int) -> None:
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Write a function that adds two numbers."}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            details = chunk.usage.completion_tokens_details
            print(
                f"\n{chunk.usage.completion_tokens} tokens, "
                f"{details.accepted_prediction_tokens} of them drafted by smaller models"
            )


def _completion(client: Any, model: str, max_tokens: int, speculation: str | None) -> str:
    answer = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=max_tokens,
        temperature=0.8,
        seed=7,
        extra_body={"speculation": speculation},
    )
    text: str = answer.choices[0].text
    return text


if __name__ == "__main__":
    sys.exit(main())
