"""`ntp check` on DeepSpeed configurations, with the installed DeepSpeed, in a process of its own: it changes torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
BASE = {
    "ntp": {"enabled": True},
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "optimizer": ADAM,
}


SAMPLES = {"enabled": True, "data_sampling": {"enabled": True}}


def config(stage=0, tp=1, ntp=None, **more):
    parts = {"zero_optimization": {"stage": stage}, "tensor_parallel": {"autotp_size": tp}}
    return {**BASE, **parts, "ntp": {"enabled": True, **(ntp or {})}, **more}


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
}
JOBS = {
    "plain": (config(), []),
    "zero": (config(stage=1), ["--parameters", "1e9", "--nproc-per-node", "4", "--nnodes", "2"]),
    "zero without copies": (config(stage=2, ntp={"copies": {"mode": "off"}}), []),
    "autotp": (config(tp=4), []),
    "mpu": (config(stage=1, train_batch_size=8), ["--tp", "4"]),
    "off": ({name: value for name, value in config().items() if name != "ntp"}, []),
    "several": (
        config(
            zero_optimization={"stage": 3, "zero_quantized_weights": True, "reduce_scatter": False},
            gradient_predivide_factor=4.0,
            ntp={"route": "via_core"},
            data_efficiency=SAMPLES,
            checkpoint={"writer": {"type": "python"}},
        ),
        [],
    ),
    "one replica": (config(tp=8), []),
    "one replica of an mpu": (config(train_batch_size=4), ["--tp", "8"]),
    "another optimizer": (config(stage=1, optimizer={"type": "Lamb"}), []),
    "a sum, and nothing offloaded": (
        config(
            gradient_allreduce_op="sum",
            zero_optimization={
                "stage": 2,
                "offload_optimizer": {"device": "none"},
                "offload_param": {"device": "none"},
            },
        ),
        [],
    ),
    "an optimizer of matrices": (config(optimizer={"type": "Muon", "params": {"torch_adam": True}}), []),
    "adagrad": (config(stage=1, optimizer={"type": "Adagrad"}), []),
    "adamax": (config(optimizer={"type": "Adamax"}), []),
    "auto": (AUTO, []),
    "auto, of accelerate": (AUTO, ["--trainer", "accelerate", "--world-size", "4"]),
    "auto, in a loop": (AUTO, ["--trainer", "loop"]),
    "one process": ({**AUTO, "train_batch_size": 32, "train_micro_batch_size_per_gpu": 32}, []),
    "what deepspeed refuses": (config(compression_training={}), []),
    "an optimizer that is gone": (config(optimizer={"type": "OneBitAdam"}), []),
    "fused adam in halves": (config(tp=2, bf16={"enabled": True}, optimizer={"type": "Adam"}), []),
    "wide sums": (config(tp=2, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}), []),
    "another size": (config(), ["--world-size", "4"]),
    "odd ranks": (config(tp=3), []),
    "no such stage": (config(stage=7), []),
    "lost": (config(ntp={"lost": ["r1"]}), []),
    "a wrong key": (config(ntp={"copys": {}}), []),
    "a list": (config(curriculum_learning=[]), []),
}
PROBE = """
import contextlib, io, json, sys
from ntp_plugin.cli.main import main

found = {}
for name, words in json.load(open(sys.argv[1])).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["check", "--json", *words])
    found[name] = {"code": code, "out": out.getvalue(), "err": err.getvalue()}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    folder, jobs = tmp_path_factory.mktemp("configurations"), {}
    for number, (name, (content, words)) in enumerate(JOBS.items()):
        path = folder / f"{number}.json"
        path.write_text(json.dumps(content))
        jobs[name] = [str(path), *words]
    for path in sorted((ROOT / "recipes" / "deepspeed").glob("*.json")):
        jobs[path.name] = [str(path), "--world-size", "4", *(["--tp", "2"] if "mpu" in path.name else [])]
    (folder / "jobs").write_text(json.dumps(jobs))
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE, str(folder / "jobs")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture
def found(probed):
    def read(name, code):
        result = probed[name]
        assert (result["code"], result["err"]) == (code, "")
        return json.loads(result["out"])

    return read


def survived(check):
    return {loss["kind"] for loss in check["survivals"] if not loss["exit_code"]}


@pytest.mark.short
def test_replicas_of_one_rank_hold_everything(found):
    check = found("plain", 0)
    assert (check["accepted"], check["framework"], check["topology"]["dp"]) == (True, "deepspeed", 8)
    assert survived(check) == {"any one slot"}
    assert check["memory"] is None
    assert "8 processes are assumed" in check["notes"][0], "of the three sizes of batches"


def test_zero_needs_copies(found):
    check = found("zero", 0)
    assert survived(check) == {"any one slot", "any one host"}
    assert check["survivals"][0]["state_from"] == ["copies in memory"]
    copies, part = check["memory"]["copies"], 10**9 * 12 / 8
    assert check["memory"]["nominal"] is None
    assert part <= copies["version"] < 1.001 * part
    without = found("zero without copies", 0)
    assert survived(without) == set()
    assert without["survivals"][0]["exit_code"] == 4


def test_replicas_that_autotp_cuts_go_on_narrower(found):
    cut, own = found("autotp", 0), found("mpu", 0)
    assert cut["survivals"][0]["step_time"] < own["survivals"][0]["step_time"] == 2.0
    assert {"tensor_parallel.autotp_size"} <= {option["flag"] for option in cut["changes"]}
    codes = {loss["kind"]: loss["exit_code"] for loss in own["survivals"]}
    assert codes["the same slot of all replicas"] == 4, "no full replica is left"


@pytest.mark.short
def test_all_unsupported_keys_are_named_at_once(found):
    check = found("several", 1)
    flags = [option["flag"] for option in check["unsupported"]]
    assert flags == [
        "gradient_predivide_factor with ZeRO-3",
        "zero_optimization.zero_quantized_weights",
        "data_efficiency.data_sampling",
        "checkpoint.writer",
        "ntp.route = via_core",
    ]
    assert all(option["why"] and option["fix"] for option in check["unsupported"])
    assert check["survivals"] == []


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("one replica", "the layout"),
        ("one replica of an mpu", "the layout"),
        ("another optimizer", "optimizer.type = Lamb"),
        ("adagrad", "optimizer.type = Adagrad"),
        ("adamax", "optimizer.type = Adamax"),
        ("fused adam in halves", "optimizer.type = Adam"),
        ("wide sums", "data_types.grad_accum_dtype = fp32"),
    ],
)
def test_what_the_engine_would_refuse(found, name, flag):
    assert [option["flag"] for option in found(name, 1)["unsupported"]] == [flag]


def test_the_plugin_is_checked_as_if_it_were_on(found):
    check = found("off", 0)
    assert check["notes"][0].startswith('"ntp": {"enabled": true} is not in the configuration')


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("another size", "train_batch_size = 32 is not"),
        ("odd ranks", "8 processes do not make replicas of 3"),
        ("no such stage", "DeepSpeed cannot read the configuration"),
        ("lost", "ntp.lost names slots"),
        ("a wrong key", "ntp.copys is not a known key"),
        ("a list", "DeepSpeed cannot read the configuration"),
        ("auto, in a loop", "train_batch_size is 'auto', which DeepSpeed alone cannot read"),
        ("what deepspeed refuses", "The DeepSpeed compression library has been removed"),
        ("an optimizer that is gone", "neither DeepSpeed nor torch has an optimizer OneBitAdam"),
    ],
)
def test_bad_input_is_one_line_and_code_2(probed, name, message):
    result = probed[name]
    assert (result["code"], result["out"]) == (2, "")
    assert result["err"].startswith("ntp: ")
    assert result["err"].count("\n") == 1
    assert message in result["err"]


@pytest.mark.parametrize("name", ["a sum, and nothing offloaded", "an optimizer of matrices", "one process"])
def test_what_people_have_is_accepted(found, name):
    assert found(name, 0)["unsupported"] == []


@pytest.mark.parametrize(
    ("name", "who", "micro_batch", "ranks"),
    [("auto", "the HF Trainer", 8, 8), ("auto, of accelerate", "Accelerate", 1, 4)],
)
def test_what_a_trainer_would_fill_in_is_assumed(found, name, who, micro_batch, ranks):
    check = found(name, 0)
    assert check["topology"]["dp"] == ranks
    (note,) = [note for note in check["notes"] if note.startswith("8 values are 'auto'")]
    assert f"{who} fills them in; assumed: train_micro_batch_size_per_gpu = {micro_batch}" in note
    assert any(note.startswith("fp16 and bf16 are taken as off") for note in check["notes"])


def test_recipes_of_this_repository_are_accepted(probed):
    codes = {name: result["code"] for name, result in probed.items() if name.startswith("ds_config")}
    assert codes
    assert set(codes.values()) == {0}, codes
