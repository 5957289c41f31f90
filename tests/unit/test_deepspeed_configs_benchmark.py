"""`make show-trainers`: what counts as a configuration of DeepSpeed."""

import json

from benchmarks.deepspeed_configs import configurations, from_accelerate

ACCELERATE = """
deepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu, gradient_accumulation_steps: 4}
mixed_precision: bf16
"""
FILES = {
    "zero.json": json.dumps({"zero_optimization": {"stage": 1}}),
    "more/sizes.json": json.dumps({"train_batch_size": "auto", "my_key": 1}),
    "more/accelerate.yaml": ACCELERATE,
    "a_template.json": '{"train_batch_size": BATCH}',
    "a_list.json": "[1]",
    "another.json": json.dumps({"model": {"train_batch_size": 3}}),
    "names_a_file.yaml": "deepspeed_config: {deepspeed_config_file: zero.json}",
    "another.yml": "model: [",
}


def test_what_has_keys_of_deepspeed_is_a_configuration(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    found = {str(path.relative_to(tmp_path)): config for path, config in configurations(tmp_path)}
    assert sorted(found) == ["more/accelerate.yaml", "more/sizes.json", "zero.json"]
    assert found["zero.json"] == {"zero_optimization": {"stage": 1}}


def test_what_accelerate_makes_of_its_own_keys():
    block = {"zero_stage": 2, "offload_optimizer_device": "cpu", "gradient_accumulation_steps": 4}
    assert from_accelerate(block, "bf16") == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "none"},
        },
        "bf16": {"enabled": True},
    }
    assert from_accelerate({"deepspeed_config_file": "zero.json"}, "no") is None
