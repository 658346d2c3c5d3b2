"""lm-evaluation-harness against the service.

Runs in an environment that has `lm-eval[api]`, without a network: tasks and their data are our own.
Every log-likelihood is compared with the one that `transformers` computes from the same tokens; the
service has to compute in float32, as we do.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
import torch
import yaml
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from checks.service.report import Finding, Report, run_client
from checks.service.two_choices import choice_questions, whole_texts, write_lines

_TARGET = Path(__file__).resolve().parents[2] / "modelpool" / "bundled" / "tiny-8m"
_TASKS = Path(__file__).resolve().parent / "tasks"
_LARGEST_DIFFERENCE = 1e-4

Samples = dict[str, list[dict[str, Any]]]


def main(report: Report, url: str, key: str) -> None:
    os.environ.update({"OPENAI_API_KEY": key, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
    reference = Reference()
    for backend in ("tokens", "text"):
        with report.check(f"local-completions, prompts as {backend}: a whole run") as finding:
            samples = evaluate(url, tokenized=backend == "tokens")
            finding.text = ", ".join(f"{len(all)} of {name}" for name, all in samples.items())
        with report.check(f"prompts as {backend}: choices' log-likelihoods") as finding:
            compare(choices_of(samples["two_choices"], reference), finding)
        with report.check(f"prompts as {backend}: whole texts' log-likelihoods") as finding:
            compare(texts_of(samples["texts"], reference), finding)


class Reference:
    """The target by `transformers`, in float32."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(_TARGET)
        self._model = AutoModelForCausalLM.from_pretrained(_TARGET, dtype=torch.float32)

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
                "model": "tiny-8m", "base_url": f"{url}/v1/completions", "tokenizer": str(_TARGET),
                "tokenizer_backend": "huggingface", "tokenized_requests": tokenized,
                "num_concurrent": 4, "max_retries": 1, "max_length": 1024,
            },
            batch_size=4,
            tasks=["two_choices", "texts"],
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
        write_lines(data, items)
        task = yaml.safe_load((_TASKS / f"{name}.yaml").read_text())
        task["dataset_kwargs"] = {"data_files": {"test": str(data)}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


def choices_of(samples: list[dict[str, Any]], reference: Reference) -> list[tuple[float, float]]:
    """What the service says, and what `transformers` does, of each choice."""
    pairs = []
    for sample in samples:
        for argument, (got, _) in zip(_arguments(sample), sample["filtered_resps"], strict=True):
            context, continuation = argument
            before = reference.tokenizer(context)["input_ids"]
            both = reference.tokenizer(context + continuation)["input_ids"]
            assert both[: len(before)] == before, f"{context!r} is not a prefix in tokens"
            pairs.append((float(got), reference.loglikelihood(before, both[len(before) :])))
    return pairs


def texts_of(samples: list[dict[str, Any]], reference: Reference) -> list[tuple[float, float]]:
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


def compare(pairs: list[tuple[float, float]], finding: Finding) -> None:
    assert pairs
    worst = max(abs(got - expected) for got, expected in pairs)
    finding.text = f"{len(pairs)} compared, largest difference {worst:.1e}"
    assert worst <= _LARGEST_DIFFERENCE, finding.text


def _arguments(sample: dict[str, Any]) -> list[tuple[str, ...]]:
    """Of each request that the harness made of a sample."""
    arguments = sample["arguments"]
    if isinstance(arguments, dict):
        return [tuple(one.values()) for one in arguments.values()]
    return [tuple(one) for one in arguments]


if __name__ == "__main__":
    run_client("lm_eval", main)
