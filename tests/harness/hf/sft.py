"""TRL's `SFTTrainer`, which inherits from Trainer and gathers metrics within each loss."""

import importlib
from typing import Any

_AS_GIVEN = (
    *("output_dir", "deepspeed", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "optim"),
    *("learning_rate", "adam_epsilon", "weight_decay", "warmup_steps", "max_grad_norm", "logging_steps"),
    *("save_strategy", "disable_tqdm", "dataloader_pin_memory"),
)


def make_sft(*, model: Any, args: Any, train_dataset: Any, **_: Any) -> Any:
    """Make one that trains on the same samples."""
    from tokenizers import Tokenizer, models  # noqa: PLC0415  (it takes seconds)

    datasets, trl, transformers = map(_imported, ("datasets", "trl", "transformers"))
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(60)}, unk_token="w1"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", unk_token="w1", eos_token="w2"
    )
    samples = [{name: value.tolist() for name, value in sample.items()} for sample in train_dataset]
    columns = {name: [sample[name] for sample in samples] for name in ("input_ids", "labels")}
    columns["attention_mask"] = [[1] * len(tokens) for tokens in columns["input_ids"]]
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(
            **{name: getattr(args, name) for name in _AS_GIVEN},
            report_to="none",
            max_length=None,
            bf16=False,
            gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=tokenizer,
    )


def _imported(name: str) -> Any:
    return importlib.import_module(name)
