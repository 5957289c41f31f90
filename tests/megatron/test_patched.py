"""A Megatron with our patches takes settings instead of hooks, and trains to the same bits."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ntp_plugin.testing.ranks import Ranks
from tests.harness.parity.job import Play, have_megatron_imported, largest_differences, run
from tests.harness.parity.layouts import BASE, degraded
from tests.unit.test_patches import ALL, apply, installed

JOB = degraded(BASE, "TP4+TP3")
REPOSITORY = Path(__file__).parents[2]


class Looking(Play):
    """Play as `run` does, and then check what was replaced and which settings were given."""

    def __call__(self, rank):
        seen = super().__call__(rank)
        from megatron.core import parallel_state  # noqa: PLC0415
        from megatron.core.optimizer import clip_grads, optimizer  # noqa: PLC0415
        from megatron.core.tensor_parallel import utils  # noqa: PLC0415
        from megatron.training import training  # noqa: PLC0415
        from megatron.training.datasets import data_samplers  # noqa: PLC0415

        replaced = [
            parallel_state._RANK_LISTS,
            clip_grads._AGREE_ON_NORM,
            utils._VOCAB_RANGE,
            data_samplers._TRAINING_SAMPLER,
        ]
        untouched = [
            parallel_state.RankGenerator.__name__ == "RankGenerator",
            *(
                not hasattr(function, "__wrapped__")
                for function in (
                    parallel_state.initialize_model_parallel,
                    optimizer.get_grad_norm_fp32,
                    training.build_pretraining_data_loader,
                    training.build_train_valid_test_datasets,
                )
            ),
        ]
        return seen, all(value is not None for value in replaced) and all(untouched)


def play_to(file):
    """Run the job with the patched sources first in the path."""
    have_megatron_imported()
    with Ranks(JOB.processes, Looking(JOB)) as ranks:
        Path(file).write_bytes(pickle.dumps(ranks.wait()))


@pytest.mark.short
def test_patches_take_the_place_of_hooks_with_the_same_bits(tmp_path):
    shutil.copytree(installed() / "megatron", tmp_path / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    for patch in ALL:
        fits, output = apply(tmp_path, patch)
        assert fits, output
    outcomes = tmp_path / "outcomes"
    code = f"from tests.megatron.test_patched import play_to; play_to({str(outcomes)!r})"
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, cwd=REPOSITORY, check=True)
    results = pickle.loads(outcomes.read_bytes())
    assert all(instead for _, instead in results.values()), "each patch is used, and its hooks are out"
    seen = {rank: seen for rank, (seen, _) in results.items()}
    assert max(largest_differences(seen, run(JOB)).values()) == 0.0
