"""Writes the demo policy's tokenizer: a token per task character, and bytes for every other text.

Usage: python make_tokenizer.py [--out DIR]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, processors

HERE = Path(__file__).parent
SPECIALS = ("<bos>", "<eos>", "<pad>")
CHARACTERS = "0123456789:=%-#;+*/(),. \n"
TASK_TOKENS = 64
CONTEXT_TOKENS = 512
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


def vocabulary() -> dict[str, int]:
    """320 ids: specials, task characters, reserved ids up to 64, then <0x00>..<0xFF>."""
    task = [*SPECIALS, *CHARACTERS]
    reserved = [f"<reserved_{index}>" for index in range(len(task), TASK_TOKENS)]
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    return {token: index for index, token in enumerate([*task, *reserved, *byte_tokens])}


def build_tokenizer() -> Tokenizer:
    """A BPE model without merges splits text into characters; an unknown character becomes its
    UTF-8 bytes.
    """
    ids = vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", ids["<bos>"])]
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def write_tokenizer(directory: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json; creates the folder."""
    directory.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo policy's tokenizer files.")
    parser.add_argument(
        "--out", type=Path, default=HERE / "policy_start", help="folder to write to"
    )
    write_tokenizer(parser.parse_args().out)


if __name__ == "__main__":
    main()
