"""Finds what the plugin replaces, overrides and calls of the frameworks, and writes the tables of signatures.

    python -m benchmarks.signatures ntp_plugin/tested_versions        or   make signatures

The names come from the plugin's own source: the targets of replacements, the names that it imports, the attributes of
imported modules and classes, and the methods of a framework's class that a class of ours overrides. Only methods of
objects have to be named by hand, in `ON_OBJECTS`. A test compares the tables with what this module would write.
"""

import ast
import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from ntp_plugin.megatron import cpu_emulation
from ntp_plugin.tested_versions.comparison import table_of
from ntp_plugin.tested_versions.signatures import MISSING, signature_of

_ROOT = Path(__file__).parents[1] / "ntp_plugin"
_EMULATION = (
    *("cpu_emulation.py", "cpu_arguments.py", "cpu_fused_gradients.py", "delta_net_emulation.py"),
    "te_emulation",
)
"""What only `NTP_CPU` replaces: a change there breaks a test without GPUs, and no training."""
SOURCES = {
    "megatron-core": ("megatron",),
    "transformer-engine": ("megatron",),
    "deepspeed": ("deepspeed",),
    "torch": ("megatron", "deepspeed", "groups", "membership", "recovery", "reduction", "resharding", "plain"),
    "transformers": ("deepspeed/hf",),
    "accelerate": ("deepspeed/hf", "deepspeed/accelerate_loop", "launch"),
}
"""Package -> where the plugin uses it."""
_ROOTS = {"megatron-core": "megatron", "transformer-engine": "transformer_engine"}
_NEED_TE = ("transformer_engine.", "megatron.core.extensions.transformer_engine:TE")
_DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
_OPTIMIZER = "megatron.core.optimizer"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_ZERO = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_HF_TRAINER = "transformers.trainer:Trainer"


def _of(owner: str, *methods: str) -> tuple[str, ...]:
    return tuple(f"{owner}.{method}" for method in methods)


ON_OBJECTS = {
    "megatron-core": (
        *_of(_DDP, "enable_forward_pre_hook", "disable_forward_pre_hook", "start_param_sync", "scale_gradients"),
        *(
            f"{_OPTIMIZER}.optimizer:{owner}.{method}"
            for owner in ("MegatronOptimizer", "MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")
            for method in ("step", "step_with_ready_grads", "get_grad_norm", "clip_grad_norm", "count_zeros")
        ),
        f"{_OPTIMIZER}.optimizer:MegatronOptimizer.has_grad_norm_group",
        f"{_OPTIMIZER}.optimizer:Float16OptimizerWithFloat16Params",
        f"{_OPTIMIZER}.distrib_optimizer:DistributedOptimizer._copy_main_params_to_model_params",
        f"{_OPTIMIZER}.distrib_optimizer:DistributedOptimizer._get_model_param_range_map",
        "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.step",
        "megatron.core.dist_checkpointing.strategies.async_utils:AsyncCaller.sync_all_async_calls",
        "megatron.training.checkpointing:save_checkpoint",
        "megatron.training.checkpointing:load_checkpoint",
    ),
    "transformer-engine": _of("transformer_engine.pytorch.distributed:get_distributed_world_size", "cache_clear")
    + _of("transformer_engine.pytorch.distributed:get_distributed_rank", "cache_clear")
    + _of("megatron.core.extensions.transformer_engine:TEColumnParallelLinear", "__init__")
    + tuple(
        f"megatron.core.extensions.transformer_engine:{layer}.forward"
        for layer in ("TEColumnParallelLinear", "TELayerNormColumnParallelLinear", "TERowParallelLinear")
    ),
    "deepspeed": (
        *_of(_ENGINE, "forward", "backward", "step", "save_checkpoint", "load_checkpoint", "save_16bit_model"),
        *_of(_ENGINE, "autotp_size", "gradient_accumulation_steps", "zero_optimization_stage", "gradient_clipping"),
        *_of(_ENGINE, "train_micro_batch_size_per_gpu", "set_gradient_accumulation_boundary", "get_data_types"),
        *_of(_ENGINE, "set_train_batch_size", "set_train_micro_batch_size", "no_sync", "coalesce_grad_reduction"),
        *_of(_ENGINE, "clip_fp32_gradients", "buffered_allreduce_fallback", "use_node_local_storage"),
        *_of(_ENGINE, "_configure_zero_optimizer", "_configure_bf16_optimizer", "_flush_coalesced_reduction_zero12"),
        *_of(_ENGINE, "_backward_post_hook"),
        *_of(_ZERO, "__init__", "update_lp_params", "_update_model_bit16_weights", "destroy", "step"),
        "deepspeed.runtime.engine:DeepSpeedZeroOptimizer",
        "deepspeed.runtime.engine:BF16_Optimizer",
        "deepspeed.runtime.bf16_optimizer:BF16_Optimizer.update_lp_params",
    ),
    "torch": (),
    "transformers": _of(
        _HF_TRAINER,
        *("floating_point_ops", "_load_callback_state", "compute_loss", "_maybe_log_save_evaluate"),
        *("store_flos", "_inner_training_loop", "_init_training_state"),
    ),
    "accelerate": (
        *_of("accelerate.utils:DeepSpeedEngineWrapper", "backward", "get_global_grad_norm"),
        *_of("accelerate.state:GradientState", "_set_sync_gradients"),
        *_of("accelerate.data_loader:DataLoaderShard", "__iter__", "set_epoch"),
        *_of("accelerate.data_loader:BatchSamplerShard", "__iter__", "_iter_with_no_split", "_iter_with_split"),
        *_of("accelerate.data_loader:DataLoaderShard", "begin", "end"),
        *(f"accelerate.utils.operations:{name}" for name in ("_gpu_gather", "_gpu_gather_object", "_gpu_broadcast")),
        *(f"accelerate.utils.operations:{name}" for name in ("reduce", "broadcast_object_list", "send_to_device")),
        *_of("accelerate.state:PartialState", "wait_for_everyone"),
        "accelerate.state:AcceleratorState._shared_state",
        "accelerate.state:PartialState._shared_state",
    ),
}
"""Methods that the plugin calls or replaces on an object, without a name that an import binds."""


PATCHED = {
    "megatron-core": {
        "megatron.training.training:build_pretraining_data_loader": "(dataset, consumed_samples, is_training=False)"
    }
}
"""Signatures that the patches of this repository change."""


class Names(ast.NodeVisitor):
    """The targets in one file of the plugin."""

    def __init__(self, tree: ast.Module, root: str) -> None:
        self._root, self._tree = root, tree
        self._bound: dict[str, str] = {}
        """Local name -> the target that an import binds to it."""
        self._texts: dict[str, tuple[str, ...]] = {
            node.targets[0].id: (str(node.value.value),)
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        self.found: set[str] = set()
        self.visit(tree)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if self._is_of_root(alias.name):
                self._bound[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else self._root

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names if node.module and self._is_of_root(node.module) else ():
            target = _joined(node.module or "", alias.name)
            self._bound[alias.asname or alias.name] = target
            self._add(target)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        names: list[str] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            names.insert(0, inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in self._bound:
            self._add(_followed(self._bound[inner.id], names))
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            owner = self._bound.get(base.id) if isinstance(base, ast.Name) else None
            for method in node.body if owner else ():
                target = f"{owner}.{method.name}" if isinstance(method, ast.FunctionDef) else ""
                if target and signature_of(target) != MISSING:
                    self._add(target)
        self.generic_visit(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        before = dict(self._texts)
        for loop in node.generators:
            if isinstance(loop.target, ast.Name) and isinstance(loop.iter, ast.Tuple):
                self._texts[loop.target.id] = tuple(text for part in loop.iter.elts for text in self._read(part))
        self.generic_visit(node)
        self._texts = before

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "Replacement":
            for keyword in node.keywords:
                for text in self._read(keyword.value) if keyword.arg == "target" else ():
                    if self._is_of_root(text.partition(":")[0]):
                        self.found.add(text)
        self.generic_visit(node)

    def _read(self, node: ast.expr) -> tuple[str, ...]:
        """Return the texts that an expression may have; none if the source does not show them."""
        match node:
            case ast.Constant(value=str(text)):
                return (text,)
            case ast.Name(id=name):
                return self._texts.get(name, ())
            case ast.JoinedStr(values=parts):
                inner = [part.value if isinstance(part, ast.FormattedValue) else part for part in parts]
                return tuple("".join(texts) for texts in itertools.product(*map(self._read, inner)))
        return ()

    def _is_of_root(self, module: str) -> bool:
        return module.split(".", maxsplit=1)[0] == self._root

    def _add(self, target: str) -> None:
        """Keep a target; of torch only what is private, since its public names are stable."""
        words = target.rpartition(":")[2].split(".")
        is_private = any(word.startswith("_") and not word.startswith("__") for word in words)
        if ":" in target and (self._root != "torch" or is_private):
            self.found.add(target)


def _joined(module: str, name: str) -> str:
    """Return a module's submodule, or the target of its attribute."""
    with contextlib.suppress(ImportError, ValueError):
        if isinstance(getattr(importlib.import_module(module), name, None), ModuleType) or (
            importlib.util.find_spec(f"{module}.{name}") is not None
        ):
            return f"{module}.{name}"
    return f"{module}:{name}"


def _followed(target: str, names: Iterable[str]) -> str:
    """Follow attributes from module to module and into classes; an attribute of another value belongs to that value."""
    for name in names:
        if ":" not in target:
            target = _joined(target, name)
        elif signature_of(target).startswith(("(", "class")) and signature_of(f"{target}.{name}") != MISSING:
            target = f"{target}.{name}"
        else:
            break
    return target


def names_of(package: str) -> list[str]:
    """Return the targets of a package that the plugin's source names."""
    root = _ROOTS.get(package, package)
    found = set(ON_OBJECTS[package])
    for path in _files(package):
        tree = ast.parse(path.read_text())
        found |= Names(tree, root).found
    with_te = package == "transformer-engine"
    return sorted(target for target in found if target.startswith(_NEED_TE) == with_te)


def _files(package: str) -> Iterator[Path]:
    yield _ROOT / "patching.py"
    for folder in SOURCES[package]:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            if not set(path.relative_to(_ROOT / folder).parts) & set(_EMULATION):
                yield path


def table(package: str) -> Mapping[str, object]:
    """Return the table of an installed package; a name that is missing in it is our error."""
    signatures = {target: signature_of(target) for target in names_of(package)}
    missing = [target for target, signature in signatures.items() if signature == MISSING]
    assert not missing, f"{package} has no {missing}"
    found = {"version": importlib.metadata.version(package), "signatures": signatures}
    return found | ({"patched": PATCHED[package]} if package in PATCHED else {})


def written(package: str) -> str:
    """Return the content of a package's file."""
    return json.dumps(table(package), indent=1) + "\n"


def main(folder: str) -> None:
    """Write all tables, under the CPU emulation where there is no GPU."""
    with contextlib.redirect_stdout(io.StringIO()):
        cpu_emulation.install(cpu_emulation.ON, ["--transformer-impl", "transformer_engine"])
        contents = {package: written(package) for package in SOURCES}
    for package, content in contents.items():
        (Path(folder) / table_of(package).name).write_text(content)


if __name__ == "__main__":
    main(sys.argv[1])
