"""Pads the softmax of the example's models further, since models of one family are padded to different widths."""

from __future__ import annotations

from pathlib import Path

HEAT = 1.5


def padded_model(source: Path, target: Path, *, rows: int) -> Path:
    """Write the same model and tokenizer, with `rows` more of embedding and output that have no token.

    Padding of published models is hardly ever likely, but this one is: each row is another row times `HEAT`. So the
    copy of a likely token is likelier than the token itself, and code that forgets to leave it out fails its test.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    width = model.config.vocab_size
    model.resize_token_embeddings(width + rows, mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):  # the same layer if tied
            layer.weight[width:] = HEAT * layer.weight[torch.arange(rows) % width]
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return target
