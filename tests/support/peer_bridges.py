"""Finds what `renderers` writes between turns: `python peer_bridges.py GIVEN.json FOUND.json`.

The interpreter is that of an environment with renderers and transformers. Nothing of spot-async is imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FAMILIES = {  # its configuration, by the name of TRL's template
    **{"qwen2_5": "Qwen3", "qwen3_instruct_2507": "Qwen3", "qwen3": "Qwen3", "qwen3_vl": "Qwen3VL"},
    **{"qwen3_5_think": "Qwen35", "qwen3_6": "Qwen36", "qwen3_8": "Qwen38", "llama3_1": "Llama3", "llama3_2": "Llama3"},
    **{"nemotron_3_nano": "Nemotron3", "nemotron_3_super": "Nemotron3", "nemotron_3_ultra": "Nemotron3Ultra"},
    **{"nemotron_3_5_lightning": "Nemotron35", "glm4moe": "GLM45"},
}


def main(given: str, found: str) -> None:
    import renderers
    from transformers import AutoTokenizer

    bridges = []
    for case in json.loads(Path(given).read_text()):
        tokenizer = AutoTokenizer.from_pretrained(case["tokenizer"], local_files_only=True)
        config = getattr(renderers, f"{FAMILIES[case['name']]}RendererConfig")
        renderer = renderers.create_renderer(tokenizer, config(thinking_retention="all", **case["arguments"]))
        sequence = renderer.bridge_to_next_turn(case["prompt"], case["turn"], case["messages"], tools=case["tools"])
        bridges.append(sequence.token_ids[len(case["prompt"] + case["turn"]) :])
    Path(found).write_text(json.dumps(bridges))


if __name__ == "__main__":
    main(*sys.argv[1:])
