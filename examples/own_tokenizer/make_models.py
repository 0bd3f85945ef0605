"""Makes the models of this example: minutes on one core.

    python examples/own_tokenizer/make_models.py [--out DIR]

The teacher is trained as that of the running sum is, with a tokenizer that joins numbers of two digits. The student is
the running sum's. Its tokenizer decodes to the bytes of its tokens alone, without blanks between words: only of such a
tokenizer is it known which bytes a token has.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from tokenizers import decoders

HERE = Path(__file__).parent
RUNNING_SUM = HERE.parent / "running_sum"


def copy_with_bytes(model: Path, directory: Path) -> None:
    """Copy a model of the running sum, with a decoder to bytes."""
    shutil.copytree(model, directory, dirs_exist_ok=True)
    (directory / "manifest.json").unlink()
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text()) | {"decoder": json.loads(decoders.ByteLevel().__getstate__())}
    path.write_text(json.dumps(tokenizer, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the student and the teacher of the example.")
    parser.add_argument("--out", type=Path, default=HERE, help="where the directories are written")
    out = parser.parse_args().out
    copy_with_bytes(RUNNING_SUM / "student", out / "student")
    name = "joining_teacher"
    subprocess.run([sys.executable, RUNNING_SUM / "pretrain.py", "--only", name, "--out", out], check=True)
    (out / name).replace(out / "teacher")


if __name__ == "__main__":
    main()
