"""`ntp plan` as a user types it: the right numbers, and one clear line with exit code 2 for everything else."""

import dataclasses
import json
import os
import shlex
import subprocess
import sys

import pytest

from ntp_plugin.cli.main import main
from ntp_plugin.errors import ConfigError
from ntp_plugin.planning import Hardware, Job, Model, Parallel, plan, read_job

LLAMA_70B = shlex.split(
    "plan --tp 8 --pp 4 --dp 32 --heads 64 --groups 8 --ffn 28672 --vocab 128256 --layers 80 --hidden 8192"
)
SMALL = shlex.split(
    "plan --tp 4 --pp 2 --dp 4 --heads 8 --ffn 256 --vocab 1000 --layers 4 --hidden 64 --gpus-per-node 4"
)
SMALL_TOML = """\
lose = ["r1.s0.t2"]
[parallel]
tp = 4
pp = 2
dp = 4
gpus_per_node = 4
[model]
heads = 8
ffn = 256
vocab = 1000
layers = 4
hidden = 64
"""


def run(capsys, words):
    code = main(words)
    out, err = capsys.readouterr()
    return code, out, err


def test_with_context_parallelism_the_replicas_that_share_a_sequence_are_named_together(capsys):
    code, out, _ = run(capsys, [*SMALL, "--cp", "4", "--lose", "r1.s0.t0"])
    assert code == 0
    assert "TP4 x PP2 x CP4 x DP4 = 128 GPUs" in out
    assert "r0 r2 (2)" in out, "of the four of the first context group two go on"
    assert run(capsys, [*SMALL, "--cp", "2", "--gpu-memory-gb", "80"])[0] == 0


def test_the_tables_answer_every_question(capsys):
    code, out, err = run(capsys, [*LLAMA_70B, "--lose", "r3.s1.t5"])
    assert (code, err) == (0, "")
    for part in (
        "TP8 x PP4 x DP32 = 1,024 GPUs",
        "31 whole, 1 degraded, 0 dropped",
        "8 -> 7",
        "mlp 64/64",
        "t0 (8) t1 (8) t2 (8) t3 (8) t4 (8) t6 (8) t7 (8)",
        "512 of 512 micro-batches",
        "1.75 x its even part",
    ):
        assert part in out


def test_a_job_with_experts_drops_the_replica_and_deals_its_experts(capsys):
    words = ["--experts", "8", "--ep", "4", "--etp", "2", "--dp", "4"]
    code, out, err = run(capsys, [*SMALL, *words, "--lose", "r1.s0.t2"])
    assert (code, err) == (0, "")
    for part in (
        "2 experts on a slot, 2 expert groups of 8 in each stage",
        "3 whole, 0 degraded, 1 dropped",
        "s0-s1",
        "8 -> 4",
        "2 -> 4/4",
        "all ranks go back to the step of the copies",
    ):
        assert part in out
    assert "Transfers" not in out
    record = json.loads(run(capsys, [*SMALL, *words, "--lose", "r1.s0.t2", "--json"])[1])["plan"]
    assert [group["fullest"] for group in record["expert_groups"]] == [[2, 4], [2, 4]]


def test_micro_batches_that_weigh_nothing_are_named(capsys):
    words = ["--experts", "8", "--ep", "4", "--etp", "1", "--tp", "1", "--dp", "8", "--pp", "1"]
    code, out, _ = run(capsys, [*SMALL, *words, "--lose", "r1", "--global-batch", "64"])
    counted = json.loads(run(capsys, [*SMALL, *words, "--lose", "r1", "--global-batch", "64", "--json"])[1])
    shares = {share["replica"]: share["count"] for share in counted["plan"]["batch"]["shares"]}
    padding = sum(
        max(shares[other] for other in beside) - shares[one] for beside in ((0, 2, 3), (4, 5, 6, 7)) for one in beside
    )
    assert code == 0 and padding
    assert f"{padding} in all are padding of weight zero" in out


def test_json_holds_the_whole_plan(capsys):
    code, out, _ = run(capsys, [*LLAMA_70B, "--lose", "r3.s1.t5", "--json"])
    record = json.loads(out)
    assert code == 0
    assert record["plan"]["lost"] == ["r3.s1.t5"]
    assert record["plan"]["routes"][1]["route"] == "direct"
    assert sum(share["count"] for share in record["plan"]["batch"]["shares"]) == 512
    assert len(record["digest"]) == 32


def test_the_order_of_losses_does_not_change_the_digest(capsys):
    digests = set()
    for words in (["--lose", "r3.s1.t5", "--lose", "r1.s0.t0"], ["--lose", "r1.s0.t0,r3.s1.t5"]):
        digests.add(json.loads(run(capsys, [*LLAMA_70B, *words, "--json"])[1])["digest"])
    assert len(digests) == 1


def test_slots_rejoin(capsys):
    code, out, _ = run(capsys, [*SMALL, "--already", "r1.s0.t2,r2.s1.t0", "--back", "r1.s0.t2"])
    assert code == 0
    assert "3 -> 4" in out
    assert "1 slot: r2.s1.t0" in out


def test_a_file_equals_flags_and_flags_win(capsys, tmp_path):
    job = {
        "parallel": {"tp": 4, "pp": 2, "dp": 4, "gpus_per_node": 4},
        "model": {"heads": 8, "ffn": 256, "vocab": 1000, "layers": 4, "hidden": 64},
        "lose": ["r1.s0.t2"],
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    (tmp_path / "job.toml").write_text(SMALL_TOML)
    digests = [
        json.loads(run(capsys, words)[1])["digest"]
        for words in (
            [*SMALL, "--lose", "r1.s0.t2", "--json"],
            ["plan", "--config", str(tmp_path / "job.json"), "--json"],
            ["plan", "--config", str(tmp_path / "job.toml"), "--json"],
            ["plan", "--config", str(tmp_path / "job.toml"), "--lose", "r2.s1.t1", "--json"],
        )
    ]
    assert digests[0] == digests[1] == digests[2] != digests[3]


BAD = {
    "unknown slot": (["--lose", "r9.s0.t0"], "r9.s0.t0 is not in this layout of dp = 4"),
    "no slot at all": (["--lose", "gpu5"], "'gpu5' does not name a slot"),
    "empty slot": (["--lose", ""], "'' does not name a slot"),
    "lost twice over": (["--lose", "r1.s0.t0", "--already", "r1.s0.t0"], "r1.s0.t0 is in lose"),
    "back but never lost": (["--back", "r1.s0.t0"], "back names r1.s0.t0, which was not lost"),
    "lost and back": (["--lose", "r1.s0.t0", "--already", "r1.s0.t1", "--back", "r1.s0.t0"], "is in lose"),
    "everything lost": (["--lose", "r0,r1,r2,r3"], "no replica is left"),
    "heads not divisible by groups": (["--groups", "3"], "heads = 8 is not a multiple of groups = 3"),
    "more slots than query groups": (["--groups", "2"], "groups = 2 query groups do not divide over tp = 4"),
    "ffn not divisible": (["--ffn", "255"], "ffn = 255 does not divide over tp = 4"),
    "layers not divisible": (["--layers", "5"], "layers = 5 is not a multiple of pp = 2"),
    "hidden not divisible": (["--hidden", "65"], "hidden = 65 is not a multiple of heads = 8"),
    "batch not divisible": (["--global-batch", "9"], "global_batch = 9 is not a multiple of micro_batch x dp = 1 x 4"),
    "minimum above nominal": (["--min-tp-width", "5"], "min_tp_width = 5 is above tp = 4"),
    "width below minimum everywhere": (
        ["--min-tp-width", "4", "--lose", "r0.s0.t0,r1.s0.t0,r2.s0.t0,r3.s1.t1"],
        "no replica is left: the best of 4 has a stage with 3 of 4 TP slots, and min_tp_width is 4",
    ),
    "granule too wide": (["--granule", "48"], "granule = 48 does not divide a slot's 64 MLP columns"),
    "negative": (["--tp", "-1"], "--tp = -1 must be at least 1"),
    "zero": (["--dp", "0"], "--dp = 0 must be at least 1"),
    "not a number": (["--hidden", "large"], "--hidden = 'large' must be a whole number"),
    "a fraction": (["--layers", "4.5"], "--layers = '4.5' must be a whole number"),
    "absurdly large": (["--dp", "9" * 40], "must be at most 4194304"),
    "too large together": (["--dp", "4000000"], "is 32,000,000 GPUs"),
    "digits beyond reason": (["--dp", "9" * 5000], "--dp = '9999"),
    "unknown mode": (["--batch-mode", "strikt"], 'did you mean "strict"'),
    "epsilon out of range": (["--batch-epsilon", "2"], "--batch-epsilon = 2.0 must be at most 0.5"),
    "unknown flag": (["--head", "8"], "--head is not a known flag of ntp plan. Fix: did you mean --heads"),
    "stray word": (["r1.s0.t0"], "r1.s0.t0 has no known ending"),
    "two stray words": (["job.toml", "r1.s0.t0"], "r1.s0.t0 is not a known word of ntp plan"),
    "flag without value": (["--tp"], "expected one argument"),
    "copies without hosts": (["--copies-far", "power"], "1 far copies need 2 whole power domains"),
    "a parity without hosts": (["--copies-mode", "xor:40"], "copies.mode = xor:40 needs 40 node domains for"),
    "a parity of one": (["--copies-mode", "xor:1"], "a parity of one would be a copy"),
    "a parity of many words": (["--copies-mode", "xor:N"], "--copies-mode = 'xor:N' is not allowed"),
    "two parities": (["--copies-mode", "xor:2", "--copies-count", "2"], "there is one parity for each group"),
    "state lost": (["--distributed-optimizer", "--copies-count", "0", "--lose", "r1.s0.t0"], "held by no living slot"),
    "experts not divisible": (["--experts", "6", "--ep", "4"], "experts = 6 is not a multiple of ep = 4"),
    "expert not divisible": (
        ["--experts", "4", "--ep", "4", "--moe-ffn", "30"],
        "an expert's hidden size of 30 is not a multiple of etp = 4",
    ),
    "no experts": (["--ep", "4"], "ep = 4 is of experts, and the model has none"),
    "more experts than there are": (["--experts", "4", "--moe-router-topk", "5"], "moe_router_topk = 5 is above"),
    "a pattern that is code": (["--experts", "4", "--moe-layer-freq", "print(1)"], "neither a number nor a pattern"),
    "expert groups that do not fit": (
        ["--experts", "6", "--ep", "3", "--etp", "2"],
        "neither a part of a replica's 4 TP slots nor all slots of several",
    ),
    "expert groups that overlap": (
        ["--experts", "8", "--ep", "4", "--etp", "2", "--cp", "3"],
        "expert groups of 2 replicas and context groups of 3 overlap in part",
    ),
    "a stage without experts": (
        ["--experts", "4", "--moe-layer-freq", "[0]*2+[1]*2"],
        "stage 0 of the pipeline has no layer of experts",
    ),
    "experts without copies": (
        ["--experts", "4", "--ep", "2", "--copies-mode", "off", "--lose", "r1.s0.t0"],
        "copies are off",
    ),
    "too many experts on a slot": (
        [
            *("--experts", "4", "--ep", "4", "--etp", "1", "--moe-ffn", "8192", "--tp", "1", "--lose", "r0"),
            *("--gpu-memory-gb", "0.1"),
        ],
        "stage 0 with 2 experts on a slot, where 1 are nominal, does not fit into 0.1 GB per GPU",
    ),
    "no layers for the last stages": (
        ["--first-stage-layers", "4"],
        "layers = 4: 4 of them in the first and the last stage leave 0 for 1 more of pp = 2 stages",
    ),
    "stages that are not even": (
        ["--layers", "6", "--pp", "4", "--first-stage-layers", "1"],
        "layers = 6 less those of the first and the last stage, 5, is not a multiple of the other 3 stages",
    ),
    "too little memory": (
        ["--gpu-memory-gb", "0.001", "--hidden", "640"],
        "does not fit into 0.001 GB per GPU: as is 0.",
    ),
}


@pytest.mark.parametrize(("words", "message"), BAD.values(), ids=BAD.keys())
def test_bad_flags_are_one_clear_line_and_exit_code_2(capsys, words, message):
    code, out, err = run(capsys, [*SMALL, *words])
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("ntp: ")
    assert err.count("\n") == 1


BAD_FILES = {
    "missing": (None, None, "cannot be read: No such file or directory"),
    "empty": ("job.toml", b"", "is empty"),
    "only blanks": ("job.json", b" \n", "is empty"),
    "garbage": ("job.toml", b"{{{ \x00", "is not valid TOML"),
    "binary": ("job.json", b"\x80\x81\xff", "is not UTF-8 text"),
    "broken json": ("job.json", b'{"parallel": ', "is not valid JSON"),
    "nested too deep": ("job.json", b"[" * 100_000, "is not valid JSON"),
    "json list": ("job.json", b"[1]", "must hold one JSON object"),
    "json key twice": ("job.json", b'{"lose": [], "lose": []}', "the key 'lose' appears twice"),
    "json NaN": ("job.json", b'{"ntp": {"batch": {"epsilon": NaN}}}', "NaN is not a number that JSON allows"),
    "wrong ending": ("job.yaml", b"tp: 4", "has no known ending"),
    "unknown table": ("job.toml", b"[paralel]\ntp = 4", 'paralel is not a known key. Fix: did you mean "parallel"'),
    "unknown key": ("job.toml", b"[model]\nhedas = 4", 'model.hedas is not a known key. Fix: did you mean "heads"'),
    "wrong type": ("job.toml", b'[model]\nheads = "8"', "model.heads = '8' must be a whole number"),
    "table expected": ("job.toml", b"model = 3", "model must be a table of keys, not 3"),
    "list expected": ("job.toml", b'lose = "r1"', "lose = 'r1' must be a list of texts"),
    "required key missing": ("job.toml", b"[parallel]\ntp = 4", "model.layers is missing"),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_files_are_one_clear_line_and_exit_code_2(capsys, tmp_path, name, content, message):
    path = tmp_path / (name or "absent.toml")
    if content is not None:
        path.write_bytes(content)
    code, out, err = run(capsys, ["plan", "--config", str(path)])
    assert (code, out) == (2, "")
    assert message in err
    assert str(path) in err
    assert err.count("\n") == 1


def test_a_folder_is_not_a_file(capsys, tmp_path):
    (tmp_path / "job.toml").mkdir()
    code, _, err = run(capsys, ["plan", "--config", str(tmp_path / "job.toml")])
    assert code == 2
    assert "Is a directory" in err


@pytest.mark.parametrize("words", [[], ["plan"], ["plann"]])
def test_a_bare_or_misspelled_command_names_what_is_missing(capsys, words):
    code, _, err = run(capsys, words)
    assert code == 2
    assert err.count("\n") == 1


def test_the_installed_command_prints_errors_on_stderr_without_a_traceback():
    done = subprocess.run(
        [sys.executable, "-m", "ntp_plugin.cli.main", *SMALL, "--lose", "nonsense"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m ntp_plugin.cli.main {' '.join(SMALL)} --lose r1 --json | head -c 10"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, env=os.environ)
    assert done.stderr == ""


def job(**changed):
    sizes = {"layers": 4, "hidden": 64, "heads": 8, "ffn": 256, "vocab": 1000}
    return Job(parallel=Parallel(**{"tp": 4, "pp": 2, "dp": 4, "gpus_per_node": 4} | changed), model=Model(**sizes))


def test_the_function_makes_the_plan_that_the_command_prints(capsys, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(SMALL_TOML)
    code, out, _ = run(capsys, [*SMALL, "--lose", "r1.s0.t2", "--json", "--nic-gb-per-s", "40"])
    found = dataclasses.replace(job(), lose=("r1.s0.t2",), hardware=Hardware(nic_gb_per_s=40))
    assert (code, plan(found).digest) == (0, json.loads(out)["digest"])
    assert plan(read_job(path)).digest == plan(dataclasses.replace(found, hardware=Hardware())).digest


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pp": 0}, "pp = 0 must be at least 1"),
        ({"nodes_per_rack": 2.5}, r"nodes_per_rack = 2\.5 must be a whole number"),
    ],
)
def test_the_function_checks_the_same_as_the_flags(changed, message):
    with pytest.raises(ConfigError, match=message):
        plan(job(**changed))
