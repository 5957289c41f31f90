"""Nothing that `ntp` prints from a record or a file controls a terminal."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ntp_plugin.cli.main import main
from ntp_plugin.cli.screen import Screen
from ntp_plugin.cli.status import follow
from ntp_plugin.copies.manifest import Version
from ntp_plugin.copies.replicator import Part, Replicator, Snapshot
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.copies.store import Store
from ntp_plugin.launch.run_folder import COPIES, RunFolder
from ntp_plugin.telemetry import Committed, CopyTrouble, Corrupted, Ended, FaultInjected, RankLost
from ntp_plugin.telemetry.printable import printable
from tests.unit.copies_bytes import mapped
from tests.unit.test_cli_status import write_beginning, write_events

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x1b]52;c;cm0gLXJm\x1b\\\x1bc\x1bP1;2q\x1b\\[red]\u202e\x00\x08\r\n"
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain [red] text, ünïcode ✗ 数", "plain [red] text, ünïcode ✗ 数"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("a\x1b]0;title\x07b\x1b]8;;http://x\x1b\\c", "abc"),
        ("\x1b]52;c;never ended", ""),
        ("\x1bPq#0\x1b\\a\x9b2Jb\x9d0;t\x9cc\x1b(Bd\x1bce", "abcde"),
        ("a\nb\tc\rd\x00e\x7ff\u202eg", "a b c d e f g"),
        (EVIL, "[red]     "),
    ],
)
def test_sequences_are_stripped(text, shown):
    assert printable(text) == shown


@given(st.text(st.one_of(st.sampled_from("\x1b\x9b\x9d[];0m\x07\\c\n"), st.characters()), max_size=60))
def test_control_characters_are_removed(text):
    assert not OBEYED.search(printable(text))
    assert "\n" not in printable(text)


@pytest.fixture
def with_control_characters(tmp_path):
    """A record with such text wherever an event has any."""
    write_beginning(tmp_path, pids=range(1, 5), machine="another machine")
    losses = {f"lm{EVIL}loss": 5.5}
    for number in (1, 2, 3, 4, 5, 6):
        write_events(tmp_path, Committed(step=number, epoch=0, seconds=0.2, losses=losses, samples=[]))
    write_events(tmp_path, RankLost(number=1, pid=2, kind=EVIL, reason=f"code{EVIL}-9"))
    write_events(tmp_path, FaultInjected(fault=EVIL, what=f"kill{EVIL}", whom=f"slot{EVIL}", fault_point=EVIL, step=2))
    write_events(tmp_path, CopyTrouble(what=f"late{EVIL}"), slot=f"r9{EVIL}")
    write_events(tmp_path, Corrupted(step=3, what=EVIL, slots=[EVIL], certain=True, healed=False), Ended())
    return tmp_path


def test_status_without_a_terminal(with_control_characters, capsys):
    assert follow(with_control_characters, Screen(f"run{EVIL}")) == 0
    output = capsys.readouterr().out
    assert "code[red]" in output
    assert not OBEYED.search(output)


def test_status_in_a_terminal(with_control_characters):
    console = Console(record=True, force_terminal=True, width=200, highlight=False)
    assert follow(with_control_characters, Screen(f"run{EVIL}", console)) == 0
    seen = console.export_text()
    assert "code[red]" in seen
    assert "run[red]" in seen
    assert not OBEYED.search(seen)


def test_report(with_control_characters, capsys):
    assert main(["report", str(with_control_characters)]) in (0, 1)
    output = capsys.readouterr().out
    assert "left out: a FaultInjected line" in output
    assert not OBEYED.search(output)


def test_copies(tmp_path, monkeypatch, capsys):
    """Names of a run and of tensors come from manifests, and that of a host from a folder."""
    monkeypatch.setenv("COLUMNS", "250")
    run = RunFolder(COPIES, tmp_path)
    store = Store(run.path / "host-0\x1b[31m")
    replicator = Replicator(store, run=f"job{EVIL}", secret="", slot=3, trouble=pytest.fail)
    tensor_slice = TensorSlice(tensor=f"w{EVIL}", shape=(4,), dim=0, ranges=((0, 4),), start=0, stop=4)
    part = Part(tensor_slice=tensor_slice, values={"main": torch.arange(4.0)}, numbers={})
    replicator.begin(Snapshot(version=Version(step=7, epoch=2), holders=(3,), parts=[part], extras={}))
    replicator.close()
    (place, _), *_ = store.found()
    mapped(store, place)[5] ^= 1
    run.leave()
    for words, code in ((["list"], 0), (["verify"], 1), (["clean"], 0)):
        assert main(["copies", *words, str(run.path)]) == code
        output = capsys.readouterr().out
        assert not OBEYED.search(output), words
        assert ("job[red]" in output) == (words != ["clean"])


def test_an_error_is_one_line_without_them(tmp_path, capsys):
    assert main(["copies", "list", str(tmp_path / f"none{EVIL}".replace("\0", ""))]) == 2
    output = capsys.readouterr().err
    assert "none[red]" in output
    assert output.count("\n") == 1
    assert not OBEYED.search(output)
