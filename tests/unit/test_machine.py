"""Machine code is used only where it is right."""

import _ctypes
import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_plugin.copies import machine as module
from ntp_plugin.copies.machine import NativeLibrary, machine
from ntp_plugin.copies.runs import odd_numbers


@pytest.fixture
def _asked_anew():
    machine.cache_clear()
    yield
    machine.cache_clear()


@pytest.mark.usefixtures("_asked_anew")
def test_without_a_library_nothing_is_reported(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(module, "LIBRARY", tmp_path / "_machine.so")
    assert machine() is None
    assert not caplog.messages


@pytest.mark.usefixtures("_asked_anew")
@pytest.mark.parametrize("text", [b"", b"this is no library"])
def test_a_file_that_is_no_library_is_reported_and_ignored(monkeypatch, tmp_path, caplog, text):
    (tmp_path / "_machine.so").write_bytes(text)
    monkeypatch.setattr(module, "LIBRARY", tmp_path / "_machine.so")
    assert machine() is None
    assert "cannot be used" in caplog.text


@pytest.mark.usefixtures("_asked_anew")
def test_a_library_with_other_functions_is_reported_and_ignored(monkeypatch, caplog):
    """The library was built before its functions got their present arguments: a call would end the process."""
    monkeypatch.setattr(module, "LIBRARY", Path(_ctypes.__file__))
    assert machine() is None
    assert "cannot be used" in caplog.text


@pytest.mark.usefixtures("_asked_anew")
@pytest.mark.parametrize("what", ["a sum", "a largest word", "the width"])
def test_a_library_with_wrong_sums_is_reported_and_ignored(monkeypatch, caplog, what):
    if machine() is None:
        pytest.skip("it was not built")
    call = NativeLibrary.sums

    def other(found_by, rows, found):
        call(found_by, rows, found)
        found[-1][0] ^= np.uint64((what == "a sum") << 63)
        found[0][1] ^= np.uint64(what == "a largest word" or (what == "the width" and rows[0][5] == 2))

    machine.cache_clear()
    monkeypatch.setattr(NativeLibrary, "sums", other)
    assert machine() is None
    assert "of another source" in caplog.text


def folds_a_byte_less(fold):
    return lambda by, rows: fold(by, rows - np.array([0, 0, 1], dtype=np.uint64))


def copies_nothing(sums):
    return lambda by, rows, found: sums(by, rows * np.array([*[1] * 7, 0], dtype=np.uint64), found)


def copies_all_but_a_byte(sums):
    def other(by, rows, found):
        sums(by, rows, found)
        for *_, keys, pages, width, _, to in rows.tolist():
            if to:
                ctypes.c_uint8.from_address(to + keys * pages * width - 1).value ^= 1

    return other


@pytest.mark.usefixtures("_asked_anew")
@pytest.mark.parametrize(
    ("call", "spoilt"), [("fold", folds_a_byte_less), ("sums", copies_nothing), ("sums", copies_all_but_a_byte)]
)
def test_a_library_that_skips_bytes_is_reported_and_ignored(monkeypatch, caplog, call, spoilt):
    if machine() is None:
        pytest.skip("it was not built")
    machine.cache_clear()
    monkeypatch.setattr(NativeLibrary, call, spoilt(getattr(NativeLibrary, call)))
    assert machine() is None
    assert "of another source" in caplog.text


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 4), st.integers(0, 70), st.integers(0, 70)), max_size=5),
    st.sampled_from([np.uint8, np.int16, np.int32]),
    st.binary(),
)
def test_words_are_copied_to_where_they_belong_and_nothing_beside_them_changes(asked, word, salt):
    """At any address: full cache lines, parts of one, and none; the sums are the same."""
    by_machine = machine()
    if by_machine is None:
        pytest.skip("it was not built")
    generator, width = np.random.default_rng(list(salt)), np.dtype(word).itemsize
    drawn = [generator.integers(0, 256, (page * pages + shift) * width, np.uint8) for page, pages, shift, _ in asked]
    sources = [one.view(word)[shift:] for one, (*_, shift, _) in zip(drawn, asked, strict=True)]
    targets = [
        generator.integers(0, 256, (page * pages + 99) * width, np.uint8).view(word) for page, pages, *_ in asked
    ]
    wanted = [target.copy() for target in targets]
    for (*_, at), source, target in zip(asked, sources, wanted, strict=True):
        target[at : at + len(source)] = source
    keys, pages_keys = odd_numbers(torch.arange(300)).numpy(), odd_numbers(torch.arange(4)).numpy()
    rows = [
        (
            *(source.ctypes.data, keys.ctypes.data, pages_keys.ctypes.data, page, pages, width, number),
            target.ctypes.data + at * width,
        )
        for number, ((page, pages, _, at), source, target) in enumerate(zip(asked, sources, targets, strict=True))
    ]
    rows, sums, found = np.array(rows, dtype=np.uint64).reshape(-1, 8), *np.zeros((2, len(asked), 2), dtype=np.uint64)
    by_machine.sums(rows, found)
    assert all(np.array_equal(target, one) for target, one in zip(targets, wanted, strict=True))
    rows[:, 7] = 0
    by_machine.sums(rows, sums)
    assert np.array_equal(sums, found)
