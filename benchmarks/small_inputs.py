"""Make the inputs of other people's training scripts, small: a Llama with its tokenizer, texts, and images."""

import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = 60
LENGTH = 32
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
_IMAGE = 3 * 32 * 32


def make_model(folder: Path) -> None:
    """Write a Llama of two layers with random weights, and a tokenizer of whole words, as `from_pretrained` reads
    them."""
    vocabulary = {word: number for number, word in enumerate((*_SPECIAL, *(f"w{word}" for word in range(WORDS))))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, begin, end, unknown = _SPECIAL
    fast: Any = PreTrainedTokenizerFast
    fast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=begin,
        eos_token=end,
        unk_token=unknown,
        model_max_length=LENGTH,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def texts(count: int, seed: int) -> list[list[str]]:
    """Return sentences of different lengths in which a word limits the choice of the next one."""
    dice = random.Random(seed)
    found = []
    for _ in range(count):
        words = [dice.randrange(WORDS)]
        for _ in range(dice.randrange(8, 20)):
            words.append((words[-1] * 3 + dice.randrange(3)) % WORDS)
        found.append([f"w{word}" for word in words])
    return found


def make_texts(folder: Path, *, train: int, test: int) -> None:
    """Write `train.jsonl` and `test.jsonl` with a column `text`, as `datasets.load_dataset` reads a
    folder."""
    folder.mkdir(parents=True)
    for name, count in (("train", train), ("test", test)):
        lines = [json.dumps({"text": " ".join(words)}) for words in texts(count, seed=count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def make_chats(folder: Path, *, train: int, test: int) -> None:
    """Write `data/train.json` and `data/eval.json` with the columns of DeepSpeed-Chat's `local/jsonfile`."""
    (folder / "data").mkdir(parents=True)
    for name, count in (("train", train), ("eval", test)):
        rows = [
            {"prompt": " ".join(words[:4]), "chosen": " ".join(words[4:]), "rejected": words[0]}
            for words in texts(count, seed=count)
        ]
        (folder / f"data/{name}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_cifar(folder: Path, *, train: int, test: int) -> None:
    """Write images of noise around one mean for each class in the files of CIFAR-10 for Python (five to train)."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    means = draw.integers(64, 192, (10, _IMAGE))
    for name, count in (*((f"data_batch_{number}", train // 5) for number in range(1, 6)), ("test_batch", test)):
        labels = draw.integers(0, 10, count)
        images = np.clip(means[labels] + draw.integers(-60, 60, (count, _IMAGE)), 0, 255).astype(np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": images, "labels": labels.tolist()}))
    names = [f"class {label}" for label in range(10)]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
