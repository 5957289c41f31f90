"""Bad input of all commands: one line that says what is wrong, exit code 2, and nothing is started or left behind."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ntp_plugin.cli import chaos, chaos_outside
from ntp_plugin.cli.main import main
from ntp_plugin.errors import ConfigError
from ntp_plugin.launch import agent, torchrun_flags
from ntp_plugin.membership import store
from ntp_plugin.simulator.traces import read_trace
from tests.patience import PATIENCE_S

STARTS = (
    (agent, "run"),
    (chaos, "run_campaign"),
    (chaos, "inject_by"),
    (chaos_outside, "run_reference"),
    (store, "serve"),
)
PLAN = b"[parallel]\ntp=4\ndp=2\n[model]\nlayers=4\nhidden=64\nheads=4\nffn=64\nvocab=128\n[ntp.copies]\ncount=0\n"
CHAOS = '[job]\nrun=["--standalone","x.py"]\n'
FAULT = '[[fault]]\nwhat="kill"\n'
BOM = b"\xef\xbb\xbf"
FILES = {
    "ok.py": b"print('hello')\n",
    "file": b"",
    "plan.toml": PLAN,
    "other.toml": PLAN,
    "bom.toml": BOM + PLAN,
    "bom.json": BOM + json.dumps({"parallel": {"tp": 4}}).encode(),
    "only-bom.toml": BOM,
    "empty.toml": b"",
    "empty.json": b" \n",
    "binary.toml": b"\xff\xfe\x00",
    "latin.toml": "[parallel]\n# caf\xe9\n".encode("latin1"),
    "nan.toml": b"days = nan\n",
    "chaos.toml": (CHAOS + FAULT).encode(),
    "random.toml": ("random = 3\n" + CHAOS).encode(),
    "faults.toml": ("fault = [1]\n" + CHAOS).encode(),
    "like.toml": ('[job]\nlike="nothere.toml"\n' + FAULT).encode(),
    "bound.toml": (CHAOS + "bound = nan\n" + FAULT).encode(),
    "during.toml": (CHAOS + FAULT + 'during="lunch"\n').encode(),
    "trace.toml": (CHAOS + '[trace]\nfile="dir.toml"\n').encode(),
    "outages.csv": BOM + b"domain,start,end\n3,0.5,1\n",
    "dir.toml/x": b"",
    "dir.py/x": b"",
    "package/__main__.py": b"",
    "silent/events.jsonl": b"",
}

RUN = {
    "no script": (["nothere.py"], "there is no script 'nothere.py' in"),
    "no script on one host": (["--standalone", "nothere.py"], "there is no script 'nothere.py' in"),
    "an empty script": (["--standalone", ""], "there is no script '' in"),
    "a folder": (["dir.py"], "'dir.py' is a folder without __main__.py"),
    "no word": ([], "the following arguments are required: training_script"),
    "no module": (["-m", "nothere.train"], "there is no module 'nothere.train'"),
    "an empty module": (["-m", ""], "there is no module ''"),
    "no program": (["--no-python", "nothere"], "'nothere' is not a program that can be started here"),
    "a program that is no file": (["--no-python", "dir.py"], "'dir.py' is not a program that can be started here"),
    "a program in this folder": (["--no-python", "ok.py"], "./ok.py names the one in this folder"),
    "program and module": (["--no-python", "-m", "ok.py"], "--no-python and --module are both given"),
    "run path": (["--run-path", "ok.py"], "--run-path starts no processes that ntp run can watch"),
    "no workers": (["--nproc-per-node=0", "ok.py"], "--nproc-per-node=0: a host cannot start 0 workers"),
    "workers below none": (["--nproc-per-node=-1", "ok.py"], "cannot start -1 workers"),
    "workers in words": (["--nproc-per-node=abc", "ok.py"], "--nproc-per-node=abc is not a number of workers"),
    "half a worker": (["--nproc-per-node=1.5", "ok.py"], "--nproc-per-node=1.5 is not a number of workers"),
    "a million workers": (["--nproc-per-node=1000000", "ok.py"], "a host cannot start 1,000,000 workers"),
    "workers of nothing": (["--nproc-per-node=", "ok.py"], "--nproc-per-node= is not a number of workers"),
    "workers without a number": (["--nproc-per-node"], "expected one argument"),
    "hosts in words": (["--nnodes=x", "ok.py"], "--nnodes=x is not a number of hosts. Fix: a number from 1 on"),
    "no hosts": (["--nnodes=0", "ok.py"], "--nnodes=0: 0 to 0 hosts is not a valid range"),
    "hosts the wrong way round": (["--nnodes=2:1", "ok.py"], "--nnodes=2:1: 2 to 1 hosts is not a valid range"),
    "three numbers of hosts": (["--nnodes=1:2:3", "ok.py"], "--nnodes=1:2:3 is not a number of hosts"),
    "a port too high": (["--rdzv-backend=c10d", "--rdzv-endpoint=host:99999", "ok.py"], "host:99999 is not HOST:PORT"),
    "a port in words": (["--rdzv-backend=c10d", "--rdzv-endpoint=host:abc", "ok.py"], "host:abc is not HOST:PORT"),
    "a port below 0": (["--rdzv-backend=c10d", "--rdzv-endpoint=host:-5", "ok.py"], "host:-5 is not HOST:PORT"),
    "no host": (["--rdzv-backend=c10d", "--rdzv-endpoint=:29400", "ok.py"], ":29400 is not HOST:PORT"),
    "two ports": (["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:1:2", "ok.py"], "localhost:1:2 has 2 colons"),
    "an endpoint alone": (["--rdzv-endpoint=host:99999", "ok.py"], "the store runs in rank 0"),
    "a master port": (["--master-port=99999", "ok.py"], "the store runs in rank 0"),
    "a master port in words": (["--master-port=abc", "ok.py"], "invalid int value: 'abc'"),
    "an unknown rendezvous": (["--rdzv-backend=x", "--rdzv-endpoint=h:1", "ok.py"], "--rdzv-backend=x is not known"),
    "rendezvous settings": (["--rdzv-conf=nonsense", "ok.py"], "--rdzv-conf=nonsense is not a list of settings"),
    "a time in words": (["--rdzv-conf=join_timeout=soon", "ok.py"], "join_timeout=soon is not a whole number"),
    "restarts": (["--max-restarts=3", "ok.py"], "--max-restarts = 3 would restart all workers"),
    "restarts below 0": (["--max-restarts=-3", "ok.py"], "--max-restarts = -3 would restart all workers"),
    "restarts in words": (["--max-restarts=x", "ok.py"], "invalid int value: 'x'"),
    "an interval that is no number": (["--monitor-interval=nan", "ok.py"], "--monitor-interval=nan is not above 0"),
    "an interval without end": (["--monitor-interval=inf", "ok.py"], "--monitor-interval=inf is not above 0"),
    "an interval below 0": (["--monitor-interval=-1", "ok.py"], "--monitor-interval=-1.0 is not above 0"),
    "a start method": (["--start-method=x", "ok.py"], "invalid choice: 'x'"),
    "streams": (["--redirects=9", "ok.py"], "--redirects=9 is not a choice of streams"),
    "streams of a rank": (["--tee=0:9", "ok.py"], "--tee=0:9 is not a choice of streams"),
    "a log folder that is a file": (
        ["--log-dir=file", "ok.py"],
        "--log-dir=file: the folder cannot be made: File exists",
    ),
    "ranks": (["--local-ranks-filter=a", "ok.py"], "--local-ranks-filter=a are not local ranks"),
    "log specs": (["--logs-specs=x", "ok.py"], "--logs-specs=x is not installed"),
    "a log handler": (["--event-log-handler=x", "ok.py"], "--event-log-handler=x is not known"),
    "a signal": (["--signals-to-handle=SIGNOPE", "ok.py"], "'SIGNOPE' is not a signal"),
    "a shutdown below 0": (["--shutdown-timeout=-1", "ok.py"], "--shutdown-timeout=-1 must be 0 or more"),
    "a flag of the framework": (["--ntp-enable", "ok.py"], "after the script: ntp run SCRIPT --ntp-enable"),
    "a flag of it with a word": (["--ntp-batch-mode", "trim", "ok.py"], "flags of the script and of its framework"),
    "a flag of the script": (["--hidden-size=8", "ok.py"], "after the script: ntp run SCRIPT --hidden-size=8"),
    "a misspelled flag": (["--ntp-respwan=2", "ok.py"], "did you mean --ntp-respawn"),
    "a misspelled flag of torchrun": (["--nproc-per-nod4=2", "ok.py"], "did you mean --nproc-per-node"),
    "respawns in words": (["--ntp-respawn=x", "ok.py"], "argument --ntp-respawn: 'x' is not a whole number from 0"),
    "respawns below 0": (["--ntp-respawn=-1", "ok.py"], "argument --ntp-respawn: '-1' is not a whole number from 0"),
    "too many spares": (["--ntp-spares=9" + "9" * 30, "ok.py"], "is not a whole number from 0 to 1,000,000"),
    "a threshold that is no number": (["--ntp-thresholds=hung_s=nan", "ok.py"], "hung_s: 'nan' is not a number from"),
    "a threshold without end": (["--ntp-thresholds=hung_s=inf", "ok.py"], "hung_s: 'inf' is not a number from 0.0 to"),
    "a threshold of nothing": (["--ntp-thresholds=hung_s", "ok.py"], "hung_s: '' is not a number from 0.0 to"),
    "an empty run folder": (["--ntp-run-dir=", "ok.py"], "--ntp-run-dir is empty"),
    "a file for a run folder": (["--ntp-run-dir=file", "ok.py"], "is a file. Fix: name a folder that can be made"),
    "a run folder below a file": (["--ntp-run-dir=file/x/y", "ok.py"], "file is a file"),
    "a Prometheus port": (["--ntp-run-dir=d", "--ntp-prometheus=99999", "ok.py"], "from 0 to 65,535"),
    "a duration": (["--ntp-copies-keep=nan", "ok.py"], "--ntp-copies-keep = 'nan' is not a duration"),
    "copies that are not there": (["--ntp-resume=nothere", "ok.py"], "no copies of a dead run there"),
}
OTHERS = {
    "a plan of nothing": ("plan", "--tp is missing"),
    "a plan of no file": ("plan nothere.toml", "nothere.toml cannot be read: No such file"),
    "a plan of two files": ("plan plan.toml --config other.toml", "two files are named: plan.toml, and --config other"),
    "a plan of an empty name": ("plan --config=", "the name of the file is empty"),
    "a plan of an empty file": (
        "plan empty.toml",
        "empty.toml is empty. Fix: write at least [parallel] and [model]",
    ),
    "a plan of blanks": ("plan empty.json", "empty.json is empty. Fix: write at least [parallel] and [model]"),
    "a plan of a mark alone": ("plan only-bom.toml", "only-bom.toml is empty"),
    "a plan in binary": ("plan binary.toml", "binary.toml is not UTF-8 text"),
    "a plan in Latin-1": ("plan latin.toml", "latin.toml is not UTF-8 text"),
    "a plan of a folder": ("plan dir.toml", "dir.toml cannot be read: Is a directory"),
    "a plan of JSON with a mark": ("plan bom.json", "model.layers is missing"),
    "a slot too far": ("plan plan.toml --lose r9.s0.t0", "r9.s0.t0 is not in this layout"),
    "a huge degree": ("plan plan.toml --tp 9" + "9" * 30, "must be at most 1024"),
    "a simulation of an empty file": ("simulate empty.toml", "recipes/simulate/ has examples"),
    "a simulation of two files": ("simulate plan.toml --config other.toml", "two files are named"),
    "days that are no number": ("simulate nan.toml", "nan.toml: days = nan must be a finite number"),
    "no schedules": ("simulate --search 0", "argument --search: '0' is not a whole number from 1"),
    "schedules in words": ("simulate --search many", "argument --search: 'many' is not a whole number from 1"),
    "a schedule below 0": ("simulate --replay -1", "argument --replay: '-1' is not a whole number from 0"),
    "a chaos of nothing": ("chaos", "the following arguments are required: RECIPE. Fix"),
    "a chaos of an empty file": (
        "chaos empty.toml",
        "empty.toml is empty. Fix: write at least [job] and a [[fault]]",
    ),
    "a chaos with a word too many": (
        "chaos chaos.toml train.py",
        "train.py is one word too many. Fix: write -- before the arguments of ntp run",
    ),
    "arguments of ntp run for a job that runs": (
        "chaos attach run -- --standalone",
        "attach takes no arguments of ntp run",
    ),
    "a chaos of a plan": ("chaos plan.toml", "is not a known key. Fix: known keys: [job], [[fault]]"),
    "a chaos of a number": ("chaos random.toml", "random.toml: random must be a table of keys, not 3"),
    "a fault that is a number": ("chaos faults.toml", "faults.toml: fault 1 must be a table of keys, not 1"),
    "a bound that is no number": ("chaos bound.toml", "job.bound = nan must be a finite number"),
    "a fault point": ("chaos during.toml", "during = 'lunch' is not allowed. Fix: choose from compare,"),
    "a job like none": ("chaos like.toml", "nothere.toml cannot be read"),
    "a trace of a folder": ("chaos trace.toml", "dir.toml cannot be read: Is a directory"),
    "an empty job": ("chaos chaos.toml --job empty.toml", "write at least [job]"),
    "a file for results": ("chaos chaos.toml --out file", "file is a file. Fix: name a folder"),
    "results below a file": ("chaos chaos.toml --out file/x", "file is a file. Fix: name a folder"),
    "results over others": ("chaos chaos.toml --out dir.toml", "dir.toml is not empty"),
    "results without a name": ("chaos chaos.toml --out=", "--out is empty"),
    "a run that is not there": ("chaos attach nothere chaos.toml", "nothere is no folder of a run"),
    "a run that has told nothing": ("chaos attach silent chaos.toml", "training has not begun yet"),
    "a file for its results": ("chaos attach silent chaos.toml --out file", "file is a file"),
    "a pause that is no number": (
        "chaos attach silent --what kill --slot r0.s0.t0 --seconds nan",
        "--seconds: 'nan' is",
    ),
    "faults in words": ("chaos outside --faults x -- ntp run ok.py", "--faults: 'x' is not a whole number from 1"),
    "no faults": ("chaos outside --faults 0 -- ntp run ok.py", "--faults: '0' is not a whole number from 1"),
    "endless faults": ("chaos outside --faults 9999999999 -- ntp run ok.py", "from 1 to 1,000,000"),
    "a pace that is no number": ("chaos outside --every nan -- ntp run ok.py", "--every: 'nan' is not a number from 0"),
    "a pace without end": ("chaos outside --every inf -- ntp run ok.py", "--every: 'inf' is not a number from 0"),
    "a difference that is none": ("chaos outside --bound nan -- ntp run ok.py", "--bound: 'nan' is not a number"),
    "weights below 0": ("chaos outside --weights-bound -1 -- ntp run ok.py", "--weights-bound: '-1' is not a number"),
    "blocks of none": ("chaos outside --together 0 -- ntp run ok.py", "--together: '0' is not a whole number from 1"),
    "a file for all runs": ("chaos outside --out file -- ntp run ok.py", "file is a file"),
    "all runs below a file": ("chaos outside --out file/x -- ntp run ok.py", "file is a file"),
    "no job": ("chaos outside -- python x.py", "no `ntp run` command behind --, but python x.py"),
    "a status of no run": ("status nothere", "nothere is no folder of a run"),
    "a status of a file": ("status file", "file is no folder of a run"),
    "a report of a run that told nothing": ("report silent", "training has not begun yet"),
    "a report within no number": ("report silent --bound nan", "argument --bound: 'nan' is not a number from 0"),
    "a report within less than 0": ("report silent --bound -1", "argument --bound: '-1' is not a number from 0"),
    "copies of a file": ("copies list file", "file cannot be opened as a folder (Not a directory)"),
    "copies of no name": ("copies list a\0b", "cannot be opened as a folder (embedded null byte)"),
    "copies without a verb": ("copies", "the following arguments are required: WHAT"),
    "an export by nobody": ("copies export silent --to x --nproc-per-node=0", "'0' is not a whole number from 1"),
    "an export of nothing": ("copies export nothere --to x", "no copies of a run there"),
    "a port of the store": ("store --port 99999", "argument --port: '99999' is not a whole number from 0 to 65,535"),
    "a port below 0": ("store --port -1", "argument --port: '-1' is not a whole number from 0 to 65,535"),
    "a store nowhere": ("store --host= --port 0", "--host is empty"),
    "an unknown command": ("nothere", "invalid choice: 'nothere'"),
}
GOOD = {
    "a script": ["--standalone", "--nproc-per-node=2", "ok.py", "--ntp-enable", "--nproc-per-node=0"],
    "no flag": ["ok.py"],
    "a count of processors": ["--nproc-per-node=cpu", "ok.py"],
    "an abbreviation of torchrun's": ["--standalon", "ok.py"],
    "a folder that can be run": ["package"],
    "a module of this folder": ["-m", "package"],
    "a module of Python's": ["-m", "json.tool"],
    "a program": ["--no-python", "sh", "-c", "true"],
    "several hosts": ["--nnodes=1:4", "--rdzv-backend=c10d", "--rdzv-endpoint=[::1]:29400", "ok.py"],
    "a host without a port": ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node-7.site", "ok.py"],
    "settings": ["--rdzv-backend=c10d", "--rdzv-conf=join_timeout=60,is_host=0", "ok.py"],
    "streams": ["--redirects=0:3,1:1", "--tee=3", "--local-ranks-filter=0,1", "ok.py"],
    "a new run folder": ["--ntp-run-dir=new/run", "ok.py"],
}


@pytest.fixture(autouse=True)
def desk(tmp_path, monkeypatch):
    """A folder with the files above, in which nothing may be started; nothing may be new there in the end."""
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for where, name in STARTS:
        monkeypatch.setattr(where, name, lambda *_, **__: pytest.fail("something was started"))
    before = sorted(tmp_path.rglob("*"))
    yield
    assert sorted(tmp_path.rglob("*")) == before, "something was left behind"


def refused(capsys, words):
    code = main(words)
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1), out + err
    return err


@pytest.mark.parametrize(("words", "message"), RUN.values(), ids=RUN)
def test_a_job_that_cannot_start_is_refused_in_one_line(capsys, words, message):
    assert message in refused(capsys, ["run", *words])


@pytest.mark.parametrize(("words", "message"), OTHERS.values(), ids=OTHERS)
def test_bad_input_is_refused_in_one_line(capsys, words, message):
    assert message in refused(capsys, words.split())


@pytest.mark.parametrize("words", GOOD.values(), ids=GOOD)
def test_a_job_that_can_start_is_started(words, monkeypatch):
    started = []
    monkeypatch.setattr(agent, "run", lambda arguments, _: started.append(arguments) or 0)
    assert main(["run", *words]) == 0
    assert started[0].training_script in words


@pytest.mark.parametrize("options", [["chaos.toml", "--out", "x"], ["--out", "x", "chaos.toml"]])
def test_options_of_chaos_may_stand_on_both_sides_of_the_recipe(options, monkeypatch):
    class Started(Exception):
        """In place of a campaign."""

    def start(recipe, *_, **__):
        raise Started(recipe.job.run)

    monkeypatch.setattr(chaos, "run_campaign", start)
    with pytest.raises(Started) as started:
        main(["chaos", *options, "--", "--standalone", "ok.py", "--out", "y"])
    assert started.value.args == (("--standalone", "ok.py", "--out", "y"),)


def test_a_number_in_the_environment_is_checked_as_well(capsys, monkeypatch):
    monkeypatch.setenv("PET_NPROC_PER_NODE", "0")
    assert "--nproc-per-node=0" in refused(capsys, ["run", "ok.py"])


def test_a_log_folder_is_created_only_for_valid_input(tmp_path):
    with pytest.raises(ConfigError, match="there is no script"):
        torchrun_flags.parse(["--log-dir=logs", "nothere.py"])
    assert not Path("logs").exists()
    torchrun_flags.parse(["--log-dir=logs", "ok.py"])
    (tmp_path / "logs").rmdir()


@pytest.mark.parametrize("words", ["plan bom.toml", "plan --config bom.toml", "plan plan.toml --config plan.toml"])
def test_a_file_is_an_argument_or_a_flag_and_may_begin_with_a_byte_order_mark(capsys, words):
    assert main([*words.split(), "--json"]) == 0
    plans = [json.loads(capsys.readouterr().out)]
    assert main(["plan", "plan.toml", "--json"]) == 0
    assert plans == [json.loads(capsys.readouterr().out)]


def test_a_trace_may_begin_with_a_byte_order_mark():
    assert [outage.domain for outage in read_trace(Path("outages.csv"))] == ["3"]


@pytest.mark.parametrize("words", [["run", "nothere.py"], ["run", "--standalone", "--nproc-per-node=0", "ok.py"]])
def test_the_command_itself_leaves_nothing_behind(words, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ntp_plugin.cli.main", *words],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
