"""Train the byte-level BPE tokenizer and write the files that describe it.

``python tokenizer.py --documents WORK/train.jsonl --to MODEL`` writes ``tokenizer.json``,
``tokenizer_config.json`` and ``generation_config.json``. The vocabulary holds all 256 byte symbols,
so every text round-trips. Splitting follows the GPT-4 and Qwen habit, with one change for Python:
a line's indentation is one piece, so that each usual indent is a single token.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB: Final = 4096
END_OF_TEXT: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"
SPECIALS: Final = (END_OF_TEXT, TURN_START, TURN_END)
SPLIT: Final = (
    r"(?<=\n) +"
    r"|(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
CHAT_TEMPLATE: Final = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def untrained() -> Tokenizer:
    """Return the byte-level pipeline around an empty BPE model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def texts(documents: Path, every: int) -> Iterator[str]:
    """Yield the text of each ``every``-th document."""
    with documents.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if number % every == 0:
                yield json.loads(line)["text"]


def train(documents: Path, every: int) -> Tokenizer:
    """Train on each ``every``-th document; the special tokens take the last ids."""
    tokenizer = untrained()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(documents, every), trainer)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    if tokenizer.get_vocab_size() != VOCAB:
        raise ValueError(f"vocabulary has {tokenizer.get_vocab_size()} entries, not {VOCAB}")
    return tokenizer


def write(tokenizer: Tokenizer, target: Path) -> None:
    """Write the tokenizer and the two JSON files that name its special tokens."""
    target.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(target / "tokenizer.json"))
    config = {
        # An empty map keeps transformers from replacing the splitting rules of this file by those
        # of its own Qwen3.5 class, which it does for every other checkpoint of this model type.
        "tokenizer_class": "TokenizersBackend",
        "auto_map": {"AutoTokenizer": []},
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "extra_special_tokens": {},
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    ids = {token: tokenizer.token_to_id(token) for token in SPECIALS}
    generation = {
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
        "eos_token_id": [ids[TURN_END], ids[END_OF_TEXT]],
        "pad_token_id": ids[END_OF_TEXT],
    }
    for name, content in (
        ("tokenizer_config.json", config),
        ("generation_config.json", generation),
    ):
        (target / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Parse the command line, train and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--every", type=int, default=4, help="use each N-th document")
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    write(train(options.documents, options.every), options.to)


if __name__ == "__main__":
    main()
