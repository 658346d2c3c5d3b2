"""FAMILIES: published models that share a tokenizer, of which one may draft for another.

Names are from memory and documentation. None was downloaded or looked up: `specrouter check` shows
whether a checkpoint exists, fits and can be served.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Models that share a tokenizer.

    Attributes:
        name: name for users.
        hub_ids: names on the Hugging Face hub, from the largest model to the smallest.
    """

    name: str
    hub_ids: tuple[str, ...]

    def smaller_than(self, hub_id: str) -> Sequence[str]:
        """Return the smaller models, largest first; raise `ValueError` for an unknown `hub_id`."""
        return self.hub_ids[self.hub_ids.index(hub_id) + 1 :]


def _ids(pattern: str, *sizes: str) -> tuple[str, ...]:
    return tuple(pattern.format(size) for size in sizes)


FAMILIES: tuple[Family, ...] = (
    Family("Llama 3", (
        "meta-llama/Llama-3.1-405B-Instruct", "meta-llama/Llama-3.3-70B-Instruct",
        "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-3B-Instruct",
        "meta-llama/Llama-3.2-1B-Instruct")),
    Family("Llama 2", (
        *_ids("meta-llama/Llama-2-{}-chat-hf", "70b", "13b", "7b"),
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "JackFram/llama-68m")),
    Family("Qwen2.5",
           _ids("Qwen/Qwen2.5-{}-Instruct", "72B", "32B", "14B", "7B", "3B", "1.5B", "0.5B")),
    Family("Qwen3",
           _ids("Qwen/Qwen3-{}", "235B-A22B", "32B", "30B-A3B", "14B", "8B", "4B", "1.7B", "0.6B")),
    Family("Qwen3.5", (
        *_ids("Qwen/Qwen3.5-{}", "397B-A17B", "122B-A10B"), "Qwen/Qwen3.6-35B-A3B",
        "Qwen/Qwen3.6-27B", *_ids("Qwen/Qwen3.5-{}", "9B", "4B", "2B", "0.8B"))),
    Family("gpt-oss", _ids("openai/gpt-oss-{}", "120b", "20b")),
    Family("Gemma 4", _ids("google/gemma-4-{}-it", "31B", "26B-A4B", "E4B", "E2B")),
    Family("Gemma 3",
           _ids("google/gemma-3-{}-it", "27b", "12b", "4b", "1b", "270m")),
    Family("Gemma 2", _ids("google/gemma-2-{}-it", "27b", "9b", "2b")),
    Family("Ministral 3",
           _ids("mistralai/Ministral-3-{}-Instruct-2512-BF16", "14B", "8B", "3B")),
    Family("GLM-4.5", ("zai-org/GLM-4.5", "zai-org/GLM-4.5-Air")),
    Family("DeepSeek-V2",
           ("deepseek-ai/DeepSeek-V2-Chat", "deepseek-ai/DeepSeek-V2-Lite-Chat")),
    Family("Phi-3", _ids("microsoft/Phi-3-{}-4k-instruct", "medium", "mini")),
    Family("Granite 4",
           _ids("ibm-granite/granite-4.0-{}", "h-small", "h-tiny", "micro", "1b", "350m")),
    Family("Granite 3.3", _ids("ibm-granite/granite-3.3-{}-instruct", "8b", "2b")),
    Family("LFM2",
           _ids("LiquidAI/LFM2-{}", "8B-A1B", "2.6B", "1.2B", "700M", "350M")),
    Family("OLMo 2",
           _ids("allenai/OLMo-2-{}-Instruct", "0325-32B", "1124-13B", "1124-7B", "0425-1B")),
    Family("Falcon 3", _ids("tiiuae/Falcon3-{}-Instruct", "10B", "7B", "3B", "1B")),
    Family("SmolLM2",
           _ids("HuggingFaceTB/SmolLM2-{}-Instruct", "1.7B", "360M", "135M")),
    Family("EXAONE 4", _ids("LGAI-EXAONE/EXAONE-4.0-{}", "32B", "1.2B")),
    Family("Hunyuan",
           _ids("tencent/Hunyuan-{}-Instruct", "7B", "4B", "1.8B", "0.5B")),
    Family("ERNIE 4.5",
           _ids("baidu/ERNIE-4.5-{}-PT", "21B-A3B", "0.3B")),
    Family("Apertus", _ids("swiss-ai/Apertus-{}-Instruct-2509", "70B", "8B")),
    Family("Aya Expanse", _ids("CohereLabs/aya-expanse-{}", "32b", "8b")),
    Family("StableLM 2", _ids("stabilityai/stablelm-2-{}-chat", "12b", "1_6b")),
    Family("Minitron", _ids("nvidia/Minitron-{}-Base", "8B", "4B")),
    Family("StarCoder 2", _ids("bigcode/starcoder2-{}", "15b", "7b", "3b")),
    Family("Pythia",
           _ids("EleutherAI/pythia-{}", "12b", "6.9b", "2.8b", "1.4b", "410m", "160m", "70m")),
    Family("OPT",
           _ids("facebook/opt-{}", "66b", "30b", "13b", "6.7b", "2.7b", "1.3b", "125m")),
    Family("GPT-2", _ids("openai-community/gpt2{}", "-xl", "-large", "-medium", "")),
)  # fmt: skip


def family_of(hub_id: str) -> Family | None:
    return next((family for family in FAMILIES if hub_id in family.hub_ids), None)
