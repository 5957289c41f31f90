"""Write a text file in Megatron's format: a token for each byte, a document for each line. Takes a few seconds.

  python recipes/megatron/tokenize_text.py TEXT PREFIX        writes PREFIX.bin and PREFIX.idx

Then replace `--mock-data` by `--data-path PREFIX --split 90,5,5`, with `--tokenizer-type NullTokenizer` and
`--vocab-size 256`. Files that Megatron's own tools write are used in the same way.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

END = 0
"""The token that ends each line: no text has this byte."""


def tokenize(text: Path, prefix: Path) -> int:
    """Write both files and return the number of tokens."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    tokens = 0
    for line in text.read_bytes().splitlines():
        document = torch.tensor([*line, END], dtype=torch.int32)
        builder.add_document(document, [len(document)])
        tokens += len(document)
    builder.finalize(f"{prefix}.idx")
    return tokens


def main(words: list[str]) -> None:
    """Run from the command line."""
    if len(words) != 2 or not Path(words[0]).is_file():
        print("usage: tokenize_text.py TEXT PREFIX, and TEXT is a file", file=sys.stderr)
        sys.exit(2)
    text, prefix = map(Path, words)
    print(f"{tokenize(text, prefix):,} tokens in {prefix}.bin and {prefix}.idx")


if __name__ == "__main__":
    main(sys.argv[1:])
