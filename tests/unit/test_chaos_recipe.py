"""The contents of a recipe, and its refusals in one line."""

from pathlib import Path

import pytest

from benchmarks.recipes import recipes_of
from ntp_plugin.chaos.recipe import read_recipe
from ntp_plugin.cli.main import main
from ntp_plugin.errors import ConfigError

RECIPES = Path(__file__).parents[2] / "recipes/chaos"
FAULT = '[[fault]]\nwhat = "kill"\n'
JOB = '[job]\nrun = ["train.py"]\n'


def written(folder, text, name="some.toml"):
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_each_recipe_documents_its_faults_and_its_command(path):
    recipe = read_recipe(path)
    head = path.read_text().split("\n\n")[0]
    assert f"ntp chaos recipes/chaos/{path.name}" in head
    assert "minute" in head, "how long it takes"
    assert recipe.faults or recipe.random.count
    for job in sorted((RECIPES / "jobs").glob("*.toml")):
        if job.stem.endswith("-hosts") == (recipe.job.hosts > 1):
            assert read_recipe(path, job=job).job.run
        elif recipe.job.hosts > 1:
            with pytest.raises(ConfigError, match=r"is for a job on several hosts"):
                read_recipe(path, job=job)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_each_recipe_has_a_framework_to_be_played_on(path):
    frameworks = [framework for framework, _ in recipes_of(path)]
    of_its_own = [framework for framework in ("megatron", "deepspeed") if framework in path.stem]
    assert frameworks == (of_its_own or frameworks)
    assert frameworks[:1] in (["megatron"], ["deepspeed"])


def test_a_job_inherits_from_another_except_for_its_own_keys(tmp_path):
    written(tmp_path, '[job]\nrun = ["a.py"]\nspares = 3\nenvironment = ["A=1"]\n', "base.toml")
    path = written(tmp_path, '[job]\nlike = "base.toml"\nspares = 1\n' + FAULT)
    assert (read_recipe(path).job.run, read_recipe(path).job.spares) == (("a.py",), 1)
    other = written(tmp_path, '[job]\nrun = ["b.py"]\nbound = 0.5\n', "other.toml")
    broken = read_recipe(path, job=other)
    assert (broken.job.run, broken.job.spares, broken.job.bound, broken.job.environment) == (("b.py",), 1, 0.5, ())
    assert read_recipe(path, run=("c.py",)).job.run == ("c.py",)


def test_outages_of_a_trace_are_injected_at_their_times(tmp_path):
    (tmp_path / "trace.csv").write_text("domain,start,end\nb,3,4\na,1.5,2\na,9,10\n")
    path = written(tmp_path, JOB + "[trace]\nfile = 'trace.csv'\nseconds_per_day = 2.0\nfrom_day = 1.0\ncount = 2\n")
    assert [(fault.what, fault.at_s) for fault in read_recipe(path).faults] == [("sigkill", 1.0), ("sigkill", 4.0)]


def test_faults_and_outages_may_miss_when_a_recipe_allows_it(tmp_path):
    (tmp_path / "trace.csv").write_text("domain,start,end\nb,3,4\n")
    path = written(
        tmp_path, JOB + FAULT + "may_miss = true\n" + FAULT + "[trace]\nfile = 'trace.csv'\nmay_miss = true\n"
    )
    assert [fault.may_miss for fault in read_recipe(path).faults] == [True, False, True]


def test_kinds_are_drawn_with_fault_points_when_pairs_are_given(tmp_path):
    path = written(tmp_path, JOB + "[random]\ncount = 3\npairs = ['kill at vote', 'hang at resume', 'sigkill']\n")
    assert read_recipe(path).random.deck() == [("kill", "vote"), ("hang", "resume"), ("sigkill", "")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("nonsense", "not valid TOML"),
        (FAULT, "has no job"),
        (JOB, "has no faults"),
        (JOB + "[fault]\nwhat = 'kill'\n", "two brackets"),
        (JOB + FAULT + "slot = 'rank 3'\n", "is not a slot"),
        (JOB + "[[fault]]\nwhat = 'kil'\n", "did you mean"),
        (JOB + FAULT + "at_stepp = 3\n", "at_step"),
        (JOB + FAULT + "at_step = 0\n", "at least 1"),
        (JOB + FAULT + "during = 'lunch'\n", "is not allowed"),
        (JOB + "[[fault]]\nwhat = 'sigkill'\nduring = 'vote'\n", "has no fault point"),
        (JOB + FAULT + "at_step = 3\nduring = 'regroup'\n", "fault point of a recovery"),
        (JOB + FAULT + "at_step = 3\nat_s = 1.0\n", "choose one"),
        (JOB + FAULT + "factor = 2.0\n", "what = kill has no factor"),
        (JOB + "[[fault]]\nwhat = 'slow'\nfactor = 0.5\n", "at least 1"),
        (JOB + "[random]\ncount = 3\nwhat = ['lightning']\n", "'lightning' is not known"),
        (JOB + "[random]\ncount = 3\nduring = []\n", "nothing to draw from"),
        (JOB + "[random]\ncount = 3\npairs = ['kill']\n", "'' is not known"),
        (JOB + "[random]\ncount = 3\npairs = ['kill at lunch']\n", "'lunch' is not known"),
        (JOB + "[random]\ncount = 3\npairs = ['lightning at vote']\n", "'lightning' is not known"),
        (JOB + "[random]\ncount = 3\npairs = ['sigkill at vote']\n", "it has no fault point 'vote'"),
        (JOB + "[random]\ncount = 3\npairs = ['lossy']\n", "what = lossy is for a job on several hosts"),
        (JOB + "[trace]\nfile = 'nowhere.csv'\n", "cannot be read"),
        ('[job]\nrun = ["a.py"]\nenvironment = ["HOME"]\n' + FAULT, "not NAME=VALUE"),
        ('[job]\nlike = "nowhere.toml"\n' + FAULT, "cannot be read"),
        ("job = 3\n" + FAULT, "write [job]"),
        (JOB + FAULT + "[more]\n", "more is not a known key"),
        (JOB + "[[fault]]\nwhat = 'node'\n", "what = node is for a job on several hosts"),
        (JOB + "[random]\ncount = 3\nwhat = ['kill', 'lossy']\n", "what = lossy is for a job on several hosts"),
        (JOB + "hosts = 2\n[[fault]]\nwhat = 'supervisor'\n", "what = supervisor is for a job on one host"),
        (
            JOB.replace("[job]", "[job]\nhosts = 2").replace("train.py", "--standalone") + FAULT,
            "leave it out of job.run",
        ),
    ],
)
def test_a_wrong_recipe_is_one_line_and_code_2(text, message, tmp_path, capsys):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError):
        read_recipe(path)
    assert main(["chaos", str(path), "--out", str(tmp_path / "out")]) == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["attach"], "--what and --slot"),
        (["attach", "nowhere", "--what", "sigkill", "--slot", "r0.s0.t0"], "no folder of a run"),
        (["recipe.toml", "--what", "kill"], "runs already"),
    ],
)
def test_attach_without_a_run_is_one_line_and_code_2(words, message, capsys):
    assert main(["chaos", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "report"])
def test_a_folder_without_a_record_is_refused(command, tmp_path, capsys):
    assert main([command, str(tmp_path / "nowhere")]) == 2
    assert main([command, str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 2
