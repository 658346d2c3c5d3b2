"""lm-evaluation-harness against the service, without a network: tasks and their data are our own.

Every log-likelihood is compared with the one that `transformers` computes from the same tokens; the
service has to compute in float32, as we do.
"""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from checks.service.client import MODEL, TARGET, Checks

_LARGEST_DIFFERENCE = 1e-4
_JSON = {"dataset_path": "json", "test_split": "test", "metadata": {"version": 1.0}}
_TASKS: dict[str, dict[str, Any]] = {
    "two_choices": {  # which of two continuations is the likelier one
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "texts": {  # the perplexity of whole texts
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    },
}
_NAMES = ("Anna", "Tom", "Maria", "Ben")
_CODE = ("for i in range(10", "def add(a, b", "print(len(items", "return max(values")
_TEXTS = (
    "The sea was calm that morning, and the fishermen went out early.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1)\n",
    "Question: Tom has 5 apples and buys 3 more. How many has he?\nAnswer: 8",
    "import os\n\nclass Cache:\n    def __init__(self):\n        self.items = {}\n",
    "A café in Zürich sells 12 kinds of tea: green, black, white and nine others.",
)

Samples = dict[str, list[dict[str, Any]]]
Pairs = list[tuple[float, float]]  # what the service says, and what `transformers` does


def lm_eval_checks(url: str, key: str) -> Checks:
    os.environ.update({"OPENAI_API_KEY": key, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
    reference, samples = Reference(), dict[str, list[dict[str, Any]]]()

    def run(backend: str) -> str:
        samples.clear()
        samples.update(evaluate(url, tokenized=backend == "tokens"))
        return ", ".join(f"{len(all)} of {name}" for name, all in samples.items())

    def compared(pairs_of: Callable[[list[dict[str, Any]], Reference], Pairs], task: str) -> str:
        return compare(pairs_of(samples[task], reference))

    for backend in ("tokens", "text"):
        yield f"local-completions, prompts as {backend}: a whole run", partial(run, backend)
        yield (
            f"prompts as {backend}: choices' log-likelihoods",
            partial(compared, choices_of, "two_choices"),
        )
        yield (
            f"prompts as {backend}: whole texts' log-likelihoods",
            partial(compared, texts_of, "texts"),
        )


class Reference:
    """The target by `transformers`, in float32."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(TARGET)
        self._model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)

    @torch.inference_mode()
    def loglikelihood(self, context: Sequence[int], continuation: Sequence[int]) -> float:
        tokens = torch.tensor([[*context, *continuation]])
        logprobs = self._model(tokens).logits[0, :-1].double().log_softmax(-1)
        chosen = logprobs.gather(1, tokens[0, 1:, None])[len(context) - 1 :]
        return float(chosen.sum())


def evaluate(url: str, tokenized: bool) -> Samples:
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder))
        results = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": MODEL, "base_url": f"{url}/v1/completions", "tokenizer": str(TARGET),
                "tokenizer_backend": "huggingface", "tokenized_requests": tokenized,
                "num_concurrent": 4, "max_retries": 1, "max_length": 1024,
            },
            batch_size=4,
            tasks=list(_TASKS),
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            log_samples=True,
            bootstrap_iters=0,
        )  # fmt: skip
    samples: Samples = results["samples"]
    return samples


def write_tasks(folder: Path) -> None:
    """The tasks with their data, whose paths cannot be known before."""
    for name, items in (("two_choices", choice_questions()), ("texts", whole_texts())):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(f"{json.dumps(item)}\n" for item in items), encoding="utf-8")
        task = {"task": name, **_JSON, **_TASKS[name]}
        task["dataset_kwargs"] = {"data_files": {"test": str(data)}}
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


def choice_questions() -> list[dict[str, Any]]:
    """Forty of them; `label` is the place of the right choice."""
    sums = [
        (f"Question: {name} has {a} apples and buys {b} more.\nAnswer: {name} has", a + b)
        for name in _NAMES
        for a, b in ((2, 3), (5, 4), (1, 6), (3, 3), (7, 1), (4, 4), (2, 7))
    ]
    questions = [
        {"text": text, "choices": [f" {total} apples.", f" {total + 5} pears."], "label": 0}
        for text, total in sums
    ]
    for start in _CODE:
        for right, wrong in (("):", ")}"), ("):\n    ", "]]\n    "), ("))", "((")):
            questions.append({"text": start, "choices": [wrong, right], "label": 1})
    return questions


def whole_texts() -> list[dict[str, Any]]:
    return [{"text": text * repeats} for text in _TEXTS for repeats in (1, 3)]


def choices_of(samples: list[dict[str, Any]], reference: Reference) -> Pairs:
    """Of each choice."""
    pairs = []
    for sample in samples:
        for argument, (got, _) in zip(_arguments(sample), sample["filtered_resps"], strict=True):
            context, continuation = argument
            before = reference.tokenizer(context)["input_ids"]
            both = reference.tokenizer(context + continuation)["input_ids"]
            assert both[: len(before)] == before, f"{context!r} is not a prefix in tokens"
            pairs.append((float(got), reference.loglikelihood(before, both[len(before) :])))
    return pairs


def texts_of(samples: list[dict[str, Any]], reference: Reference) -> Pairs:
    """The harness begins a text with the end-of-text token."""
    start = [reference.tokenizer.eos_token_id]
    return [
        (
            float(sample["filtered_resps"][0]),
            reference.loglikelihood(start, reference.tokenizer(text)["input_ids"]),
        )
        for sample in samples
        for (text,) in _arguments(sample)
    ]


def compare(pairs: Pairs) -> str:
    assert pairs
    worst = max(abs(got - expected) for got, expected in pairs)
    told = f"{len(pairs)} compared, largest difference {worst:.1e}"
    assert worst <= _LARGEST_DIFFERENCE, told
    return told


def _arguments(sample: dict[str, Any]) -> list[tuple[str, ...]]:
    """Of each request that the harness made of a sample."""
    arguments = sample["arguments"]
    if isinstance(arguments, dict):
        return [tuple(one.values()) for one in arguments.values()]
    return [tuple(one) for one in arguments]
