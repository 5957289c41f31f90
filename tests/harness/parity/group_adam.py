"""An Adam that counts its steps as TransformerEngine's and NVIDIA apex's do, for machines that have neither.

Both count once for all parameters of a group, in the options of the group, and apex's does not count in a group without
parameters on this rank (`transformer_engine/pytorch/optimizers/fused_adam.py`, `apex/optimizers/fused_adam.py`). Their
kernels need a GPU; the arithmetic here is torch's. Megatron and the plugin take it for TransformerEngine's.
"""

from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """With weight decay that is decoupled, or not."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert not capturable, "it is for CUDA graphs"
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._decoupled = adam_w_mode

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every group that has parameters."""
        assert closure is None, "Megatron gives none"
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.multi_tensor_adam(parameter, group)

    def multi_tensor_adam(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> None:
        """Return the group of a parameter here."""
        state, (beta, beta_sq), decay = self.state[parameter], group["betas"], group["weight_decay"]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        gradient = parameter.grad if self._decoupled else parameter.grad + decay * parameter
        state["exp_avg"].lerp_(gradient, 1 - beta)
        state["exp_avg_sq"].mul_(beta_sq).addcmul_(gradient, gradient, value=1 - beta_sq)
        if self._decoupled:
            parameter.mul_(1 - group["lr"] * decay)
        root = (state["exp_avg_sq"] / (1 - beta_sq ** group["step"])).sqrt_().add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta ** group["step"]))


FusedAdam.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"


def install() -> None:
    """Have Megatron build it, before it builds an optimizer."""
    from megatron.core import optimizer  # noqa: PLC0415  (only ranks know Megatron)
    from megatron.core.optimizer import distrib_optimizer  # noqa: PLC0415

    attributes: dict[Any, dict[str, Any]] = {
        optimizer: {"Adam": FusedAdam, "USING_PYTORCH_OPTIMIZER": False},
        distrib_optimizer: {"Adam": FusedAdam, "HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True},
    }
    for module, names in attributes.items():
        for name, value in names.items():
            assert hasattr(module, name), "Megatron says by these which Adam there is"
            setattr(module, name, value)
