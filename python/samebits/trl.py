"""A callback that stops a run of TRL when sampling and training are no longer one distribution.

    trainer = GRPOTrainer(.., callbacks=[samebits.trl.StopOnMismatch()])

TRL logs how far the log-probabilities of its sampler are from those that it trains with, where `vllm_importance_sampling_correction` is
on: `sampling/sampling_logp_difference/max` and `/mean`. By default one that is not 0 stops the run; with `gate` it is what a gate
of contract/mismatch.toml says of `max_dlogp` and `mean_dlogp`.
"""

from __future__ import annotations

from typing import Any

import transformers

from . import _native

# What TRL logs, by the metric that it is.
_LOGGED = {
    "max_dlogp": "sampling/sampling_logp_difference/max",
    "mean_dlogp": "sampling/sampling_logp_difference/mean",
}


class Mismatched(RuntimeError):
    """Sampling and training are not one distribution."""


class StopOnMismatch(transformers.TrainerCallback):
    """Raises `Mismatched` at the first step whose logged difference is beyond `gate` ("bitwise": not 0) for models in `dtype`, and
    ValueError where TRL logs no difference: nothing would be judged.
    """

    def __init__(self, gate: str = "bitwise", dtype: str = "bf16") -> None:
        found = [line for line in _native.thresholds(dtype) if line[0] == gate]
        # Bits that are the same have a difference of 0.
        self.most = {"max_dlogp": 0.0} if gate == "bitwise" else {metric: most for _, metric, most in found if metric in _LOGGED}
        if not self.most:
            raise ValueError(f"gate {gate}: has no threshold for what TRL logs ({', '.join(_LOGGED)}) of models in {dtype}")
        self.gate = gate

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        logs = logs or {}
        # Evaluation and the end of a run log other things.
        if "loss" not in logs:
            return
        for metric, most in self.most.items():
            if _LOGGED[metric] not in logs:
                raise ValueError(
                    f"StopOnMismatch: step {state.global_step} logs no `{_LOGGED[metric]}`; let the sampler give log-probabilities "
                    "(use_vllm=True and vllm_importance_sampling_correction=True)"
                )
            value = float(logs[_LOGGED[metric]])
            if not value <= most:
                raise Mismatched(
                    f"step {state.global_step}: {_LOGGED[metric]} is {value:g}; gate {self.gate} lets it be {most:g} at most. Records of the "
                    "step tell more: python -m samebits.adapters trl, and samebits score --report"
                )
