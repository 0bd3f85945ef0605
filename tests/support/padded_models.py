"""The example's models with a softmax that is padded further, as those of one family are."""

from __future__ import annotations

from pathlib import Path

HEAT = 1.5


def padded_model(source: Path, target: Path, *, rows: int) -> Path:
    """The same model and tokenizer with `rows` more of embedding and output, none of which has a token.

    Padding of published models is hardly ever likely. This is: each row is another's, times `HEAT`, so that the copy of
    a likely token is likelier than the token itself, and nothing that forgets to leave it out goes unnoticed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    width = model.config.vocab_size
    model.resize_token_embeddings(width + rows, mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):  # one and the same where tied
            layer.weight[width:] = HEAT * layer.weight[torch.arange(rows) % width]
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return target
