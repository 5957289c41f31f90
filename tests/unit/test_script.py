"""A worker's script with hooks in what it imports."""

import importlib
import importlib.util
import sys

import pytest

from ntp_plugin.launch.script import AfterImport, after_import, with_hooks

US = ("-m", "ntp_plugin.launch.script")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("-u train.py --ntp-enable", ("-u", *US, "train.py", "--ntp-enable")),
        ("-u train.py --ntp-config=a.toml", ("-u", *US, "train.py", "--ntp-config=a.toml")),
        ("-u -m package.train --ntp-enable", ("-u", *US, "-m", "package.train", "--ntp-enable")),
        ("-u train.py --lr 1", ("-u", *US, "train.py", "--lr", "1")),
        ("-u -m ntp_plugin.launch.script train.py", ("-u", *US, "train.py")),
        ("-m ntp_plugin.megatron train.py --ntp-enable", ("-m", "ntp_plugin.megatron", "train.py", "--ntp-enable")),
    ],
)
def test_hooks_precede_the_script(words, wanted):
    assert with_hooks(words.split()) == wanted


@pytest.fixture
def imports(tmp_path, monkeypatch):
    """A module that can be imported, and a list of what was done after that."""
    (tmp_path / "framework_of_a_test.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = []
    yield lambda: done.append(sys.modules["framework_of_a_test"].VALUE), done
    sys.modules.pop("framework_of_a_test", None)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AfterImport)]


def test_hooks_go_in_when_the_framework_has_been_imported(imports):
    then, done = imports
    after_import("framework_of_a_test", then)
    assert not done
    importlib.import_module("framework_of_a_test")
    importlib.import_module("framework_of_a_test")
    assert done == [1]


def test_hooks_are_installed_at_once_in_an_imported_module(imports):
    then, done = imports
    importlib.import_module("framework_of_a_test")
    after_import("framework_of_a_test", then)
    assert done == [1]


def test_a_script_that_never_imports_it_gets_no_hooks(imports):
    then, done = imports
    after_import("framework_that_nobody_has", then)
    importlib.import_module("framework_of_a_test")
    assert not done


def test_a_query_for_the_installation_changes_nothing(imports):
    then, done = imports
    after_import("framework_of_a_test", then)
    for _ in range(2):
        assert importlib.util.find_spec("framework_of_a_test") is not None
    assert done == []
    importlib.import_module("framework_of_a_test")
    assert done == [1]
    assert not any(isinstance(finder, AfterImport) for finder in sys.meta_path)
