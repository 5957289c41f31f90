"""Machine code is used where it is right, and nowhere else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_plugin.copies import machine as module
from ntp_plugin.copies.machine import Machine, machine


@pytest.fixture
def _asked_anew():
    machine.cache_clear()
    yield
    machine.cache_clear()


@pytest.mark.usefixtures("_asked_anew")
def test_without_a_library_there_is_nothing_to_say(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(module, "LIBRARY", tmp_path / "_machine.so")
    assert machine() is None
    assert not caplog.messages


@pytest.mark.usefixtures("_asked_anew")
@pytest.mark.parametrize("text", [b"", b"this is no library"])
def test_what_is_no_library_is_told_and_left(monkeypatch, tmp_path, caplog, text):
    (tmp_path / "_machine.so").write_bytes(text)
    monkeypatch.setattr(module, "LIBRARY", tmp_path / "_machine.so")
    assert machine() is None
    assert "cannot be used" in caplog.text


@pytest.mark.usefixtures("_asked_anew")
@pytest.mark.parametrize("what", ["a sum", "a largest word", "the width"])
def test_what_comes_to_other_sums_is_told_and_left(monkeypatch, caplog, what):
    if machine() is None:
        pytest.skip("it was not built")
    call = Machine.sums

    def other(found_by, rows, *, width, values):
        found = call(found_by, rows, width=width, values=values)
        found[-1][0] ^= (what == "a sum") << 63
        found[0][1] ^= what == "a largest word" or (what == "the width" and width == 2)
        return found

    machine.cache_clear()
    monkeypatch.setattr(Machine, "sums", other)
    assert machine() is None
    assert "of another source" in caplog.text


@pytest.mark.usefixtures("_asked_anew")
@pytest.mark.parametrize("call", ["copy", "fold"])
def test_what_leaves_bytes_out_is_told_and_left(monkeypatch, caplog, call):
    if machine() is None:
        pytest.skip("it was not built")
    right = getattr(Machine, call)
    machine.cache_clear()
    monkeypatch.setattr(
        Machine, call, lambda found_by, rows: right(found_by, [(to, at, size - 1) for to, at, size in rows])
    )
    assert machine() is None
    assert "of another source" in caplog.text


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 70), st.integers(0, 70)), max_size=5), st.binary())
def test_bytes_are_copied_to_where_they_belong_and_nothing_beside_them_changes(asked, salt):
    """At any address: whole lines of a processor's cache, parts of one, and none."""
    by_machine = machine()
    if by_machine is None:
        pytest.skip("it was not built")
    generator = np.random.default_rng(list(salt))
    sources = [generator.integers(0, 256, size + shift, dtype=np.uint8)[shift:] for size, shift, _ in asked]
    targets = [generator.integers(0, 256, size + 200, dtype=np.uint8) for size, _, _ in asked]
    wanted = [target.copy() for target in targets]
    for (size, _, at), source, target in zip(asked, sources, wanted, strict=True):
        target[at : at + size] = source
    each = zip(asked, sources, targets, strict=True)
    by_machine.copy([(target.ctypes.data + at, source.ctypes.data, size) for (size, _, at), source, target in each])
    assert all(np.array_equal(target, one) for target, one in zip(targets, wanted, strict=True))
