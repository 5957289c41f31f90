"""Every patch applies to the installed sources, and the result is valid Python."""

import importlib.metadata
import importlib.util
import py_compile
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PATCHES = Path(__file__).parents[2] / "patches"
VERSION = "0.19.2"
ALL = sorted((PATCHES / "megatron-core" / VERSION).glob("*.patch"))


def installed():
    """The folder that holds the package `megatron`, found without importing it."""
    spec = importlib.util.find_spec("megatron")
    (folder,) = spec.submodule_search_locations
    return Path(folder).parent


def touched(patches):
    return sorted({name for patch in patches for name in re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.M)})


@pytest.fixture
def sources(tmp_path):
    """A copy of everything that some patch touches."""
    for name in touched(ALL):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed() / name, tmp_path / name)
    return tmp_path


def apply(sources, patch, *words):
    done = subprocess.run(
        ["git", "apply", "--verbose", *words, str(patch)], cwd=sources, capture_output=True, text=True, check=False
    )
    return done.returncode == 0 and "offset" not in done.stderr, done.stderr


def test_the_patches_are_for_the_version_that_is_tested():
    assert ALL, "there are some"
    assert importlib.metadata.version("megatron-core") == VERSION


@pytest.mark.parametrize("patch", ALL, ids=lambda patch: patch.name)
def test_each_applies_alone_without_fuzz_or_offset(sources, patch):
    fits, output = apply(sources, patch, "--check")
    assert fits, output


def test_all_together_give_sources_that_compile(sources):
    for patch in ALL:
        fits, output = apply(sources, patch)
        assert fits, output
    for name in touched(ALL):
        py_compile.compile(str(sources / name), cfile=str(sources / "compiled"), doraise=True)
        assert (sources / name).read_text() != (installed() / name).read_text()


@pytest.mark.parametrize(("line", "instead"), [("        return ranks\n", "        return  ranks\n"), ("\n", "\n\n")])
def test_other_sources_are_refused(sources, line, instead):
    """A context line that differs, and the same lines elsewhere."""
    name = sources / touched(ALL[:1])[0]
    name.write_text(name.read_text().replace(line, instead, 1))
    assert not apply(sources, ALL[0], "--check")[0]


def test_each_patch_is_explained():
    text = (PATCHES / "README.md").read_text()
    assert all(f"megatron-core/{VERSION}/{patch.name}" in text for patch in ALL)
