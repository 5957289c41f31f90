"""What the jobs train: small models, the AutoTP settings that cut one, and their samples."""

from typing import Any

import torch

FEATURES = 8
VOCABULARY, LENGTH = 60, 10
CUT = {
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*up\.weight$"], "partition_type": "column"},
            {"patterns": [r".*down\.weight$"], "partition_type": "row"},
        ],
    }
}
"""AutoTP's settings for the cut."""


class Samples(torch.utils.data.Dataset[Any]):
    """Numbers, and what is to be learnt of them; a sample is drawn from its number."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self._count, self._dtype = count, dtype

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        x = torch.randn(FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        return number, x.to(self._dtype), x.sin().sum().to(self._dtype)


class Tokens(torch.utils.data.Dataset[Any]):
    """For a language model."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        generator = torch.Generator().manual_seed(number)
        return number, torch.randint(0, VOCABULARY, (LENGTH,), generator=generator), 0


class Cut(torch.nn.Module):
    """Two layers that are a pair, between others that all slots have."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(dropout)
        self.enter, self.up = torch.nn.Linear(FEATURES, 12), torch.nn.Linear(12, 24)
        self.down, self.norm, self.out = torch.nn.Linear(24, 12), torch.nn.LayerNorm(12), torch.nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.enter(x))
        out: torch.Tensor = self.out(self.norm(x + self.down(self.up(x).tanh())))
        return out


def adapt(model: torch.nn.Module) -> torch.nn.Module:
    """Train adapters of the queries and values, and nothing else."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415  (it takes seconds)

    adapted: torch.nn.Module = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return adapted


def make_transformer(kind: str) -> torch.nn.Module:
    """A small one; "adapted" ones train adapters alone."""
    if kind.startswith("adapted "):
        return adapt(make_transformer(kind.removeprefix("adapted ")))
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  (it takes seconds)

    torch.manual_seed(7)
    shape: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 48, "max_position_embeddings": LENGTH}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 8}
    grouped: dict[str, Any] = {"intermediate_size": 88, "num_key_value_heads": 4}
    own: dict[str, Any] = {
        "llama": grouped,
        "tied llama": grouped | {"tie_word_embeddings": True, "pad_token_id": 33},
        "mistral": grouped,
        "qwen2": grouped,
        "qwen3": grouped | {"head_dim": 6},
        "gpt_neox": {"intermediate_size": 80},
        "opt": {"ffn_dim": 80, "word_embed_proj_dim": 48, "dropout": 0.0},
    }
    make: Any = AutoModelForCausalLM.from_config
    model: torch.nn.Module = make(AutoConfig.for_model(kind.rsplit(maxsplit=1)[-1], **shape, **own[kind]))
    return model


def make_model(dtype: torch.dtype, dropout: float, *, cut: bool = False) -> torch.nn.Module:
    """From one seed on all ranks."""
    torch.manual_seed(7)
    if cut:
        return Cut(dropout).to(dtype)
    layers = [torch.nn.Linear(FEATURES, 33), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(33, 17)]
    return torch.nn.Sequential(*layers, torch.nn.LayerNorm(17), torch.nn.Tanh(), torch.nn.Linear(17, 1)).to(dtype)
