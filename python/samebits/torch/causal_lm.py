"""`CausalLM`: a language model of a Hugging Face folder as a module with gradients; losses, and AdamW with f32 weights.

A step of these is a step of `samebits train`, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from typing import Any, Callable, Iterable, Mapping, Sequence

import torch
from torch.autograd.function import once_differentiable

from .. import _native
from .. import ops as _ops
from ..engine import Sample, comparable, config_beside, config_of, divisor, name_passed, settings_of, state_of, tensors_of
from ..experts import Place, by_folder, places

__all__ = ["AdamW", "CausalLM", "nll", "policy_loss", "sha256"]


class CausalLM(torch.nn.Module):
    """A model of a Hugging Face folder, of every family that `samebits forward` runs; its parameters have their names there.

        model = samebits.torch.CausalLM.from_pretrained("model-folder")
        logprob = model.logprob([[1, 4, 5, 13], [1, 6]])
        loss, per_sequence = samebits.torch.nll(logprob, count, denominator=4)
        loss.backward()

    Parameters are f32; what a forward reads is parameters rounded once to `dtype` ("bf16", "fp16" or "fp32"). Forward and
    gradient are those of `samebits grad`: log-probabilities have the bits of `samebits.Engine` and `samebits rollout` at
    the same temperature with these weights. `micro_batch` sequences of a call share a forward (all of them without it) and with
    `recompute` layers are run again for the reverse pass instead of kept; neither moves a bit, nor do padding, and threads.

    `tensors` is a state dictionary or a module, `config` a folder, a dictionary or a config of transformers, by default the module's.
    Parameters keep the names that tensors came with, those of folders or of modules of transformers 5, where experts of a layer are
    one: so do `.grad` and `state_dict`. What is added in the order of names (the norm of `AdamW`, `sha256`) has the names of folders
    in both, and `load_state_dict` takes both.

    `rope_length` is that of `samebits.Engine`: without it the one that the folder was trained at, and a text that is longer is
    refused. What is passed by of a folder is named once, in a warning; with `strict` it is refused.

    A log-probability, a logit or a gradient that is not finite although weights and gradients given are is a ValueError, which
    names the layer, the op, the sequence and the token where it began; with `allow_nonfinite` it comes out as it is.

    `adapter` is a folder of PEFT, a low-rank adapter beside the model: its matrices, f32 under the names of that folder, are the
    parameters then, and the weights of the model buffers that have no gradient. Or it is several folders by name: sequences of one
    batch may have different ones, or none (`logprob(.., adapter=[..])`; samples say theirs), and parameters are called `NAME/..`.

    One backward call is one whole logical batch, unless it stands inside `accumulate`.
    """

    def __init__(
        self,
        tensors: Any,
        config: Any = None,
        *,
        dtype: str = "bf16",
        micro_batch: int | None = None,
        recompute: bool = False,
        rope_length: int | None = None,
        adapter: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]] | None = None,
        allow_nonfinite: bool = False,
        strict: bool = False,
    ) -> None:
        super().__init__()
        self.dtype, self.micro_batch, self.recompute, self.allow_nonfinite = dtype, micro_batch, recompute, allow_nonfinite
        text, self._folder = config_of(config_beside(tensors, config))
        tensors = {name: torch.as_tensor(tensor).detach() for name, tensor in state_of(tensors).items()}
        self._family = _native.family(text, self._folder)
        beside = adapter if isinstance(adapter, Mapping) else {} if adapter is None else {"adapter": adapter}
        beside = [(name, os.fspath(place)) for name, place in beside.items()]
        self._native = _native.Model(tensors_of(tensors, self._family), dtype, text, self._folder, rope_length, beside)
        name_passed(self._native.passed(), self._folder, strict)
        self.rope_length, self._depends = self._native.rope_length()
        if text is None:
            text = _native.config_text(self._folder)
        self.config: dict[str, Any] = json.loads(text)
        whose = {of: name for name in tensors for of, _ in places(name, tensors, self._family)}
        self._names = list(dict.fromkeys(whose[of] for of in self._native.parameters()))
        constants = list(dict.fromkeys(whose[of] for of in self._native.constants()))
        # Of each tensor those of a folder that stand in it.
        self._places = {name: places(name, tensors, self._family) for name in (*self._names, *constants)}
        # Of each adapter its name, what its config says, and its parameters by the names of its folder.
        self._adapters: list[tuple[str, str, dict[str, str]]] = []
        if adapters := self._native.adapters():
            constants, self._names = [*self._names, *constants], []
        for called, own, text in adapters:
            prefix = f"{called}/" if len(adapters) > 1 else ""
            self._adapters.append((called, text, {of: f"{prefix}{of}" for of in own}))
            self._names += (names := self._adapters[-1][2].values())
            self._places |= {name: [(name, ())] for name in names}
            tensors |= {f"{prefix}{of}": tensor.torch() for of, tensor in own.items()}
        for name in self._names:
            self._put(name, torch.nn.Parameter(tensors[name].to(torch.float32, copy=True).contiguous()))
        for name in constants:
            self._put(name, tensors[name].to(torch.float32, copy=True).contiguous())
        self._sums: accumulate | None = None
        # How many choices of routers the last call of `logprob` found to be others than recorded, and of how many.
        self.flips: tuple[int, int] | None = None

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], **how: Any) -> CausalLM:
        """The model of a folder; `how` is what `CausalLM` takes by name."""
        tensors = {name: tensor.torch() for name, tensor in _native.read_folder(os.fspath(folder)).items()}
        return cls(tensors, folder, **how)

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        *path, last = name.split(".")
        module: torch.nn.Module = self
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        if isinstance(tensor, torch.nn.Parameter):
            module.register_parameter(last, tensor)
        else:
            module.register_buffer(last, tensor)

    def _weights(self) -> list[torch.Tensor]:
        """The parameters by name, and the weights that a forward reads brought up to them."""
        state, named = self.state_dict(), dict(self.named_parameters())
        if any(tensor.dtype != torch.float32 or tensor.device.type != "cpu" for tensor in state.values()):
            raise NotImplementedError("CausalLM: its parameters are f32 on the processor; what forwards read is `dtype`")
        for called, _, names in self._adapters:
            self._native.refresh({of: state.pop(name).contiguous() for of, name in names.items()}, called)
        self._native.refresh(tensors_of(state, self._family))
        return [named[name] for name in self._names]

    def _gradients(self, found: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """By the names of parameters, of gradients by those of folders."""
        return {name: _whole(self._places[name], lambda of: found[of].torch()) for name in self._names}

    def logprob(
        self,
        tokens: Any,
        mask: torch.Tensor | None = None,
        *,
        temperature: float | None = None,
        sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        prompt: Sequence[int] | None = None,
        experts: Any = None,
        replay_experts: bool = False,
        adapter: Any = ...,
        sampling_mask: Sequence[Sequence[Sequence[int]] | None] | None = None,
    ) -> torch.Tensor:
        """The log-probability of each token, given those before it: f32, with gradients.

        Logits are divided by `temperature`, 1 without it (0, where the likeliest tokens were taken, counts as 1). `tokens` may be a
        list of samples of an `Engine`: prompts and tokens, each in the distribution that it was sampled from; another
        `temperature`, dtype or rope length is refused. Else it is a list of sequences, or a tensor `[B,T]` of whole numbers whose
        `mask[B,T]` is 1 for the tokens of a sequence, one behind the other, and 0 for padding. They too may have been sampled of
        some of the tokens: `sampling` has the settings of `Engine.stream` (`{"top_p": 0.9}`), of all of them or a list of those of
        each, and `prompt[B]` how many tokens of each were given and not sampled. Gives `[B,T]`, of a list `[B, longest]`: 0 for the
        first token of a sequence and for padding, whatever stands there. A token that its settings leave out is a ValueError
        that names it; where no gradient is asked for, and with `allow_nonfinite`, it has -inf.

        `experts` are those that somebody recorded of the tokens, of each sequence integers `[tokens, layers, chosen]` as samples have
        them, with or without a last token, or beside a tensor of tokens `[B,T,layers,chosen]`: `flips` says afterwards in how many
        choices the routers differ, and of how many. With `replay_experts` those are chosen, with weights of the routers' own scores,
        and the routers' gradient goes through them.

        `adapter` is the name of one of the model's, None for the model without, or a list with one for each sequence; without it all
        have the only one, and samples theirs.

        `sampling_mask` is what engines record as one: of each sequence a list for each token behind its prompt, the tokens that it was
        drawn from (or None for a sequence without). They stand in the place of what top-k, top-p and min-p leave.
        """
        samples = [one for one in tokens if isinstance(one, Sample)] if isinstance(tokens, (list, tuple)) else []
        if samples:
            if len(samples) != len(tokens):
                raise ValueError("tokens: samples and other sequences are mixed; give one kind")
            if sampling is not None or prompt is not None:
                raise ValueError("sampling and prompt: samples say both themselves; leave them out")
            comparable(samples, "the model", self.dtype, self.rope_length if self._depends else None, temperature)
            if adapter is ...:
                adapter = self._adapters_of(samples)
            tokens = [sample.prompt_tokens + [int(token) for token in sample.tokens] for sample in samples]
            sampling = [{**sample.sampling, "temperature": sample.temperature} for sample in samples]
            prompt = [len(sample.prompt_tokens) for sample in samples]
            experts = [sample.experts for sample in samples] if experts is None and any(s.experts is not None for s in samples) else experts
        placed = _Placed(tokens, mask)
        if replay_experts and experts is None:
            raise ValueError("replay_experts: there are no `experts`; samples have them where the engine recorded them")
        recorded = None if experts is None else placed.experts(experts, replay_experts)
        at = 1.0 if temperature is None else temperature
        drawn = _drawn(placed.sequences, at, sampling, prompt, recorded, adapter, sampling_mask)
        weights = self._weights()
        of = self.micro_batch or max(len(placed.sequences), 1)
        if not (torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)):
            found, self.flips = self._native.logprobs(placed.sequences, drawn, of, self.allow_nonfinite)
            return placed.out(found.torch())
        if all(weight.requires_grad for weight in weights):
            return placed.out(_Logprob.apply(self, placed.sequences, drawn, bool(samples), of, *weights))
        frozen = next(name for name, weight in zip(self._names, weights) if not weight.requires_grad)
        raise NotImplementedError(f"logprob: `{frozen}` requires no gradient; all parameters do, or none")

    def adapter_state(self, name: str) -> dict[str, torch.Tensor]:
        """The parameters of an adapter by the names of its folder: of the only one whatever it is called, of several of the one of this
        name."""
        found = [names for called, _, names in self._adapters if len(self._adapters) == 1 or called == name]
        if not found:
            raise ValueError(f"adapter: the model has none called `{name}`")
        named = dict(self.named_parameters())
        return {of: named[parameter] for of, parameter in found[0].items()}

    def _adapters_of(self, samples: Sequence[Sample]) -> Any:
        """The adapter of each sample, for `logprob`: the only one of the model whatever it is called, or the one of its name."""
        known = [called for called, *_ in self._adapters]
        for sample in samples:
            if len(known) < 2 and (sample.adapter is None) != (not known):
                made, here = ("with", "none") if sample.adapter else ("without", "one")
                raise ValueError(f"adapter: sample {sample.sequence} was made {made} an adapter, the model has {here}; two are not compared")
            if len(known) > 1 and sample.adapter is not None and sample.adapter not in known:
                there = ", ".join(f"`{name}`" for name in known)
                raise ValueError(f"adapter: sample {sample.sequence} was made with `{sample.adapter}`, the model has {there}; two are not compared")
        return [sample.adapter for sample in samples] if len(known) > 1 else ...

    def forward(self, tokens: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits behind each token, `[B,T,V]` in f32, 0 for padding; `tokens` and `mask` as for `logprob`. They have no gradient:
        that is what `logprob` is for.
        """
        placed = _Placed(tokens, mask)
        weights = self._weights()
        logits = placed.out(self._native.logits(placed.sequences, self.allow_nonfinite).torch())
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
            return _Logits.apply(logits, *weights)
        return logits

    def accumulate(self, groups: int = 1, sequences: int | None = None, ranks: Any = None) -> accumulate:
        """Around all micro-batches of a step: `.grad` of every parameter has, when the block ends, the bits of one batch.

            with model.accumulate():
                for part in parts:                # in the order of the batch
                    loss(model.logprob(part)).backward()

        `groups`, a power of two, is how many groups the `sequences` of the batch are dealt to, as for `samebits grad`; it
        changes the bits. `ranks` is a group of processes of torch.distributed (True for all of them), each of which runs the
        sequences of `.mine`, the groups that are its own; every rank has the whole gradient then. How many ranks there are moves
        no bit.
        """
        return accumulate(self, groups, sequences, ranks)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of every module, by the names of folders or of modules; the table of a tied folder may stand there twice, and what blocks
        share under each of them."""
        tables, head = ("model.embed_tokens.weight", "transformer.wte.weight", "gpt_neox.embed_in.weight"), "lm_head.weight"
        table = next((state_dict[name] for name in tables if name in state_dict), None)
        if head in state_dict and head not in self._names and table is not None and torch.equal(state_dict[head], table):
            state_dict = {name: tensor for name, tensor in state_dict.items() if name != head}
        again = {name: first for name in state_dict if (first := self._native.shared_name(name)) in state_dict}
        again = {name for name, first in again.items() if torch.equal(state_dict[name], state_dict[first])}
        state_dict = {name: tensor for name, tensor in state_dict.items() if name not in again}
        given = by_folder(state_dict, self._family)
        state = {}
        for name, parts in self._places.items():
            if all(of in given for of, _ in parts):
                state[name] = state_dict[name] if name in state_dict else _whole(parts, given.__getitem__)
                given = {of: tensor for of, tensor in given.items() if of not in dict(parts)}
        # What is left belongs to none of them.
        state_dict = {**{name: t for name, t in state_dict.items() if any(of in given for of, _ in places(name, state_dict, self._family))}, **state}
        return super().load_state_dict(state_dict, strict, assign)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes a Hugging Face folder: what a forward reads, parameters in `dtype` and the rest in f32, and the other files of
        the folder that the model came from. Of an adapter a PEFT folder, of several one for each, of its name, as PEFT does.
        """
        folder = os.fspath(folder)
        os.makedirs(folder, exist_ok=True)
        parameters = {name: parameter.detach() for name, parameter in self.named_parameters()}
        for called, *_ in self._adapters if len(self._adapters) > 1 else []:
            if os.path.basename(called) != called or called in ("", ".", ".."):
                raise ValueError(f"save_pretrained: adapters are written into folders of their names, and `{called}` is none")
        for called, text, _ in self._adapters:
            there = os.path.join(folder, called) if len(self._adapters) > 1 else folder
            os.makedirs(there, exist_ok=True)
            adapter = {of: tensor.detach() for of, tensor in self.adapter_state(called).items()}
            _native.save(os.path.join(there, "adapter_model.safetensors"), adapter, {"format": "pt"})
            with open(os.path.join(there, "adapter_config.json"), "w", encoding="utf-8") as file:
                file.write(text)
        if self._adapters:
            return
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.dtype]
        tensors = {name: parameter.to(dtype) for name, parameter in parameters.items()}
        tensors = by_folder(tensors | dict(self.named_buffers()), self._family)
        _native.save(os.path.join(folder, "model.safetensors"), tensors, {"format": "pt"})
        config = dict(self.config)
        named = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[self.dtype]
        config |= {key: named for key in ("torch_dtype", "dtype") if key in config or (key == "dtype" and "torch_dtype" not in config)}
        # Matrices that were packed are written as what they expand to.
        config.pop("quantization_config", None)
        if isinstance(text := config.get("text_config"), dict):
            config["text_config"] = {field: value for field, value in text.items() if field != "quantization_config"}
        if self._depends:
            config["samebits_rope_length"] = self.rope_length
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file, indent=2)
        for name in () if self._folder is None else _native.folder_files(self._folder):
            if not os.path.exists(there := os.path.join(folder, name)):
                os.makedirs(os.path.dirname(there), exist_ok=True)
                shutil.copyfile(os.path.join(self._folder, name), there)


def _whole(parts: list[Place], tensor: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The tensor of a module whose parts a folder has."""
    if not parts[0][1]:
        return tensor(parts[0][0])
    if isinstance(parts[0][1][0], slice):
        return torch.cat([tensor(of) for of, _ in parts])
    experts: dict[int, list[torch.Tensor]] = {}
    for of, at in parts:
        experts.setdefault(at[0], []).append(tensor(of))
    return torch.stack([torch.cat(halves) for halves in experts.values()])


# Of a sequence: layers, experts chosen in each, all of them, and whether they are replayed.
_Recorded = tuple[int, int, list[int], bool] | None


# Of a sequence: its settings as JSON, among them its adapter; its prompt's length, its experts, and what its tokens were drawn from.
_Drawn = tuple[str, int, _Recorded, "list[list[int]] | None"]


def _drawn(
    sequences: list[list[int]],
    temperature: float,
    sampling: Any,
    prompt: Sequence[int] | None,
    experts: list[_Recorded] | None,
    adapter: Any = ...,
    masks: Any = None,
) -> float | list[_Drawn]:
    """What log-probabilities are those of: all tokens at a temperature, or something of each sequence."""
    if sampling is None:
        if prompt is not None and masks is None:
            raise ValueError("prompt: says where settings begin; give `sampling`, too")
        if masks is not None and prompt is None:
            raise ValueError("sampling_mask: give `prompt`, how many tokens of each sequence were not sampled")
        if experts is None and adapter is ... and masks is None:
            return divisor(temperature)
        sampling, prompt = {}, prompt or [1] * len(sequences)
    each = [sampling] * len(sequences) if isinstance(sampling, Mapping) else list(sampling)
    if prompt is None:
        raise ValueError("sampling: give `prompt`, how many tokens of each sequence were not sampled")
    adapters = adapter if isinstance(adapter, (list, tuple)) else [adapter] * len(sequences)
    masks = [None] * len(sequences) if masks is None else list(masks)
    for name, given in (("sampling", each), ("prompt", prompt), ("adapter", adapters), ("sampling_mask", masks)):
        if len(given) != len(sequences):
            raise ValueError(f"{name}: there are {len(given)} for {len(sequences)} sequences; give one for each")
    told = [settings_of(settings, temperature) for settings in each]
    found = [json.loads(settings) for settings in told]
    temperatures = {divisor(settings["temperature"]) for settings in found}
    is_plain = experts is None and adapter is ... and not any(mask is not None for mask in masks)
    if len(temperatures) == 1 and all(len(settings) == 1 for settings in found) and is_plain:
        return temperatures.pop()
    told = [text if own is ... else json.dumps({**settings, "adapter": own}) for text, settings, own in zip(told, found, adapters)]
    kept = [None if mask is None else [[int(token) for token in tokens] for tokens in mask] for mask in masks]
    return [(text, int(length), of, left) for text, length, of, left in zip(told, prompt, experts or [None] * len(told), kept)]


class _Placed:
    """Sequences, and where their tokens stand in a tensor."""

    def __init__(self, tokens: Any, mask: torch.Tensor | None) -> None:
        self.starts: list[int] | None = None
        if not isinstance(tokens, torch.Tensor):
            if mask is not None:
                raise ValueError("mask: a list of sequences has no padding; leave it out")
            self.sequences = [[int(token) for token in sequence] for sequence in tokens]
            return
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(f"tokens: {tokens.dtype} {list(tokens.shape)}; give whole numbers [B,T], or a list of sequences")
        mask = torch.ones_like(tokens) if mask is None else mask
        if mask.shape != tokens.shape:
            raise ValueError(f"mask: shape {list(mask.shape)} must be {list(tokens.shape)}")
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError("mask: holds more than 0 and 1; 1 is for tokens, 0 for padding (one that is added to scores is none)")
        self.shape, self.sequences, self.starts = tokens.shape, [], []
        for b, (row, here) in enumerate(zip(tokens.tolist(), (mask != 0).tolist())):
            count = sum(here)
            start = here.index(True) if count else 0
            if not all(here[start : start + count]):
                raise ValueError(f"mask: the tokens of sequence {b} do not stand one behind the other")
            self.sequences.append(row[start : start + count])
            self.starts.append(start)

    def experts(self, given: Any, replay: bool) -> list[_Recorded]:
        """Experts of each sequence, where they are given."""
        if len(given) != len(self.sequences):
            raise ValueError(f"experts: there are {len(given)} for {len(self.sequences)} sequences; give one for each")
        found: list[_Recorded] = []
        for b, of in enumerate(given):
            if of is None:
                found.append(None)
                continue
            of = torch.as_tensor(of)
            if of.dim() != 3 or of.is_floating_point():
                raise ValueError(f"experts: of sequence {b} {of.dtype} {list(of.shape)}; give whole numbers [tokens, layers, chosen]")
            if self.starts is not None and isinstance(given, torch.Tensor):
                of = of[self.starts[b] : self.starts[b] + len(self.sequences[b])]
            found.append((of.shape[1], of.shape[2], of.flatten().tolist(), replay))
        return found

    def out(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows[B, longest, ..]` where the tokens stand."""
        if self.starts is None or (not any(self.starts) and rows.shape[1] == self.shape[1]):
            return rows
        placed = rows.new_zeros(*self.shape, *rows.shape[2:])
        for b, (start, tokens) in enumerate(zip(self.starts, self.sequences)):
            placed[b, start : start + len(tokens)] = rows[b, : len(tokens)]
        return placed


def temperatures_of(drawn: float | list[_Drawn]) -> list[float]:
    """What logits are divided by, each once."""
    if isinstance(drawn, float):
        return [drawn]
    return sorted({divisor(json.loads(settings)["temperature"]) for settings, *_ in drawn})


class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, model, sequences, drawn, is_known, micro_batch, *weights):
        # For losses, which look for them: a temperature that samples say is known.
        ctx.temperatures, ctx.is_known = temperatures_of(drawn), is_known
        ctx.model, ctx.block = model, model._sums
        ctx.sums = _native.Accumulator() if ctx.block is None else ctx.block._native
        how = (drawn, micro_batch, model.recompute, model.allow_nonfinite)
        ctx.state, logprob, model.flips = ctx.sums.forward(model._native, sequences, *how)
        ctx.set_materialize_grads(False)
        return logprob.torch()

    @staticmethod
    @once_differentiable
    def backward(ctx, dlogprob):
        model, block = ctx.model, ctx.block
        nothing = (None,) * (5 + len(model._names))
        if dlogprob is None:
            return nothing
        if block is not model._sums:
            raise RuntimeError("accumulate: a forward of its block is gone back through outside of it")
        ctx.sums.reverse(ctx.state, dlogprob.contiguous())
        if block is not None:
            return nothing
        found = model._gradients(ctx.sums.finish(model._native))
        return (*(None,) * 5, *[found[name] for name in model._names])


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, *weights):
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx, dlogits):
        raise NotImplementedError("CausalLM: logits have no gradient; use logprob, which has")


class accumulate:
    """The block of `CausalLM.accumulate`."""

    def __init__(self, model: CausalLM, groups: int = 1, sequences: int | None = None, ranks: Any = None) -> None:
        self._model, self._ranks = model, None if ranks is True else ranks
        self._distributed = ranks is not None
        self._rank, self._count = 0, 1
        if self._distributed:
            import torch.distributed as dist

            self._rank, self._count = dist.get_rank(self._ranks), dist.get_world_size(self._ranks)
        self._native = _native.Accumulator(sequences, groups, self._rank, self._count)
        if sequences is not None:
            share = groups // self._count
            ends = (self._rank * share, (self._rank + 1) * share - 1)
            (first, _), (_, last) = (_native.sequences_of_group(sequences, groups, group) for group in ends)
            self.mine = range(first, last)

    def __enter__(self) -> accumulate:
        if self._model._sums is not None:
            raise RuntimeError("accumulate: a block is open already")
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                raise RuntimeError(f"accumulate: `{name}` has a gradient already; clear it first")
        self._model._sums = self
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        model = self._model
        model._sums = None
        if kind is not None:
            return
        if self._distributed:
            found = _native.join(model._native, self._gathered())
        else:
            found = self._native.finish(model._native)
        named = dict(model.named_parameters())
        for name, gradient in model._gradients(found).items():
            named[name].grad = gradient

    def _gathered(self) -> list[dict[str, torch.Tensor]]:
        """The sums of every rank, in their order. A name says which rows of a table a rank has looked up, so others may not have it."""
        import torch.distributed as dist

        own = {name: tensor.torch() for name, tensor in self._native.partial().items()}
        forms: list[Any] = [None] * self._count
        dist.all_gather_object(forms, {name: tuple(tensor.shape) for name, tensor in own.items()}, self._ranks)
        shapes = {name: shape for of_rank in forms for name, shape in of_rank.items()}
        ranks: list[dict[str, torch.Tensor]] = [{} for _ in forms]
        for name in sorted(shapes):
            mine = own[name] if name in own else torch.zeros(shapes[name])
            all_of_it = [torch.empty_like(mine) for _ in ranks]
            dist.all_gather(all_of_it, mine.contiguous(), self._ranks)
            for rank, form, tensor in zip(ranks, forms, all_of_it):
                if name in form:
                    rank[name] = tensor
        return ranks


# --- losses


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logprob, op, inputs, attributes, groups):
        per_sequence, dlogprob = getattr(_ops, op)(logprob, **inputs, **attributes)
        # Of log-probabilities that are finite where they count.
        finite = torch.isfinite(per_sequence) & torch.isfinite(dlogprob).all(-1)
        bad = ~finite & torch.isfinite(torch.where(inputs["count"] != 0, logprob, 0.0)).all(-1)
        if bad.any():
            b = int(bad.nonzero()[0])
            raise ValueError(f"{op}: not finite: sequence {b} is beyond f32; look whether old_logprob is of this model and these tokens")
        ctx.save_for_backward(dlogprob)
        ctx.mark_non_differentiable(per_sequence)
        loss = _ops.batch_loss(per_sequence, groups=groups, denominator=attributes["denominator"])
        return loss.reshape(()), per_sequence

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, _):
        (dlogprob,) = ctx.saved_tensors
        return dlogprob * dloss, None, None, None, None


def _loss(op: str, logprob: torch.Tensor, inputs: dict[str, Any], attributes: dict[str, Any], groups: int):
    count = inputs["count"]
    if not ((count == 0) | (count == 1)).all():
        raise ValueError(f"{op}: count holds more than 0 and 1; a token counts or does not, and weights are the loss's")
    for name, tensor in inputs.items():
        bad = None if tensor is None or name == "count" else ~torch.isfinite(tensor)
        if bad is not None and tensor.shape == count.shape:
            bad = bad & (count == 1)
        if bad is not None and bad.any():
            at = bad.nonzero()[0].tolist()
            raise ValueError(f"{op}: {name}: element {at} is {tensor[tuple(at)].item()}; where a token counts it must be finite")
    inputs["count"] = count if count.dtype == torch.int32 else count.to(torch.int32)
    attributes = {name: value for name, value in attributes.items() if value is not None}
    with torch.no_grad():
        inputs = {name: tensor.detach().contiguous() for name, tensor in inputs.items() if tensor is not None}
    return _Loss.apply(logprob.contiguous(), op, inputs, attributes, groups)


def nll(
    logprob: torch.Tensor, count: torch.Tensor, *, denominator: float, reduction: str | None = None, groups: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Minus the log-probabilities that count: the loss with its gradient, and what each sequence adds to it before it is
    divided.

    `logprob[B,T]` f32, `count[B,T]` 1 where a token counts, else 0. `denominator` is a number of the whole logical batch, most
    often how many of its tokens count: of a micro-batch it is the same. The loss of a batch in parts is
    `samebits.ops.batch_loss` of what all its sequences add.
    """
    return _loss("nll", logprob, {"count": count}, {"denominator": denominator, "reduction": reduction}, groups)


def _made_by(logprob: torch.Tensor) -> list[Any]:
    """The calls of `CausalLM.logprob` that a tensor was made by."""
    waiting, seen, found = [logprob.grad_fn], set(), []
    # What is made of log-probabilities before a loss is little; a whole model of torch is not gone through.
    while waiting and len(seen) < 1000:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "is_known"):
            found.append(node)
        else:
            waiting += [before for before, _ in node.next_functions]
    return found


def _same_temperature(logprob: torch.Tensor, temperature: float | None) -> None:
    """Refuses ratios of log-probabilities at two temperatures, and says what is taken where nothing is said."""
    for made in _made_by(logprob):
        here = " and ".join(f"{at:g}" for at in made.temperatures)
        if temperature is not None and made.temperatures != [divisor(temperature)]:
            raise ValueError(
                f"policy_loss: temperature: old_logprob is of {temperature:g}, logprob of {here}; ratios of two "
                f"temperatures are not compared: CausalLM.logprob(.., temperature={temperature:g})"
            )
        if temperature is None and not made.is_known:
            warnings.warn(
                f"policy_loss: at what temperature old_logprob was sampled is not said; that of logprob, {here}, is "
                "taken: give temperature=.., or samples to CausalLM.logprob",
                stacklevel=3,
            )


def policy_loss(
    logprob: torch.Tensor,
    old_logprob: torch.Tensor,
    advantage: torch.Tensor,
    count: torch.Tensor,
    *,
    denominator: float,
    low: float = 0.2,
    high: float = 0.2,
    reference: torch.Tensor | None = None,
    kl: str | None = None,
    beta: float | None = None,
    reduction: str | None = None,
    groups: int = 1,
    temperature: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped policy gradient loss of the op `policy_loss`: as `nll`, with `old_logprob[B,T]` and `advantage[B]` in f32, ratios
    between 1 - low and 1 + high, and a distance from `reference[B,T]` where `kl` ("k1", "k3") and `beta` ask for one.

    `temperature` is what old_logprob was sampled at. A logprob that `CausalLM` made at another one is a ValueError; without it, a
    warning says that that of logprob is taken, unless logprob was made of samples, which say it.
    """
    _same_temperature(logprob, temperature)
    # Other programs round theirs.
    if old_logprob.shape == count.shape and bool(((old_logprob > 0.01) & (count != 0)).any()):
        warnings.warn("policy_loss: old_logprob is above 0 where a token counts; are these probabilities or ratios?", stacklevel=2)
    inputs = {"old_logprob": old_logprob, "advantage": advantage, "count": count, "reference": reference}
    attributes = {"denominator": denominator, "low": low, "high": high, "kl": kl, "beta": beta, "reduction": reduction}
    return _loss("policy_loss", logprob, inputs, attributes, groups)


# --- the optimizer

# The elements of a block of the norm.
_BLOCK = 65536


class AdamW(torch.optim.Optimizer):
    """AdamW by the op `adamw`: f32 weights and moments, each step the bits of `samebits train`.

    `params` is a module or its named parameters: the norm of the gradient, which is cut to `max_norm` (not at all for None), adds
    the parameters in the order of their names. A parameter that is not f32 is the rounded form of f32 weights that the optimizer
    holds. `norm` is that of the last step before it was cut.

    Raises ValueError for a gradient that is not finite; nothing is changed then.
    """

    def __init__(
        self,
        params: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_norm: float | None = 1.0,
    ) -> None:
        named = list(params.named_parameters() if isinstance(params, torch.nn.Module) else params)
        if not all(isinstance(one, tuple) and isinstance(one[0], str) for one in named):
            raise TypeError("AdamW: give a module or named parameters; the norm is added in the order of names")
        named.sort(key=lambda one: one[0].encode())
        self._names = {id(parameter): name for name, parameter in named}
        # Of a CausalLM by the names of folders, which other tensors than its own may have.
        self._places = {id(parameter): _places(params, name) for name, parameter in named}
        self.max_norm, self.norm = max_norm, None
        super().__init__([p for _, p in named], {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step over the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        todo = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad.to(torch.float32).contiguous() for _, p in todo]
        if not todo:
            return loss
        parts = [(of, gradient[at]) for (_, p), gradient in zip(todo, gradients) for of, at in self._places.get(id(p), [("", ())])]
        if any(at for of in self._places.values() for _, at in of):
            parts.sort(key=lambda one: one[0].encode())
        sums = [_ops.square_sum(block) for _, part in parts for block in _blocks(part)]
        norm, factor = _ops.clip_factor(torch.cat(sums), max_norm=1.0 if self.max_norm is None else self.max_norm)
        if not torch.isfinite(norm):
            bad = next((p for (_, p), g in zip(todo, gradients) if not torch.isfinite(g).all()), None)
            where = "its norm" if bad is None else f"that of `{self._names.get(id(bad))}`"
            raise ValueError(f"AdamW: the gradient is not finite ({where}); nothing was changed")
        self.norm = norm.item()
        for (group, p), gradient in zip(todo, gradients):
            state = self.state[p]
            if not state:
                state["step"] = 0
                state["m"], state["v"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
                if p.dtype != torch.float32:
                    state["w"] = p.detach().to(torch.float32)
            weight = state.get("w", p).contiguous()
            beta1, beta2 = group["betas"]
            how = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "eps": group["eps"]}
            how |= {"weight_decay": group["weight_decay"], "step": state["step"] + 1, "dtype": p.dtype}
            if self.max_norm is not None:
                how["factor"] = factor
            w, state["m"], state["v"], rounded = _ops.adamw(weight.detach(), state["m"], state["v"], gradient, **how)
            state["step"] += 1
            if "w" in state:
                state["w"] = w
            p.copy_(rounded)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of every optimizer; weights and moments stay f32."""
        super().load_state_dict(state_dict)
        order = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for p, number in zip(order, numbers):
            for key, value in state_dict["state"].get(number, {}).items():
                self.state[p][key] = value.detach().clone() if isinstance(value, torch.Tensor) else value


def _places(model: Any, name: str) -> list[Place]:
    """By the names of folders, what a parameter holds."""
    return model._places[name] if isinstance(model, CausalLM) else [(name, ())]


def _blocks(gradient: torch.Tensor) -> list[torch.Tensor]:
    flat = gradient.reshape(-1)
    whole = flat.numel() // _BLOCK * _BLOCK
    parts = [flat[:whole].reshape(-1, _BLOCK), flat[whole:].reshape(1, -1)]
    return [part for part in parts if part.numel()]


def sha256(model: torch.nn.Module) -> str:
    """SHA-256 of all parameters: their elements in f32, little endian, in the order of their names; that of a line of
    `samebits train`.
    """
    digest = hashlib.sha256()
    parts = [(of, parameter[at]) for name, parameter in model.named_parameters() for of, at in _places(model, name)]
    for _, part in sorted(parts, key=lambda one: one[0].encode()):
        words = part.detach().to(torch.float32).contiguous().view(torch.int32)
        digest.update(words.numpy().astype("<i4", copy=False).tobytes())
    return digest.hexdigest()
