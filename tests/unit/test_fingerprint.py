"""Settings that two processes must share are compared by name."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.recovery import fingerprint as fp
from ntp_plugin.recovery.data_identity import digest_of_file, identity_of_files
from ntp_plugin.recovery.fingerprint import Deviation, Fingerprint

SECTIONS = st.dictionaries(st.text(), st.text(), max_size=5)


@given(SECTIONS, SECTIONS)
def test_two_sections_differ_in_their_digest_where_they_differ_in_a_name(here, there):
    digests = [Fingerprint(sections={"one": section}).digests["one"] for section in (here, there)]
    assert (digests[0] == digests[1]) == (not fp.differences("one", here, there)) == (here == there)
    assert fp.decode(fp.encode(here)) == here


def test_both_values_are_named():
    (seed, width) = fp.differences("arguments", {"seed": "1", "lr": "2"}, {"seed": "3", "lr": "2", "width": "4"})
    assert seed == "seed (arguments) is 1 here and 3 there"
    assert width == "width (arguments) is not set here and 4 there"


def test_many_differences_and_long_values_stay_one_line():
    found = fp.differences("arguments", {f"a{n}": "x" * 1000 for n in range(50)}, {})
    assert len(fp.in_short(found)) < 1000 and fp.in_short(found).endswith("and 44 more")


def test_settings_free_to_differ_are_omitted_and_nested_names_are_dotted():
    assert fp.in_words({"a": {"b": 1, "c": None}, "rank": 3}, free=["rank"]) == {"a.b": "1", "a.c": "None"}


def test_an_object_is_described_without_its_address():
    """The address differs between two processes with the same settings."""
    assert fp.in_words({"of": object()}) == {"of": "builtins.object"}


def test_only_variables_that_choose_how_numbers_are_computed_are_compared():
    variables = {
        "NVTE_FUSED_ATTN": "0",
        "NCCL_ALGO": "Ring",
        "NCCL_SOCKET_IFNAME": "eth0",
        "RANK": "3",
        "HOME": "/root",
    }
    assert fp.environment(variables | {"MASTER_PORT": "1", "LOCAL_RANK": "0"}) == {
        "NVTE_FUSED_ATTN": "0",
        "NCCL_ALGO": "Ring",
    }


def test_the_ranks_with_another_digest_than_most_are_named():
    digests = [{"a": "x", "b": "1"}, {"a": "y", "b": "1"}, {"a": "x", "b": "1"}, {"a": "y"}, {"a": "x"}]
    assert fp.deviations(digests) == [Deviation(section="a", ranks=(1, 3), usual=0)]


def test_the_group_of_the_lowest_rank_wins_a_tie():
    assert fp.deviations([{"a": "x"}, {"a": "y"}]) == [Deviation(section="a", ranks=(1,), usual=0)]


def test_a_section_missing_on_a_rank_is_not_compared():
    assert not fp.deviations([{"model of t0": "x"}, {"model of t1": "y"}, {"model of t0": "x"}, {}])


# ---------------------------------------------------------------- data


@pytest.mark.parametrize("size", [0, 1, 70_000, 1 << 20, (1 << 20) + 1, 5_000_000])
def test_a_file_is_identified_by_its_contents(size, tmp_path):
    content = random.Random(size).randbytes(size)
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(content)
    other.write_bytes(content)
    assert digest_of_file(one) == digest_of_file(other)
    if size:
        other.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        assert digest_of_file(one) != digest_of_file(other)
        other.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert digest_of_file(one) != digest_of_file(other)
        other.write_bytes(content[:-1])
        assert digest_of_file(one) != digest_of_file(other)


def test_data_are_identified_by_their_files_and_not_by_their_folder(tmp_path):
    for folder, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "corpus.idx").write_bytes(content)
    a, b, c = (identity_of_files(["0.3", str(tmp_path / x / "corpus")], endings=[".idx"]) for x in "abc")
    assert a == b != c
    assert a.keys() == {"part 1", "part 2", "part 2.idx"}
    assert identity_of_files(["0.5", str(tmp_path / "a" / "corpus")], endings=[".idx"]) != a


def test_a_host_without_the_files_does_not_compare_them(tmp_path):
    assert identity_of_files([str(tmp_path / "corpus")], endings=[".idx", ".bin"]) == {}
