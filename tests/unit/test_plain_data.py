"""Values in files and in the store are data: they round-trip, and reading them runs no code."""

import argparse
import ast
import base64
import collections
import dataclasses
import enum
import importlib.util
import itertools
import json
import math
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

import ntp_plugin
from ntp_plugin.config.sections import Model
from ntp_plugin.errors import UserError
from ntp_plugin.plain_data import NotData, decode, encode
from ntp_plugin.planning.units import OF_UNITS, transformer_units

PACKAGE = Path(ntp_plugin.__file__).parent


def there_and_back(value, **kinds):
    return decode(encode(value, what="it"), what="it", **kinds)


def same(found, wanted):  # noqa: PLR0911  (a return for each kind)
    """Compare values, including tensors, arrays and NaN, and the types of all parts."""
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, torch.Tensor):
        alike = found.dtype == wanted.dtype and found.shape == wanted.shape
        return alike and same(found.reshape(-1).tolist(), wanted.reshape(-1).tolist())
    if isinstance(wanted, np.ndarray):
        return found.dtype == wanted.dtype and found.shape == wanted.shape and same(found.tolist(), wanted.tolist())
    if isinstance(wanted, float) and math.isnan(wanted):
        return math.isnan(found)
    if isinstance(wanted, dict):
        return same(list(found), list(wanted)) and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return found == wanted


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.integers(0, 9).map(np.int32)
)
KEYS = st.one_of(st.integers(), st.text(), st.tuples(st.integers(), st.text()), st.none())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner), st.sets(KEYS), st.frozensets(KEYS)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_plain_data_round_trips(value):
    assert same(there_and_back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([math.nan, -0.0, math.inf]),
        torch.empty(0, 3, dtype=torch.int8),
        torch.tensor([1 + 2j]).conj(),
        torch.zeros(2, 2).requires_grad_() * 2,
        torch.Size((2, 3)),
        torch.float16,
        torch.device("cuda:1"),
        np.arange(6).reshape(2, 3).T,
        np.float32(0.1),
        np.bool_(True),
        np.zeros((0, 2)),
        np.array(["2", "x"]) == "x",
        collections.OrderedDict(b=1, a=2),
        collections.Counter([3, 3, 7]),
        argparse.Namespace(lr=0.1, betas=(0.9, 0.95), path=Path("x/y")),
        {"tuple": [1], "of": ["Tensor", {}]},
        -0.0,
        1 << 200,
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_kind_round_trips(value):
    assert same(there_and_back([value, {0: value}]), [value, {0: value}])


def test_units_of_a_model_round_trip():
    model = Model(layers=4, hidden=64, heads=4, groups=4, ffn=128, vocab=256)
    units = transformer_units(model, tp=2, pp=2)
    assert there_and_back(units, kinds=OF_UNITS) == units


def test_an_unexpected_data_class_is_not_constructed():
    model = encode(transformer_units(Model(layers=1, hidden=8, heads=1, groups=1, ffn=8, vocab=8), tp=1, pp=1), what="")
    with pytest.raises(NotData, match=r"^the units is not what was written: KeyError: 'ModelUnits'"):
        decode(model, what="the units")


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Own:
    inner: object


def itself():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (object(), "builtins.object"),
        (lambda: 0, "builtins.function"),
        (Colour.RED, "test_plain_data.Colour"),
        (collections.defaultdict(int), "collections.defaultdict"),
        (torch.nn.Parameter(torch.zeros(1)), "Parameter"),
        (torch.zeros(2, 2).to_sparse(), "torch.Tensor"),
        (np.array([object()]), "numpy.ndarray"),
        (Own(print), "builtins.builtin_function_or_method"),
        (itself(), "contains itself"),
    ],
    ids=["object", "lambda", "enum", "defaultdict", "parameter", "sparse", "objects", "inside", "itself"],
)
def test_other_objects_are_refused_by_type(value, names):
    with pytest.raises(NotData) as refused:
        encode({"a": [value]}, what="the schedule")
    assert names in str(refused.value)
    assert str(refused.value).startswith("the schedule ")
    assert isinstance(refused.value, UserError)


class Runs:
    """A pickle that runs code."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_malicious_pickle_runs_nothing(tmp_path):
    forged = pickle.dumps(Runs(str(tmp_path / "ran")))
    pickle.loads(pickle.dumps(Runs(str(tmp_path / "control"))))
    assert (tmp_path / "control").exists()
    for text in (forged, base64.b64encode(forged)):
        with pytest.raises(NotData):
            decode(text, what="it")
    assert there_and_back(forged) == forged
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"tuple": 1}',
        '{"tuple": [1], "set": []}',
        '{"set": [[1]]}',
        '{"dict": [[1]]}',
        '{"_class__": []}',
        '{"tensor": ["float32", [2], "AAAA"]}',
        '{"tensor": ["nn", [1], "AAAA"]}',
        '{"tensor": ["load", [1], "AAAA"]}',
        '{"dtype": "Tensor"}',
        '{"device": "nowhere"}',
        '{"numpy": ["O", [1], "AAAAAAAAAAA=", false]}',
        '{"numpy": ["<f4", [3], "AAAA", false]}',
        '{"of": ["Popen", {"args": "id"}]}',
        '{"of": []}',
        '{"bytes": "%%%"}',
        "[" * 100_000,
        '{"tuple": [' * 5000,
    ],
)
def test_malformed_text_is_refused(text):
    with pytest.raises(NotData, match=r"^it is not what was written: "):
        decode(text, what="it", kinds=OF_UNITS)


def schedulers():
    def optimizer():
        return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.1)

    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    yield lr_scheduler.MultiStepLR(optimizer(), [2, 2, 3])
    yield lr_scheduler.OneCycleLR(optimizer(), max_lr=1.0, total_steps=10)
    yield lr_scheduler.CosineAnnealingWarmRestarts(optimizer(), 3)
    yield lr_scheduler.LambdaLR(optimizer(), lambda step: 0.5**step)
    yield lr_scheduler.ReduceLROnPlateau(optimizer())
    yield lr_scheduler.CyclicLR(sgd, 0.1, 1.0)
    together = optimizer()
    parts = [lr_scheduler.ConstantLR(together), lr_scheduler.ExponentialLR(together, 0.9)]
    yield lr_scheduler.SequentialLR(together, parts, milestones=[2])


@pytest.mark.parametrize("scheduler", [*schedulers()], ids=lambda scheduler: type(scheduler).__name__)
def test_the_state_of_torchs_schedulers_is_data(scheduler):
    for _ in range(3):
        scheduler.optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    state = scheduler.state_dict()
    assert same(there_and_back(state), state)
    for group in scheduler.optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        assert same(there_and_back(options), options)


# ---------------------------------------------------------------- that it stays so

MAY_UNPICKLE = {
    "testing/ranks.py": "a pipe to its own child, which it has started",
}
"""Places that unpickle values which come neither from a file nor from the network."""
MEMBERS_ALONE = {
    "groups/process_groups.py",
    "deepspeed/job.py",
    "deepspeed/trainer.py",
    "deepspeed/full_width_state.py",
    "megatron/batch_share.py",
    "megatron/fp8_scales.py",
    "megatron/job.py",
    "megatron/checkpoint/save_errors.py",
    "megatron/reduction/lane_sync.py",
    "megatron/live/scales.py",
    "megatron/live/trainer.py",
    "megatron/live/training_step.py",
    "plain/data_parallel.py",
    "recovery/job_copies.py",
    "recovery/voted_sections.py",
    "recovery/replica_comparison.py",
    "recovery/same_settings.py",
    "resharding/reshard.py",
}
"""Calls of torch's object collectives, which unpickle data of other members of a process group. Torch, Megatron and
DeepSpeed call the same ones over the same connections, so they would remain without ours: a process that can send there
is trusted as a member of the job."""
UNPICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
OF_OBJECTS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
OF_OBJECTS |= {"send_object_list", "recv_object_list"}


def unpickling(source):
    """Code of a module that reads pickles: imports of such modules, and loads of torch and NumPy that may."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in UNPICKLES)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLES:
            yield str(node.module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            called = ast.unparse(node.func)
            if called == "torch.load" and keywords.get("weights_only") != "True":
                yield called
            if "allow_pickle" in keywords and keywords["allow_pickle"] != "False":
                yield called


def of_objects(source):
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {func.attr for func in calls if isinstance(func, ast.Attribute)} & OF_OBJECTS


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), path.read_text()


def test_the_package_unpickles_nothing_from_files_or_the_network():
    found = {name for name, source in modules() if any(unpickling(source))}
    assert found == MAY_UNPICKLE.keys()


def test_object_collectives_are_in_the_known_places():
    assert {name for name, source in modules() if of_objects(source)} == MEMBERS_ALONE


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import shelve",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_the_check_detects_unpickling(source):
    assert list(unpickling(source))


def test_the_check_accepts_sound_code():
    assert not list(unpickling("torch.load(path, weights_only=True); np.load(path, allow_pickle=False); json.loads(x)"))
    assert of_objects("dist.all_gather_object(told, mine)") == {"all_gather_object"}


class Engine:
    """The counters of an engine."""

    global_steps, global_samples, skipped_steps, micro_steps = itertools.repeat(3, 4)
    optimizer = torch_autocast_z0_gradscaler = None

    def random_ltd_enabled(self):
        """Whether some layers see only some tokens."""
        return False

    def __init__(self):
        self.basic_optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        self.lr_scheduler = lr_scheduler.StepLR(self.basic_optimizer, 2)


@pytest.fixture
def counted():
    """`deepspeed/engine_counters.py` without its package, whose import needs DeepSpeed."""
    spec = importlib.util.spec_from_file_location("counted", PACKAGE / "deepspeed/engine_counters.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_engine_counters_round_trip(counted):
    first, second = Engine(), Engine()
    first.global_steps = 7
    first.basic_optimizer.param_groups[0]["lr"] = 0.5
    first.lr_scheduler.last_epoch = 9
    counted.adopt(second, json.loads(json.dumps(counted.count(first))))
    assert (second.global_steps, second.basic_optimizer.param_groups[0]["lr"]) == (7, 0.5)
    assert second.lr_scheduler.last_epoch == 9


def test_a_step_that_is_taken_again_unscales_its_gradients_again(counted):
    """Torch's scaler, in `torch_autocast` of fp16, refuses to do that twice in one step."""
    engine = Engine()
    (parameter,) = engine.basic_optimizer.param_groups[0]["params"]
    scaler = engine.torch_autocast_z0_gradscaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(parameter.sum()).backward()
    before = json.loads(json.dumps(counted.count(engine)))
    scaler.unscale_(engine.basic_optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(engine.basic_optimizer)
    counted.adopt(engine, before)
    scaler.unscale_(engine.basic_optimizer)
    scaler.step(engine.basic_optimizer)
    scaler.update()
    assert (before["autocast"]["scale"], scaler.get_scale()) == (8.0, 16.0)
    counted.adopt(engine, before)
    assert scaler.get_scale() == 8.0


def test_a_scheduler_with_state_that_is_no_data_is_refused(counted):
    engine = Engine()
    engine.lr_scheduler.seen = {object()}
    with pytest.raises(NotData, match=r"state_dict of .* has a value of type builtins\.object"):
        counted.count(engine)
