"""The process of one part: `python -m gpu_proof.part NAME PLACE ROWS`. Each row is written as soon as it is there."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path

from gpu_proof.experiments import PARTS
from gpu_proof.place import Place


def main() -> None:
    name, place, rows = sys.argv[1:]
    here, part = Place(**json.loads(place)), PARTS[name]
    os.environ.update(part.environment)  # before anything imports torch
    module, _, function = part.function.partition(":")
    measure = getattr(import_module(f"gpu_proof.{module}"), function)
    with Path(rows).open("a") as file:
        for row in measure(here, *part.arguments):
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
