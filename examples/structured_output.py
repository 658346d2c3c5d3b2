"""Text that fits a JSON schema, for several seeds: `python -m examples.structured_output`.

Drafters ignore the schema: drafts that violate it are pruned, and every verifier is masked, so
speculation does not change the text here either. The bundled models are far too small to say
anything sensible; the point is that even their answers parse.
"""

import argparse
import json
from pathlib import Path

from specrouter import ChainRouter, SamplingParams, Structure
from specrouter.cli.arguments import default_config

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["function", "class", "module"]},
        "arguments": {"type": "integer", "minimum": 0, "maximum": 9},
        "is_public": {"type": "boolean"},
    },
    "required": ["kind", "arguments", "is_public"],
    "additionalProperties": False,
}
PROMPT = "def fib(n):\n    return n\n\n# As JSON: "


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=default_config(), help="a YAML scenario")
    parser.add_argument("--seeds", type=int, default=4, help="default: %(default)s")
    options = parser.parse_args(arguments)
    structure = Structure("json_schema", json.dumps(SCHEMA))
    params = [
        SamplingParams(max_new_tokens=96, temperature=1.0, seed=seed, structure=structure)
        for seed in range(options.seeds)
    ]
    with ChainRouter.from_config(options.config) as router:
        for output in router.generate([PROMPT] * options.seeds, params):
            answer = json.loads(output.text)
            print(f"seed {output.seed}: {json.dumps(answer)}  ({output.finish_reason})")


if __name__ == "__main__":
    main()
