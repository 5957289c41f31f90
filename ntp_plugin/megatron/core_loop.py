"""`elastic`: the function by which a hand-written loop over megatron.core joins a job of `ntp run`.

    with elastic(config, build, forward_step, data, vocab_size=128, ...) as job:
        while job.steps_done < 1000:
            losses = job.step()

The model, the forward step, the samples and the loop are the script's. What a recovery has to make again is not: the
model is built by the script's own function, once at the start and again for the sizes of another layout; DDP, the
optimizer, the schedule and the order of samples come from Megatron's own functions, by the same arguments. So the live
job below is the one that Megatron's own `pretrain` has (`live/`), and a step is Megatron's `train_step`.

Megatron keeps what these functions need in its arguments. Here they are parsed from `flags` alone; then the script's
configurations overwrite all that they have in common with them.
"""

import argparse
import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ntp_plugin.errors import ConfigError, Refused, in_one_line
from ntp_plugin.megatron import activation
from ntp_plugin.recovery.rank_context import RankContext

type ForwardStep = Callable[[Iterator[Any], Any], tuple[torch.Tensor, Callable[..., Any]]]
"""Megatron's `forward_step_func(data_iterator, model)`: the output and the function that computes the loss from it."""

_DEFAULTS = ("--lr-decay-style", "constant", "--train-iters", "1000000000", "--eval-iters", "0", "--num-workers", "0")
"""Of Megatron's flags, where the script gives no others: a constant rate, and no end but the script's own."""
_RENAMED = {
    "gated_linear_unit": "swiglu",
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
"""A field of a configuration -> Megatron's argument for it, where their names differ."""
_LAYERS = "transformer_impl"
"""What the flags alone say: `build` chooses the layers, whatever a configuration has by default."""
_BUILT_WITH = ("use_cpu_initialization", "init_model_with_meta_device", "perform_initialization")
"""What a rebuild changes in Megatron's arguments, for which `pretrain` makes a new configuration."""


class BuildCoreModel(Protocol):
    """Builds this rank's part of the model."""

    def __call__(self, config: Any, *, pre_process: bool, post_process: bool) -> torch.nn.Module:
        """Build it with this configuration, which has the sizes of the script's own.

        Args:
            config: A copy of the `TransformerConfig` that was given to `elastic`.
            pre_process: Whether this stage has the embedding.
            post_process: Whether this stage has the output layer.
        """


class SamplesByNumber(Protocol):
    """Samples by their number, as a `torch.utils.data.Dataset` has them."""

    def __getitem__(self, number: int, /) -> Any: ...

    def __len__(self) -> int: ...


class ElasticCoreLoop:
    """One rank of a job whose loop is the script's own. `elastic` makes it."""

    def __init__(self, args: Any, built: tuple[Any, ...], samples: Iterator[Any], forward_step: ForwardStep) -> None:
        from megatron.training import training  # noqa: PLC0415  (it imports the rest of Megatron)

        self._args, self._training, self._samples, self._forward_step = args, training, samples, forward_step
        self._chunks, self.optimizer, self.scheduler = built
        self._run = training.get_forward_backward_func()

    @property
    def steps_done(self) -> int:
        """Training steps that the job has done; a rank that joins late counts those of the others."""
        return int(self._args.iteration)

    @property
    def model(self) -> Any:
        """This rank's part of the model, in Megatron's DDP. It stays the same object, with other sizes after a loss."""
        return self._chunks[0]

    def step(self) -> dict[str, float]:
        """Take one training step. If a rank is lost during it, the others recover and take the step again.

        Returns:
            The means over the global batch of what the loss function reports; empty but on the last pipeline stage.

        Raises:
            StateLost: No live rank and no copy holds some of the state of a lost one.
            BelowMinimum: No replica is left that may train.
            NotFinite: The step has no finite result.
        """
        args, model = self._args, self._chunks
        args.curr_iteration = args.iteration
        losses, *_ = self._training.train_step(
            self._forward_step,
            self._samples,
            model,
            self.optimizer,
            self.scheduler,
            model[0].config,
            self._run,
            iteration=args.iteration,
        )
        args.iteration = args.curr_iteration + 1  # a rank that has joined in this step counts with the others now
        args.consumed_train_samples += args.global_batch_size
        return {name: float(torch.as_tensor(loss)) for name, loss in losses.items()}


@contextlib.contextmanager
def elastic(
    config: Any,
    build: BuildCoreModel,
    forward_step: ForwardStep,
    data: SamplesByNumber,
    *,
    vocab_size: int,
    seq_length: int,
    micro_batch_size: int,
    global_batch_size: int,
    optimizer: Any = None,
    flags: Sequence[str] = (),
) -> Iterator[ElasticCoreLoop]:
    """Join the job that `ntp run` started, with a loop over megatron.core of your own. Use it in a `with` statement.

    It makes the process groups, builds the model by `build`, wraps it in Megatron's DDP, and builds the optimizer and
    the schedule. When a rank is lost, the others go on at a smaller tensor-parallel width, as a job of Megatron's own
    `pretrain` does.

    Args:
        config: The `TransformerConfig` of the model. Its `tensor_model_parallel_size` and
            `pipeline_model_parallel_size` are the layout of a replica; all other ranks are replicas.
        build: `build(config, pre_process=..., post_process=...)` returns this rank's part of a `GPTModel`. It is called
            again after a loss, on the meta device, so it must build the same model each time and draw its weights only
            where Megatron's layers do.
        forward_step: Megatron's `forward_step_func(data_iterator, model)`. The iterator yields micro-batches, and on
            every slot of a TP group the same ones.
        data: Samples by their number. Step `s` consumes the next `global_batch_size` of them; after the last comes the
            first.
        vocab_size: Rows of the model's embedding.
        seq_length: Tokens of a sample.
        micro_batch_size: Samples of a micro-batch.
        global_batch_size: Samples of a step.
        optimizer: Megatron's `OptimizerConfig`. Without it the flags say which optimizer.
        flags: Megatron's own flags for what no configuration says (`--lr-warmup-iters`, `--overlap-grad-reduce`), and
            those of the plugin (`--ntp-copies-mode`). `--ntp-enable` is implied.

    Yields:
        The job, on which the script calls `step`.

    Raises:
        ConfigError: `ntp run` did not start this process, or a flag is wrong.
        Refused: The job would not survive a loss with these settings, or Megatron is set up already.

    Examples:
        ```python
        from ntp_plugin.megatron import elastic

        with elastic(
            config, build, forward_step, data, vocab_size=128, seq_length=64, micro_batch_size=1, global_batch_size=8
        ) as job:
            while job.steps_done < 1000:
                losses = job.step()
        ```
    """
    sys.excepthook = in_one_line(sys.excepthook)
    _require_elastic(config)
    sizes = {
        "padded_vocab_size": vocab_size,
        "vocab_size": vocab_size,
        "seq_length": seq_length,
        "max_position_embeddings": seq_length,
        "micro_batch_size": micro_batch_size,
        "global_batch_size": global_batch_size,
        "_is_global_batch_size_explicitly_specified": True,
    }
    args = _begin(config, optimizer, flags, sizes)
    from ntp_plugin.megatron.live import start  # noqa: PLC0415  (it imports the rest of Megatron)

    job = start.Jobs.now
    assert job is not None, "validated arguments have begun it"
    built = _build(args, config, build)
    samples = _iterate(data)
    job.begin_sections()
    yield ElasticCoreLoop(args, built, samples, forward_step)
    job.end_sections()
    activation.end()


def _require_elastic(config: Any) -> None:
    if not RankContext.is_elastic():
        raise ConfigError(
            "ntp_plugin.megatron.elastic() in a process that `ntp run` did not start",
            fix="ntp run takes torchrun's flags: ntp run --nproc-per-node 4 train.py ...",
        )
    if torch.distributed.is_initialized():
        raise Refused(
            "ntp_plugin.megatron.elastic() is called too late: the process group is made",
            fix="leave torch.distributed.init_process_group and parallel_state.initialize_model_parallel to elastic()",
        )
    if config.virtual_pipeline_model_parallel_size is not None:
        raise Refused(
            "ntp_plugin.megatron.elastic() with virtual pipeline stages, which is not built",
            fix="leave virtual_pipeline_model_parallel_size out, or train with Megatron's pretrain",
        )


def _begin(config: Any, optimizer: Any, flags: Sequence[str], sizes: Mapping[str, Any]) -> Any:
    """Set Megatron up as `pretrain` does, and return its arguments."""
    activation.install()
    from megatron.training import arguments, global_vars, initialize  # noqa: PLC0415  (the flags come first)

    words = sys.argv
    sys.argv = [words[0], *_DEFAULTS, *flags, "--ntp-enable"]
    try:
        args = arguments.parse_args()
    finally:
        sys.argv = words
    named = _named(flags, arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    for one in (config, optimizer):
        _overwrite(args, one, named)
    args.group_query_attention = args.num_query_groups not in (None, args.num_attention_heads)
    vars(args).update(sizes)
    _refuse_what_is_not_built(args)
    arguments.validate_args(args)
    global_vars.set_global_variables(args, build_tokenizer=False)
    initialize.initialize_megatron()
    return args


_NOT_BUILT = {
    "load": "a loop would begin at the step of a checkpoint, which nobody has tried",
    "save": "the loop decides when to save, and has no way to do so in all layouts",
    "overlap_param_gather": "Megatron's own loop switches it on after the first step",
    "step_batch_size_schedule": "the loop counts samples by one global batch size",
}
"""Of Megatron's arguments, what only `pretrain` does, and why a loop of the script's own does not have it."""


def _refuse_what_is_not_built(args: Any) -> None:
    for name, why in _NOT_BUILT.items():
        if getattr(args, name):
            raise Refused(
                f"--{name.replace('_', '-')} with ntp_plugin.megatron.elastic(): {why}",
                fix="leave it out, or train with Megatron's pretrain",
            )


def _named(flags: Sequence[str], parser: argparse.ArgumentParser) -> frozenset[str]:
    """Return the arguments that the script's flags set."""
    options, words = parser._option_string_actions, [flag.partition("=")[0] for flag in flags]
    return frozenset(options[word].dest for word in words if word in options)


def _overwrite(args: Any, configuration: Any, named: Collection[str]) -> None:
    """Give the arguments what a configuration says; one that says nothing of a field leaves the flag's value."""
    for field in dataclasses.fields(configuration) if configuration is not None else ():
        name, value = _RENAMED.get(field.name, field.name), getattr(configuration, field.name)
        if value is None or name == _LAYERS or not hasattr(args, name):
            continue
        if name in named and value != getattr(args, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} is given, and {type(configuration).__name__}.{field.name} is {value!r}",
                fix=f"set it in the {type(configuration).__name__} alone",
            )
        setattr(args, name, value)


def _build(args: Any, config: Any, build: BuildCoreModel) -> tuple[Any, ...]:
    from megatron.core.enums import ModelType  # noqa: PLC0415
    from megatron.training import training  # noqa: PLC0415

    from ntp_plugin.megatron.live.model_rebuild import stages_in_config  # noqa: PLC0415

    def provide(pre_process: bool = True, post_process: bool = True, **_: Any) -> torch.nn.Module:
        fresh = copy.copy(config)
        for name in _BUILT_WITH:
            setattr(fresh, name, getattr(args, name))
        vars(fresh).update(stages_in_config(args))
        return build(fresh, pre_process=pre_process, post_process=post_process)

    chunks, optimizer, scheduler = training.setup_model_and_optimizer(ModelType.encoder_or_decoder, provide)
    args.curr_iteration = args.iteration
    model_config = chunks[0].config
    model_config.grad_scale_func = optimizer.scale_loss
    model_config.finalize_model_grads_func = training.finalize_model_grads
    if args.overlap_grad_reduce:
        model_config.no_sync_func = chunks[0].no_sync
    return chunks, optimizer, scheduler


class _Repeated(torch.utils.data.Dataset[Any]):
    """Samples without an end: after the last comes the first."""

    def __init__(self, data: SamplesByNumber) -> None:
        self._data = data

    def __getitem__(self, number: int) -> Any:
        return self._data[number % len(self._data)]

    def __len__(self) -> int:
        return sys.maxsize


def _iterate(data: SamplesByNumber) -> Iterator[Any]:
    """Return an iterator over micro-batches that a recovery can rewind."""
    from megatron.core.rerun_state_machine import RerunDataIterator  # noqa: PLC0415
    from megatron.training import training  # noqa: PLC0415

    sets = (_Repeated(data), None, None)
    training.build_train_valid_test_datasets(lambda _: sets, (sys.maxsize, 0, 0))
    iterator: Iterator[Any] = RerunDataIterator(iter(training.build_pretraining_data_loader(sets[0], 0)))
    return iterator
