"""Train a hybrid model with Megatron: attention and MLP layers in any order.

Two replicas of TP 4, the second without one slot, so 7 processes. About half a minute on CPU:

  NTP_CPU=1 OMP_NUM_THREADS=1 torchrun --nproc-per-node=7 -m ntp_plugin.megatron recipes/megatron/pretrain_hybrid.py \\
      @recipes/megatron/tiny.args --hybrid-layer-pattern "*-*-" --tensor-model-parallel-size 4 \\
      --ntp-enable --ntp-lost r1.s0.t3

In the pattern `*` is an attention layer and `-` an MLP. Megatron's other layers (Mamba, experts) are refused while a
replica is degraded. You see Megatron's own log. With 8 processes and without the last two words the losses are the
same, except for the last digits.
"""

import dataclasses
import sys
from typing import Any

from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import pretrain
from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from pretrain_gpt import datasets, forward_step, read_files


def local_stack(args: Any) -> ModuleSpec:
    """Return Megatron's local layers; its default names TransformerEngine's."""
    both = get_gpt_layer_local_submodules(normalization=args.normalization, qk_layernorm=args.qk_layernorm)
    attention = dataclasses.replace(both, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
    mlp = dataclasses.replace(both, input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp)
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        ),
    )


def main() -> None:
    """Train as the arguments say."""
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    model = hybrid_config_from_args(args)
    if args.transformer_impl == "local" and args.spec is None:
        model.hybrid_stack_spec = local_stack(args)
    pretrain(pretrain_cfg_container_from_args(args, model), datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    sys.argv[1:] = read_files(sys.argv[1:])
    main()
