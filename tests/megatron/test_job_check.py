"""`ntp check` on Megatron command lines and recipes, with the installed Megatron, in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

PROBE = """
import contextlib, io, json, sys
from ntp_plugin.cli.main import main

MODEL = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "8", "--seq-length", "16",
         "--micro-batch-size", "1", "--global-batch-size", "16", "--vocab-size", "1000", "--ffn-hidden-size", "256",
         "--tensor-model-parallel-size", "4"]
found = {}

def check(name, words, *, own=()):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["check", *own, *words])
    found[name] = {"code": code, "out": out.getvalue(), "err": err.getvalue()}

def script(name, *more, own=(), flags=("--ntp-enable",)):
    check(name, ["pretrain_gpt.py", *MODEL, *more, *flags], own=("--json", *own))

script("accepted")
script("not enabled", flags=())
script("sharded", "--use-distributed-optimizer", "--bf16", own=("--nnodes", "2", "--nproc-per-node", "4"))
PIPELINE = ["--pipeline-model-parallel-size", "2", "--global-batch-size", "32"]
TWO_HOSTS = ("--nnodes", "2", "--nproc-per-node", "8")
script("layers move", *PIPELINE, "--use-distributed-optimizer", "--untie-embeddings-and-output-weights", own=TWO_HOSTS)
script("none moves", *PIPELINE, own=TWO_HOSTS)
script("moving is forbidden", *PIPELINE, "--use-distributed-optimizer", "--ntp-actions-forbid", "move-layers",
       own=TWO_HOSTS)
script("no copies", "--use-distributed-optimizer", "--ntp-copies-mode", "off", own=("--world-size", "8"))
script("several", "--te-rng-tracker", "--use-torch-fsdp2", "--my-own-flag", "7")
script("latent", "--multi-latent-attention", "--q-lora-rank", "24", "--kv-lora-rank", "16", "--ntp-gpu-memory-gb", "1",
       own=("--world-size", "8"))
script("changes", "--async-save", "--save", "x", "--sequence-parallel", "--overlap-param-gather",
       "--transformer-impl", "transformer_engine")
script("interleaved", "--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1",
       "--global-batch-size", "6", own=("--world-size", "16"))
for name, stages in (("stages", "Ettt|tL"), ("virtual stages", "Ett|t|t|L"), ("bad stages", "Et|tL")):
    script(name, "--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", stages,
           "--global-batch-size", "6", own=("--world-size", "16"))
script("predictions", "--mtp-num-layers", "2", "--pipeline-model-parallel-size", "2", "--global-batch-size", "6",
       "--attention-dropout", "0", "--hidden-dropout", "0", own=("--world-size", "16"))
script("several about predictions", "--mtp-num-layers", "1", "--context-parallel-size", "2", "--ntp-gpu-memory-gb", "9",
       "--mtp-detach-heads", "--calculate-per-token-loss", "--attention-dropout", "0", "--hidden-dropout", "0",
       "--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "Ett|tt|m|L",
       own=("--world-size", "32"))
script("empty stage", "--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-layout", "Ett||tt|L",
       own=("--world-size", "32"))
script("split", "--ntp-gpu-memory-gb", "9", "--calculate-per-token-loss")
script("too little memory", "--ntp-gpu-memory-gb", "0.0001", "--calculate-per-token-loss")
EXPERTS = ["--num-experts", "8", "--expert-model-parallel-size", "4", "--sequence-parallel"]
script("experts", *EXPERTS, own=("--world-size", "16"))
script("dense layers", *EXPERTS, "--moe-layer-freq", "([0]*1+[1]*3)", "--moe-ffn-hidden-size", "32",
       "--disable-bias-linear", "--moe-shared-expert-intermediate-size", "16", "--use-distributed-optimizer",
       own=("--world-size", "16"))
INTERLEAVED = ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"]
for name, freq in (("dense stage", "([0]*2+[1]*2)"), ("dense chunk", "([0]*2+[1]*2)")):
    more = INTERLEAVED if name == "dense chunk" else INTERLEAVED[:2]
    script(name, *EXPERTS, *more, "--moe-layer-freq", freq, own=("--world-size", "32"))
script("two stages", "--pipeline-model-parallel-size", "2", own=("--world-size", "16"))
script("stages by their ends", "--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "3",
       own=("--world-size", "16"))
script("uneven experts", *EXPERTS, "--num-experts", "6", own=("--world-size", "16"))
script("experts without copies", *EXPERTS, "--ntp-copies-mode", "off", own=("--world-size", "16"))
script("uneven expert groups", *EXPERTS, own=("--world-size", "12"))
script("too few hosts", "--use-distributed-optimizer", "--ntp-copies-mode", "xor:2")
script("odd ranks", own=("--world-size", "6"))
script("zero", "--tensor-model-parallel-size", "0", "--micro-batch-size", "-1")
script("no number", "--num-layers", "two")
script("batch", "--global-batch-size", "3", own=("--world-size", "8"))
script("two batches", "--step-batch-size-schedule", "0:8 1K:16")
for name, sizes, own in (("schedule", "0:8 1K:16", ()), ("uneven schedule", "0:8 1K:18", ("--world-size", "16")),
                         ("no schedule", "8", ())):
    model = " ".join(MODEL).replace("--global-batch-size 16 ", "").split()
    check(name, ["pretrain_gpt.py", *model, "--step-batch-size-schedule", sizes, "--ntp-enable"], own=("--json", *own))
script("lost", "--ntp-lost", "r0.s0.t0")
check("no layers", ["--json", "pretrain_gpt.py", "--hidden-size", "64"])
check("recipe", ["--json", sys.argv[1], "--ntp-copies-protect", "all"])
check("text", ["pretrain_gpt.py", *MODEL, "--te-rng-tracker", "--ntp-enable"])
check("accepted text", ["pretrain_gpt.py", *MODEL, "--use-distributed-optimizer", "--async-save", "--save", "x"])
print(json.dumps(found))
"""
RECIPE = """\
ENV_VARS: {CUDA_DEVICE_MAX_CONNECTIONS: 1}
MODEL_ARGS:
  --num-layers: 4
  --hidden-size: 64
  --num-attention-heads: 8
  --seq-length: 16
  --micro-batch-size: 1
  --global-batch-size: 16
  --tensor-model-parallel-size: 2
  --swiglu: true
  --hidden-dropout: 0.1
"""


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    recipe = tmp_path_factory.mktemp("recipe") / "gpt_tp2_dgx_2N4G" / "model_config.yaml"
    recipe.parent.mkdir()
    recipe.write_text(RECIPE)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE, str(recipe)],
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture
def found(probed):
    """JSON that the command printed, by the name of the check; asserts its exit code."""

    def read(name, code):
        result = probed[name]
        assert (result["code"], result["err"]) == (code, "")
        assert result["out"].count("\n") == 1, "one object, and nothing that Megatron prints"
        return json.loads(result["out"])

    return read


def survived(check):
    return {loss["kind"] for loss in check["survivals"] if not loss["exit_code"]}


@pytest.mark.short
def test_an_accepted_job(found):
    check = found("accepted", 0)
    assert (check["accepted"], check["framework"], check["unsupported"]) == (True, "megatron", [])
    topology = check["topology"]
    assert [topology[name] for name in ("tp", "pp", "dp", "gpus_per_node")] == [4, 1, 2, 8]
    assert survived(check) == {"any one slot", "two slots of one stage of a replica", "all slots of a replica"}
    assert check["memory"]["copies"] is None
    assert [note.split()[0:4] for note in check["notes"]] == [["8", "processes", "are", "assumed;"]]


def test_memory_is_that_of_the_models_parameters(found):
    memory = found("sharded", 0)["memory"]
    embeddings, attention, mlp, norms = 2 * 1024 * 64, 4 * (4 * 64 * 64), 4 * (2 * 256 * 64), 9 * 64
    biases = 4 * (3 * 64 + 64 + 256 + 64)
    assert memory["parameters"] == embeddings // 2 + attention + mlp + norms + biases
    assert memory["nominal"]["weights"] < memory["degraded"]["weights"]
    assert memory["nominal"]["gradients"] == 2 * memory["nominal"]["weights"], "bf16, summed in float32"
    copies = memory["copies"]
    assert copies["near"] == copies["far"] == 2 * copies["version"]
    assert copies["version"] == -(-memory["nominal"]["weights"] // 2 * 12 // 2), "12 bytes, shared by two replicas"


def test_where_state_is_decides_what_is_survived(found):
    whole = {
        "any one slot",
        "two slots of one stage of a replica",
        "all slots of a replica",
        "the same slot of all replicas",
    }
    assert survived(found("sharded", 0)) == {*whole, "any one host"}
    without = found("no copies", 0)
    assert survived(without) == set()
    assert without["survivals"][0]["exit_code"] == 4
    assert "copies are off" in without["survivals"][0]["why"]


def test_layers_of_a_lost_stage_move_with_a_sharded_optimizer(found):
    """Each host has one stage of both replicas."""
    check = found("layers move", 0)
    assert "any one host" in survived(check)
    (host,) = [loss for loss in check["survivals"] if loss["kind"] == "any one host"]
    assert host["state_from"] == ["copies in memory"]
    assert host["step_time"] > 1
    for without in ("none moves", "moving is forbidden"):
        (host,) = [loss for loss in found(without, 0)["survivals"] if loss["kind"] == "any one host"]
        assert (host["survived"], host["exit_code"]) == (0, 3)


def test_latent_attention_is_counted_by_its_own_matrices(found):
    check = found("latent", 0)
    down, rotary, query, value, heads = 24 + 16, 64, 128, 128, 8
    attention = (down + rotary) * 64 + heads * ((query + rotary) * 24 + (query + value) * 16 + value * 64)
    embeddings, mlp, norms, biases = 1024 * 64, 4 * (2 * 256 * 64), 9 * 64, 4 * (64 + 256 + 64)
    assert check["memory"]["parameters"] == embeddings + 4 * attention + mlp + norms + biases
    assert "--multi-latent-attention" in {option["flag"] for option in check["changes"]}, "without sequence parallelism"


@pytest.mark.short
def test_all_unsupported_options_are_named_at_once(found):
    check = found("several", 1)
    assert [option["flag"] for option in check["unsupported"]] == ["--use-torch-fsdp2", "--te-rng-tracker"]
    assert all(option["why"] and option["fix"] for option in check["unsupported"])
    assert (check["accepted"], check["survivals"], check["memory"], check["changes"]) == (False, [], None, [])
    assert "not flags of Megatron, so taken for the script's own: --my-own-flag" in check["notes"]


def test_the_plugin_is_checked_as_if_it_were_on(found):
    check = found("not enabled", 0)
    assert check["notes"][0].startswith("--ntp-enable is not among the flags")
    assert check["survivals"] == found("accepted", 0)["survivals"]


def test_what_changes_while_ranks_are_lost(found):
    few = {option["flag"] for option in found("accepted", 0)["changes"]}
    many = {option["flag"] for option in found("changes", 0)["changes"]}
    added = {"--async-save", "--async-strategy", "--save", "--sequence-parallel", "--overlap-param-gather"}
    assert many - few == added
    assert {"--global-batch-size", "--hidden-dropout", "--attention-dropout"} <= few


def test_a_limit_of_memory_may_split_micro_batches(found):
    with_limit, without = ({option["flag"] for option in found(name, 0)["changes"]} for name in ("split", "accepted"))
    assert "--micro-batch-size" in with_limit - without


def test_a_schedule_of_batches(found):
    """The assumed ranks, and the share of a degraded replica, suit all of its sizes."""
    check = found("schedule", 0)
    assert check["topology"]["dp"] == 2
    assert "--step-batch-size-schedule" in {option["flag"] for option in check["changes"]}


def test_stages_have_the_layers_that_the_layout_says(found):
    """Three in the first, beside the embedding: the fullest slot has a quarter of what is cut of them."""
    cut, whole = 4 * 64 * 64 + 2 * 256 * 64 + 3 * 64 + 256, 2 * 64 + 2 * 64
    assert found("stages", 0)["memory"]["nominal"]["weights"] == 4 * (1024 * 64 // 4 + 3 * (cut // 4 + whole))


def test_layers_of_multi_token_prediction_are_in_the_last_stage(found):
    """Beside two of the four others; what is not counted there has a note."""
    check = found("predictions", 0)
    cut, whole = 4 * 64 * 64 + 2 * 256 * 64 + 3 * 64 + 256, 2 * 64 + 2 * 64
    assert check["memory"]["nominal"]["weights"] == 4 * (1024 * 64 // 4 + 4 * (cut // 4 + whole) + 64)
    assert "without the projections of multi-token prediction" in " ".join(check["notes"])
    assert "--mtp-num-layers" in {option["flag"] for option in check["changes"]}


def test_experts_survive_by_their_copies(found):
    check = found("experts", 0)
    assert {"any one slot", "all slots of a replica"} <= survived(check)
    assert check["memory"]["copies"]["version"] > 0
    assert not any("memory" in note for note in check["notes"])
    memory = check["memory"]
    assert memory["degraded"]["weights"] > memory["nominal"]["weights"], "a slot has more experts once one is lost"
    assert {"--num-experts", "--moe-token-dispatcher-type"} <= {option["flag"] for option in check["changes"]}
    without = found("experts without copies", 0)
    assert without["memory"]["copies"] is None
    assert "any one slot" not in survived(without)
    assert "copies of them are off" in without["survivals"][0]["why"]


def test_memory_counts_the_experts_of_a_slot_and_dense_layers(found):
    """Attention, an MLP and the embedding are cut in four, experts in eight times four parts over 16 slots, or 12."""
    memory = found("dense layers", 0)["memory"]
    cut = 4 * 4 * 64 * 64 + 2 * 64 * 256 + 1024 * 64 + 3 * 2 * 64 * 16
    replicated = (2 * 4 + 1) * 64 + 3 * 8 * 64
    expert = 2 * 64 * 32
    assert memory["parameters"] == cut + replicated + 3 * 8 * expert
    assert memory["nominal"]["weights"] == 4 * (cut // 4 + replicated + 3 * 2 * expert // 4)
    assert memory["degraded"]["weights"] == 4 * (cut // 4 + replicated + 3 * 3 * expert // 4)
    assert memory["copies"]["version"] == (cut // 4 + replicated) * 12 // 4 + 3 * 2 * expert // 4 * 12


def test_an_interleaved_stage_has_the_experts_of_its_own_chunks(found):
    """The last two of four layers have experts. In order they are one stage's; interleaved each stage has one."""
    why = found("dense stage", 1)["unsupported"][0]["why"]
    assert "stage 0 of the pipeline has no layer of experts" in why
    assert found("dense chunk", 0)["memory"]["parameters"] > 0


def test_the_first_and_the_last_stage_may_be_deeper(found):
    deeper, even = (found(name, 0)["memory"] for name in ("stages by their ends", "two stages"))
    assert deeper["parameters"] == even["parameters"]
    assert deeper["nominal"]["weights"] > even["nominal"]["weights"]


def test_what_multi_token_prediction_does_not_go_with(found):
    flags = {option["flag"] for option in found("several about predictions", 1)["unsupported"]}
    assert flags >= {
        "--mtp-num-layers with --context-parallel-size",
        "--mtp-num-layers with --ntp-gpu-memory-gb",
        "--mtp-detach-heads",
        "--pipeline-model-parallel-layout with m before the last stage",
    }


@pytest.mark.parametrize(
    ("name", "flag", "why"),
    [
        ("interleaved", "--global-batch-size", "an interleaved pipeline takes them in groups of 2"),
        ("virtual stages", "--global-batch-size", "an interleaved pipeline takes them in groups of 2"),
        ("empty stage", "--pipeline-model-parallel-layout with an empty stage", "has ranks without any layer"),
        ("uneven schedule", "--step-batch-size-schedule", "a global batch of 18 does not divide over 4 replicas"),
        ("too little memory", "--ntp-gpu-memory-gb", "does not fit into"),
        ("too few hosts", "copies", "xor:2 needs 2 node domains"),
    ],
)
def test_what_planning_refuses_is_not_accepted(found, name, flag, why):
    (option,) = found(name, 1)["unsupported"]
    assert option["flag"] == flag
    assert why in option["why"]
    assert option["fix"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("odd ranks", "6 processes do not make replicas of 4"),
        ("zero", "--tensor-model-parallel-size, --micro-batch-size below 1"),
        ("no number", "invalid int value: 'two'"),
        ("no layers", "--num-layers, --num-attention-heads, --seq-length missing"),
        ("batch", "global_batch = 3 is not a multiple of micro_batch x dp = 1 x 2"),
        ("two batches", "--step-batch-size-schedule and --global-batch-size"),
        ("no schedule", 'Invalid schedule entry "8"'),
        ("lost", "leave --ntp-lost out"),
        ("uneven experts", "experts = 6 is not a multiple of ep = 4"),
        ("uneven expert groups", "the 12 ranks of a stage do not make expert groups of 16"),
        ("bad stages", "--pipeline-model-parallel-layout Et|tL has {'embedding': 1, 'decoder': 2"),
    ],
)
def test_bad_input_is_one_line_and_code_2(probed, name, message):
    result = probed[name]
    assert (result["code"], result["out"]) == (2, "")
    assert result["err"].startswith("ntp: ")
    assert result["err"].count("\n") == 1
    assert message in result["err"]


def test_a_recipe_names_its_hosts(found):
    check = found("recipe", 0)
    topology = check["topology"]
    assert [topology[name] for name in ("tp", "dp", "gpus_per_node")] == [2, 4, 4]
    assert not any("assumed" in note for note in check["notes"])
    assert any("tokenizer's files" in note for note in check["notes"]), "its vocabulary is not known"
    assert check["memory"]["copies"]["version"] > 0, "the arguments behind the file are Megatron's"


@pytest.mark.short
def test_tables(probed):
    refused, accepted = probed["text"], probed["accepted text"]
    assert (refused["code"], accepted["code"]) == (1, 0)
    assert refused["out"].startswith("not accepted: 1 option is not supported")
    assert "--te-rng-tracker" in refused["out"]
    assert accepted["out"].startswith("accepted")
    for words in (
        "any one slot",
        "copies in memory",
        "copies of a rank, in host memory",
        "--async-save",
        "all ranks are",
    ):
        assert words in accepted["out"]
