"""Run by the Python of an environment with PyPI's `speculators`: convert checkpoints of other projects with it.

    convert_with_peer.py REQUEST.json ANSWER.json

REQUEST.json maps a name to `{"source": DIRECTORY, "verifier": DIRECTORY, "algorithm": NAME, "out": DIRECTORY,
"options": {...}}`. ANSWER.json gets, for each name, what it refuses with, or null.
"""

import json
import sys
import warnings
from pathlib import Path

from loguru import logger
from speculators.convert.entrypoints import convert_model


def main(request_path: str, answer_path: str) -> None:
    answer = {}
    for name, asked in json.loads(Path(request_path).read_text(encoding="utf-8")).items():
        try:
            convert_model(asked["source"], asked["verifier"], asked["algorithm"], asked["out"], **asked["options"])
        # A refusal is a finding, and the next checkpoint is still to be asked about.
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, NotImplementedError) as error:
            answer[name] = f"{type(error).__name__}: {error}"
        else:
            answer[name] = None
    Path(answer_path).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logger.remove()
    main(*sys.argv[1:])
