"""OpenVINO GenAI behind OpenAI's completions, for `python -m research chains --peer`.

    python -m venv OV && OV/bin/pip install openvino-genai
    OV/bin/python checks/measures/openvino_server.py TARGET.gguf [--draft DRAFT.gguf] [--port 8090]
    python -m research chains --config FILE --peer http://127.0.0.1:8090

It needs nothing of SpecRouter. The files are those of `python -m research export-gguf` or of
llama.cpp's tools; OpenVINO keeps what it makes of a file beside it, in a folder of the file's name.
Requests that come together are decoded together, as its continuous batching does it.
"""

import argparse
import itertools
import json
import queue
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import openvino_genai as genai

ASSISTANT_TOKENS = 5  # drafted for each pass: OpenVINO's own examples' number


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A request, and the number and text of its answer's tokens."""

    prompt: str
    settings: Any
    answer: "Future[tuple[int, str]]" = field(default_factory=Future)


class Engine:
    """One thread alone calls the pipeline: who calls `serve`, which what fails there ends."""

    def __init__(self, target: Path, draft: Path | None) -> None:
        self.requests: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 2  # GiB
        scheduler.enable_prefix_caching = False  # no contender may have read a prompt before
        drafting = (
            {} if draft is None else {"draft_model": genai.draft_model(converted(draft), "CPU")}
        )
        folder = converted(target)
        self._drafts = draft is not None
        self._tokenizer = genai.Tokenizer(folder)
        self._pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", **drafting)

    def settings(self, body: dict[str, Any]) -> Any:
        settings = genai.GenerationConfig()
        settings.max_new_tokens = int(body.get("max_tokens", 16))
        settings.ignore_eos = bool(body.get("ignore_eos", False))
        temperature = float(body.get("temperature", 1.0))
        settings.do_sample = temperature > 0
        settings.temperature = temperature or 1.0
        settings.rng_seed = int(body.get("seed", 0)) % 2**32
        if self._drafts:
            settings.num_assistant_tokens = ASSISTANT_TOKENS
        return settings

    def serve(self) -> None:
        numbers = itertools.count()
        running: list[tuple[Completion, Any, list[int]]] = []
        while True:
            while not running or not self.requests.empty():
                one = self.requests.get()
                handle = self._pipeline.add_request(next(numbers), one.prompt, one.settings)
                running.append((one, handle, []))
            self._pipeline.step()
            for one, handle, ids in running:
                if handle.can_read():
                    ids += handle.read()[0].generated_ids
                if handle.get_status() == genai.GenerationStatus.FINISHED and not handle.can_read():
                    one.answer.set_result((len(ids), self._tokenizer.decode(ids)))
            running = [kept for kept in running if not kept[0].answer.done()]


def converted(file: Path) -> Path:
    """OpenVINO's own form of a GGUF file: continuous batching reads no other."""
    folder = file.with_suffix("")
    if not (folder / "openvino_model.xml").exists():
        folder.mkdir(exist_ok=True)
        linked = folder / file.name
        linked.unlink(missing_ok=True)
        linked.symlink_to(file.resolve())
        genai.LLMPipeline(linked, "CPU", enable_save_ov_model=True)
    return folder


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine
    model: str

    def do_GET(self) -> None:
        self.reply({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        one = Completion(prompt=body["prompt"], settings=self.engine.settings(body))
        self.engine.requests.put(one)
        tokens, text = one.answer.result()
        self.reply(
            {"choices": [{"index": 0, "text": text}], "usage": {"completion_tokens": tokens}}
        )

    def reply(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """One line per request would be work of its own."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--port", type=int, default=8090)
    asked = parser.parse_args()
    Handler.engine, Handler.model = Engine(asked.target, asked.draft), asked.target.stem
    server = ThreadingHTTPServer(("127.0.0.1", asked.port), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    print(f"{asked.target.name} at http://127.0.0.1:{asked.port}", flush=True)
    Handler.engine.serve()


if __name__ == "__main__":
    main()
