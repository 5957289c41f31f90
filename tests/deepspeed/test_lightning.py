"""A model that Lightning's Trainer trains is refused. `DeepSpeedStrategy` itself demands GPUs; it has not been run."""

import pytest

from tests.ranks.command import NTP, Command

SCRIPT = """
import deepspeed
import lightning
import torch

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

model = Model()
if TRAINED_BY_LIGHTNING:
    model.trainer = lightning.Trainer(accelerator="cpu", devices=1, logger=False, barebones=True)
deepspeed.init_distributed("gloo")
adam = {"type": "Adam", "params": {"torch_adam": True}}
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": adam, "ntp": {"enabled": True}}
deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
print("the engine is made")
"""


@pytest.mark.short
@pytest.mark.parametrize("trained", [True, False])
def test_a_model_that_lightning_trains_is_refused(tmp_path, trained):
    """A LightningModule in a loop of one's own is a model like any other."""
    (tmp_path / "train.py").write_text(f"TRAINED_BY_LIGHTNING = {trained}\n{SCRIPT}")
    words = [*NTP, "run", "--standalone", "--nproc-per-node=2", str(tmp_path / "train.py")]
    code, output = Command(words, tmp_path / "log", DS_ACCELERATOR="cpu", PYTHONWARNINGS="ignore").end()
    assert ("the engine is made" in output) is not trained, output
    assert ("Lightning's Trainer ends a data epoch" in output) is trained, output
    assert (code == 2) is trained, output
    assert "Traceback" not in output, output
