"""Runs the experiments of the first hour on GPUs, on whatever is there. benchmarks/README.md has `make gpu-proof`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gpu_proof.experiments import EXPERIMENTS
from gpu_proof.machine import found
from gpu_proof.place import Place
from gpu_proof.running import PAGE, RESULTS, Runner


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_proof", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-proof"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=("full", "tiny"), default="full")
    parser.add_argument("--minutes", type=float, help="time for all of it")
    parser.add_argument("--patience", type=float, default=1.0, help="times the deadline of each part")
    parser.add_argument("--again", action="store_true", help="repeat what is done")
    parser.add_argument("--only", default="", help="such as E1,E5")
    parser.add_argument("--vllm", default="", help="an interpreter that has vLLM")
    parser.add_argument("--sglang", default="", help="an interpreter that has SGLang")
    parser.add_argument("--node", default="", help="what runs a command on a second node, such as `ssh node2`")
    parser.add_argument("--address", default="", help="of this node, for the second")
    given = parser.parse_args()
    only = [each.strip().upper() for each in given.only.split(",") if each.strip()]
    if unknown := [each for each in only if each not in EXPERIMENTS]:
        parser.error(f"ONLY={given.only}: no experiment {', '.join(unknown)}; there are {', '.join(EXPERIMENTS)}")
    if given.device == "cpu" and given.shape == "full":
        parser.error("DEVICE=cpu tries the experiments themselves: it needs SHAPE=tiny")
    out = given.out.absolute()
    servers = (given.vllm, given.sglang, given.node, given.address)
    place = Place(given.device, given.shape, str(out / "models"), str(out / "scratch"), *servers)
    runner = Runner(
        out,
        found(),
        place,
        say=lambda line: (sys.stdout.write(line + "\n"), sys.stdout.flush())[0],
        patience=given.patience,
        minutes=given.minutes,
        again=given.again,
        only=only,
    )
    code = runner.run()
    sys.stdout.write(f"{given.out / PAGE} and {given.out / RESULTS}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
