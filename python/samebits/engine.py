"""`samebits.Engine`: sampling with a paged cache and continuous batches, and log-probabilities that training finds again."""

from __future__ import annotations

import json
import math
import os
import threading
import warnings
from dataclasses import dataclass, field
from typing import Any, Iterator, Mapping, Sequence

from . import _native
from .experts import by_folder

__all__ = ["Engine", "Sample", "Stream", "Token"]


def state_of(state: Any) -> Mapping[str, Any]:
    """A state dictionary, or that of a module."""
    if isinstance(state, Mapping):
        return state
    if not hasattr(state, "state_dict"):
        raise TypeError(f"state: is a {type(state).__name__}; give a state dictionary or a module")
    return state.state_dict()


def tensors_of(state: Any, family: str) -> dict[str, Any]:
    """The tensors of a state dictionary or a module by the names of folders, each in row-major order."""
    tensors = by_folder(state_of(state), family)
    return {name: tensor.contiguous() if hasattr(tensor, "contiguous") else tensor for name, tensor in tensors.items()}


def config_beside(model: Any, config: Any) -> Any:
    """The config that was given, or else the model's own."""
    if config is None and (config := getattr(model, "config", None)) is None:
        raise ValueError("config: is missing; give a folder, a dictionary or a config beside the tensors")
    return config


def config_of(config: Any) -> tuple[str | None, str | None]:
    """The text of a config.json, or the folder that has it."""
    if config is None or isinstance(config, (str, os.PathLike)):
        return None, None if config is None else os.fspath(config)
    if hasattr(config, "to_json_string"):
        return config.to_json_string(use_diff=False), None
    return json.dumps(dict(config)), None


# Folders whose fields have been named.
_named: set[str] = set()


def name_passed(passed: list[str], folder: str | None, strict: bool) -> None:
    """Names once what was passed by of a folder, as the command does on stderr; `strict` refuses it."""
    if passed and strict:
        raise ValueError(f"strict: {'; '.join(passed)}")
    if passed and folder is not None and (place := os.path.realpath(folder)) not in _named:
        _named.add(place)
        warnings.warn("; ".join(passed), stacklevel=3)


def array(values: list[Any], dtype: str) -> Any:
    """As a numpy array, where there is numpy."""
    try:
        import numpy
    except ImportError:
        return values
    return numpy.array(values, dtype=dtype)


def narrow(layers: int, chosen: int, each: list[int]) -> Any:
    """Experts `[tokens, layers, chosen]` as the narrowest integers that hold them; without numpy as lists."""
    most = max(each, default=0)
    rows = [each[at : at + chosen] for at in range(0, len(each), chosen)]
    rows = [rows[at : at + layers] for at in range(0, len(rows), layers)]
    found = array(rows, "int8" if most < 128 else "int16" if most < 32768 else "int32")
    return found.reshape(-1, layers, chosen) if hasattr(found, "reshape") else found


@dataclass(frozen=True)
class Sample:
    """A text that has ended."""

    sequence: int
    """Its number: `first` + prompt times n + sample."""
    prompt: int
    """The number of its prompt."""
    prompt_tokens: list[int] = field(repr=False)
    """The tokens before it."""
    tokens: Any
    """Its tokens, what ended it included: int32."""
    logprobs: Any = field(repr=False)
    """The log-probability of each token in the distribution that it was sampled from (at a temperature of 0, that of 1): float32."""
    stop: str
    """Why it ended: "eos", "max_tokens", "max_positions", "stop_token", "stop_text", or "ended" from outside."""
    limit: int = field(repr=False)
    """Positions that it may come to hold."""
    version: int = field(repr=False)
    """The version of the weights that made all of it."""
    rope_length: int = field(repr=False)
    """The declared length of the engine that made it."""
    temperature: float = field(repr=False)
    """What logits were divided by; 0 where the likeliest tokens were taken."""
    dtype: str = field(repr=False)
    """That of the engine."""
    sampling: Mapping[str, Any] = field(repr=False, default_factory=dict)
    """How tokens were sampled beside the temperature: the settings of `Engine.stream` that were asked for."""
    adapter: str | None = field(repr=False, default=None)
    """The name of the adapter that it was made with."""
    adapter_sha256: str | None = field(repr=False, default=None)
    """SHA-256 of that adapter."""
    experts: Any = field(repr=False, default=None)
    """Where they are recorded, the experts of all tokens but the last, `[tokens - 1, mixtures, chosen]`: int8, int16 or int32."""


def _recorded(experts: Any) -> tuple[int, int, list[int], bool] | None:
    """Experts of a sample, which are counted and not replayed: layers, how many each chooses, and all of them."""
    return None if experts is None else (*experts.shape[1:], [int(one) for one in experts.flatten()], False)


def divisor(temperature: float) -> float:
    """What logits are divided by for log-probabilities: those of the likeliest tokens are those at 1."""
    return 1.0 if temperature == 0 else float(temperature)


def comparable(samples: Sequence[Sample], who: str, dtype: str, rope_length: int | None, temperature: float | None) -> None:
    """Refuses samples whose log-probabilities `who` would not find again: of another temperature, dtype or rope length."""
    for sample in samples:
        at, own = divisor(sample.temperature), None if temperature is None else divisor(temperature)
        found = [("temperature", at, own), ("dtype", sample.dtype, dtype), ("rope_length", sample.rope_length, rope_length)]
        for name, made, here in found:
            if here is not None and made != here:
                line = f"{name}: sample {sample.sequence} was made with {made}, {who} has {here}; two are not compared"
                raise ValueError(line)


# How tokens are sampled beside the temperature: what changes nothing.
_PLAIN: dict[str, Any] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "banned_tokens": [],
    "allowed_tokens": None,
}


def asked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings that change something, as JSON has them."""
    found: dict[str, Any] = {}
    for name, plain in _PLAIN.items():
        value = settings[name]
        if name == "logit_bias":
            value = {str(int(token)): float(bias) for token, bias in (value or {}).items()}
        elif name in ("banned_tokens", "allowed_tokens"):
            value = plain if value is None else [int(token) for token in value]
        else:
            value = int(value) if name == "top_k" else float(value)
        if value != plain:
            found[name] = value
    return found


def settings_of(given: Mapping[str, Any], temperature: float) -> str:
    """As JSON the settings of `Engine.stream` that some sequences were sampled by, at `temperature` where they say none."""
    if unknown := [name for name in given if name not in _PLAIN and name != "temperature"]:
        raise ValueError(f"sampling: `{unknown[0]}` is no setting of this version; use temperature, {', '.join(_PLAIN)}")
    return text_of({**asked({**_PLAIN, **given}), "temperature": float(given.get("temperature", temperature))})


def text_of(settings: Mapping[str, Any]) -> str:
    """Settings as JSON, which has no NaN and no infinity."""
    for name, value in settings.items():
        numbers = value.values() if isinstance(value, dict) else [value]
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise ValueError(f"{name}: is {value}; use finite numbers")
    return json.dumps(settings)


@dataclass(frozen=True)
class Token:
    """The next token of a text."""

    sequence: int
    token: int | None
    """None where a text ended without one."""
    logprob: float | None
    sample: Sample | None
    """The text, where this token ended it."""


class Stream(Iterator[Token]):
    """The tokens of a request as they are made. It ends its texts when it is closed or forgotten."""

    def __init__(
        self, engine: _native.Engine, request: int, prompts: list[list[int]], of: tuple[Any, ...], adapters: list[tuple[str | None, str | None]]
    ) -> None:
        self._engine, self._request, self._prompts, self._of, self._adapters = engine, request, prompts, of, adapters
        self._told: list[Token] = []
        self._open, self._process = True, os.getpid()

    def _sample(self, sequence: int, text: tuple) -> Sample:
        prompt, limit, tokens, logprobs, stop, experts = text
        of = self._prompts[prompt]
        made = array(tokens, "int32"), array(logprobs, "float32")
        experts = None if experts is None else narrow(*experts)
        return Sample(sequence, prompt, of, *made, stop, limit, *self._of, *self._adapters[prompt], experts)

    def __next__(self) -> Token:
        while not self._told:
            events = self._engine.next(self._request) if self._open else None
            if events is None:
                self._open = False
                raise StopIteration
            for sequence, following, text in reversed(events):
                token, logprob = following or (None, None)
                self._told.append(Token(sequence, token, logprob, text and self._sample(sequence, text)))
        return self._told.pop()

    def close(self) -> list[Sample]:
        """Ends the request: its texts that had begun and not ended, as they are."""
        if not self._open:
            return []
        self._open = False
        self._told.clear()
        return [self._sample(*one) for one in self._engine.end(self._request)]

    def __del__(self) -> None:
        if getattr(self, "_open", False) and self._process == os.getpid():
            self.close()


class Engine:
    """A model that samples texts: continuous batches over a paged cache.

        engine = samebits.Engine("model-folder")
        samples = engine.generate(["12+34="], n=4, temperature=1.0, seed=7)

    `model` is a Hugging Face folder, a state dictionary, or a module (`samebits.torch.CausalLM`, one of transformers); without a
    folder `config` is a folder, a dictionary as config.json has it, or a config of transformers, by default the module's. Tensors have
    the names of folders or those of modules of transformers 5, where experts of a layer are one; `update` takes both. Every parameter is rounded
    once to `dtype` ("bf16", "fp16" or "fp32"): what `CausalLM` reads, and where a folder holds nothing wider what it holds.

    A text depends on the weights, its prompt, its number, temperature and seed. `batch` (texts in a step), `chunk` (tokens of
    a prompt in a step), `page_size`, `page_order` and `share_prompts` (whether samples share what was computed of their
    prompt) move no bit, nor does who else is on the way, or when a request came. Several threads may ask at once, and
    streams may be read by turns: all share each step. While steps run, the interpreter's lock is released.

    `rope_length` is the longest text of the engine. Where the scaling of rotary positions depends on a length (longrope, dynamic)
    their frequencies belong to it, and without it to the length that the model was trained on; a text that would grow beyond it
    is refused. `CausalLM` takes the same.

    `adapters` are folders of PEFT by name, low-rank adapters that stand beside the model: texts with different ones, and without
    one, are made in the same steps, and none has other bits for it.

    `storage` is the contract for how a folder's weights may be stored: "ws2" also admits floats of 8 bits with a scale for each
    block, which are rounded to `dtype` as all others are.

    What is passed by of a folder (fields that no code reads, or whose value asks for nothing; buffers) is named once, in a warning;
    with `strict` it is a ValueError.

    Raises ValueError for what does not fit the model, and for logits or log-probabilities that are not finite (it names the layer,
    the op, the sequence and the token where that began), MemoryError, RuntimeError for weights in use.
    """

    def __init__(
        self,
        model: Any,
        config: Any = None,
        *,
        dtype: str = "bf16",
        batch: int = 16,
        chunk: int = 256,
        page_size: int = 64,
        page_order: str = "ascending",
        share_prompts: bool = True,
        rope_length: int | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        storage: str = "ws1",
        strict: bool = False,
    ) -> None:
        if isinstance(model, (str, os.PathLike)):
            if config is not None:
                raise ValueError("config: the folder has its own; give one of the two")
            tensors, text, folder = None, None, os.fspath(model)
        else:
            text, folder = config_of(config_beside(model, config))
            tensors = tensors_of(model, _native.family(text, folder))
        how = (batch, chunk, page_size, page_order, share_prompts, rope_length)
        beside = [(name, os.fspath(place)) for name, place in (adapters or {}).items()]
        self._native = _native.Engine(tensors, dtype, text, folder, *how, beside, storage)
        self._family = _native.family(text, folder)
        name_passed(self._native.passed(), folder, strict)
        self.dtype = dtype
        self.rope_length, self._depends = self._native.rope_length()
        # Between the version that a request is made by and the request nothing is changed.
        self._lock = threading.Lock()
        # How many choices of routers the last call of `score` found to be others than recorded, and of how many.
        self.flips: tuple[int, int] | None = None

    def stream(
        self,
        prompts: Any,
        n: int = 1,
        *,
        max_tokens: int = 64,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        banned_tokens: Sequence[int] = (),
        allowed_tokens: Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        seed: int = 0,
        ignore_eos: bool = False,
        first: int = 0,
        adapter: Any = ...,
        experts: bool = False,
    ) -> Stream:
        """Asks for `n` texts behind each prompt, and gives their tokens as they are made.

        Logits get `logit_bias`, are divided (below 0: multiplied) by `repetition_penalty` where the text has their token, and lose
        `frequency_penalty` for each time that it was sampled and `presence_penalty` where it was; then they are divided by
        `temperature`. Of what is left the `top_k` likeliest tokens may be sampled (0: all), of these the likeliest up to the one
        that reaches `top_p` of the probability, and of these the ones with at least `min_p` of the likeliest one's. Log-probabilities
        are those of the distribution that was sampled. A text ends behind a token of `stop_token_ids`, or one with which it holds a
        text of `stop`, for which the folder needs a tokenizer.

        A prompt is a list of tokens; where the folder has a tokenizer also a text, of which it makes the tokens that `AutoTokenizer`
        of transformers makes, or a conversation, a list of dictionaries with "role" and "content" for the folder's chat template.
        One alone need not stand in a list. Texts are
        numbered from `first` on, and a text's random numbers belong to the seed, its number and its positions: prompts 0 to 9 in
        one request are those in two, the second of which has `first=5 * n`.

        `adapter` is the name of one of the engine's, None for the model without, or a list with one for each prompt; without it all
        texts have the only one, where there is one.

        With `experts` a sample has those that each token went through, by all mixtures of experts in the order of their blocks.
        """
        found = self.tokens(prompts)
        settings = asked(
            {
                "top_k": top_k,
                "top_p": top_p,
                "min_p": min_p,
                "repetition_penalty": repetition_penalty,
                "frequency_penalty": frequency_penalty,
                "presence_penalty": presence_penalty,
                "logit_bias": logit_bias,
                "banned_tokens": banned_tokens,
                "allowed_tokens": allowed_tokens,
            }
        )
        stops = [stop] if isinstance(stop, str) else list(stop)
        told = {**settings, "temperature": float(temperature), "stop": stops}
        told["stop_token_ids"] = [int(token) for token in stop_token_ids]
        told["experts"] = bool(experts)
        if adapter is not ...:
            told["adapter"] = adapter if adapter is None or isinstance(adapter, str) else list(adapter)
        with self._lock:
            version, known = self.version, self.adapters
            request = self._native.add(found, n, max_tokens, text_of(told), seed, ignore_eos, first)
        names = told.get("adapter", next(iter(known)) if len(known) == 1 else None)
        names = names if isinstance(names, list) and len(names) != 1 else [names[0] if isinstance(names, list) else names] * len(found)
        whose = [(name, None if name is None else known[name]) for name in names]
        of = (version, self.rope_length, float(temperature), self.dtype, settings)
        return Stream(self._native, request, found, of, whose)

    def generate(self, prompts: Any, n: int = 1, **sampling: Any) -> list[Sample]:
        """The texts that `stream` of the same arguments gives, in the order of their numbers."""
        found = [token.sample for token in self.stream(prompts, n, **sampling) if token.sample]
        return sorted(found, key=lambda sample: sample.sequence)

    def score(self, samples: Sequence[Sample], temperature: float | None = None) -> list[Any]:
        """The log-probabilities of samples once more, each by one forward over prompt and tokens, by the settings that it was
        sampled by: the bits of `logprobs`, with the weights that made them. Raises ValueError for samples of another dtype, rope
        length or adapter than the engine's, or of another `temperature` than the one that is asked for. Of samples that have experts,
        `flips` says afterwards in how many choices the routers differ, and of how many.
        """
        known = self.adapters
        for sample in samples:
            if sample.adapter is not None and known.get(sample.adapter) != sample.adapter_sha256:
                made, here = sample.adapter_sha256, known.get(sample.adapter, "none")
                line = f"adapter: sample {sample.sequence} was made with `{sample.adapter}` of SHA-256 {made}, the engine has {here}"
                raise ValueError(f"{line}; two are not compared")
        comparable(samples, "the engine", self.dtype, self.rope_length if self._depends else None, temperature)
        rows: list[Any] = [None] * len(samples)
        told = [text_of({**sample.sampling, "temperature": sample.temperature, "adapter": sample.adapter}) for sample in samples]
        flips: list[tuple[int, int]] = []
        for at in dict.fromkeys(told):
            places = [place for place, by in enumerate(told) if by == at]
            of = (samples[place] for place in places)
            texts = [(one.prompt_tokens, [int(token) for token in one.tokens], _recorded(one.experts)) for one in of]
            scores, found = self._native.score(texts, at)
            flips += [] if found is None else [found]
            for place, row in zip(places, scores):
                rows[place] = array(row, "float32")
        self.flips = (sum(one for one, _ in flips), sum(of for _, of in flips)) if flips else None
        return rows

    def update(self, state: Any, *, end: bool = False, adapter: str | None = None) -> int:
        """Packs other weights, a state dictionary or a module, and gives the number of their version. With `adapter` they are those of
        this adapter, f32 under the names that its folder has; of a `CausalLM` those of its only one are taken, or of its adapter of this
        name.

        No text is made by two versions: while a request has texts that have not ended, RuntimeError names it and nothing is
        changed. With `end` such texts are ended as they are, with stop "ended". Weights that are refused leave the old ones.
        """
        with self._lock:
            if adapter is not None:
                named = getattr(state, "adapter_state", lambda _: dict(state.named_parameters()))
                tensors = named(adapter) if hasattr(state, "named_parameters") else dict(state)
                return self._native.update({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, end, adapter)
            return self._native.update(tensors_of(state, self._family), end)

    def tokens(self, prompts: Any) -> list[list[int]]:
        """Prompts as lists of tokens."""
        alone = len(prompts) > 0 and not isinstance(prompts[0], str) and not hasattr(prompts[0], "__len__")
        if isinstance(prompts, str) or alone or (len(prompts) and isinstance(prompts[0], Mapping)):
            prompts = [prompts]
        found = []
        for prompt in prompts:
            is_chat = len(prompt) > 0 and isinstance(prompt[0], Mapping)
            if isinstance(prompt, str) or is_chat:
                encode = self._native.encode_chat if is_chat else self._native.encode
                prompt, warning = encode(json.dumps(prompt) if is_chat else prompt)
                if warning:
                    warnings.warn(warning, stacklevel=3)
            found.append([int(token) for token in prompt])
        return found

    def text(self, tokens: Any) -> str:
        """The text of some tokens, special ones left out."""
        return self._native.decode([int(token) for token in tokens])

    @property
    def adapters(self) -> dict[str, str]:
        """SHA-256 of every adapter by name: of each tensor in the order of their names the name, the factor of its product (f64) and
        its f32 elements, all little endian.
        """
        return self._native.adapters()

    @property
    def version(self) -> int:
        """How often the weights have been changed."""
        return self._native.state()[0]

    @property
    def times(self) -> dict[str, float]:
        """What steps took so far: tokens and seconds of prompts, and of what was sampled."""
        names = ("prompt_tokens", "prompt_seconds", "sampled_tokens", "sampled_seconds")
        return dict(zip(names, self._native.state()[2]))
