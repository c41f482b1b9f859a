"""Log-probabilities that other projects record, as a rollout that `samebits score` computes again.

    python -m samebits.adapters verl batch.pt --out rollout.jsonl --dtype bf16 --temperature 1.0
    samebits score --model DIR --rollout rollout.jsonl

- `verl`: a DataProto, or its `batch`: `prompts` and `responses` [B,P] and [B,R], `attention_mask` [B,P+R], `rollout_log_probs`
  [B,R], and `response_mask` where tokens of tools are among the responses; or nested tensors of these, without padding and
  so without `attention_mask`.
- `trl`: what GRPOTrainer makes of a generation: `prompt_ids`, `prompt_mask`, `completion_ids`, `completion_mask`,
  `sampling_per_token_logps`, and `tool_mask` where there are tools.
- `slime`: what `--save-debug-rollout-data` writes: `samples`, each with `tokens`, `response_length`, `rollout_log_probs` and
  `loss_mask`.
- `vllm`: outputs of `LLM.generate` with `SamplingParams(logprobs=0)` or more, saved as a list of `{"prompt_token_ids": ..,
  "outputs": [{"token_ids": .., "logprobs": ..}]}` whose `logprobs` have a number for each token, or as they are in memory. With
  `logprobs_mode` "raw_logprobs", vLLM's default, they are those at a temperature of 1, whatever texts were sampled at; with
  "processed_logprobs" those at the temperature, under the settings.

Where the router's choices were recorded (`routed_experts` [B,P+R,layers,chosen] of verl, `rollout_routed_experts` of slime or its
`routed_experts` in base64 as SGLang returns it, `prompt_routed_experts` and `routed_experts` of vLLM) texts have them too: in how many
choices the model differs is counted by `samebits score`, and with `--replay-experts` they are chosen. Layers are mixtures of experts or
all blocks; a token whose first expert is negative has none recorded.

Where it was recorded which tokens top-k, top-p and min-p left (`sampling_mask` of vLLM, flat with offsets or a list for each token;
`rollout_top_p_token_ids` and `rollout_top_p_token_offsets` of slime, or `output_token_sampling_mask` of SGLang in its `meta_info`),
texts have that too, and log-probabilities are compared among those tokens.

Files are those of `torch.save`, read without running code of theirs. Tokens that the model did not sample have no
log-probability: what follows them is a text of its own, behind a longer prompt.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import os
import struct
import sys
from typing import Any, Callable, Iterator, Mapping

from .engine import settings_of

__all__ = ["slime", "trl", "verl", "vllm", "write"]

# The tokens before, the sampled ones, and their log-probabilities; where they were recorded, the experts of all tokens but the last,
# `[tokens - 1, layers, chosen]`, or None, and a list for each sampled token of those that it was drawn from.
Text = tuple[Any, ...]


def verl(batch: Any) -> list[Text]:
    """The texts of a batch of verl."""
    batch = getattr(batch, "batch", batch)
    names = ("prompts", "responses", "rollout_log_probs")
    if getattr(_field(batch, "prompts", "verl"), "is_nested", False):
        masks = ("response_mask",) if "response_mask" in batch.keys() else ()
        columns = [[row.tolist() for row in _field(batch, name, "verl").unbind()] for name in (*names, *masks)]
        experts = _of_each(batch["routed_experts"].unbind() if "routed_experts" in batch.keys() else None, len(columns[0]))
        rows = enumerate(zip(experts, *columns))
        return [text for row, (of, *found) in rows for text in _row(f"verl: row {row}", *found, experts=of)]
    prompts, responses, logprobs = (_matrix(batch, name, "verl") for name in names)
    attention = _matrix(batch, "attention_mask", "verl").bool()
    width = prompts.shape[1]
    if attention.shape[1] != width + responses.shape[1]:
        raise ValueError(f"verl: attention_mask has {attention.shape[1]} columns, prompts and responses {width + responses.shape[1]}")
    sampled = _matrix(batch, "response_mask", "verl").bool() if "response_mask" in batch.keys() else attention[:, width:]
    experts = batch["routed_experts"] if "routed_experts" in batch.keys() else None
    if experts is not None and list(experts.shape[:2]) != list(attention.shape):
        raise ValueError(f"verl: `routed_experts` is {list(experts.shape)}; it must have the rows and columns of attention_mask, {list(attention.shape)}")
    # A row of padding holds what nobody reads.
    experts = None if experts is None else [of[mask] for of, mask in zip(experts, attention)]
    return _texts("verl", (prompts, attention[:, :width]), (responses, attention[:, width:]), sampled, logprobs, experts)


def trl(generation: Mapping[str, Any]) -> list[Text]:
    """The texts of a generation of TRL."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "sampling_per_token_logps")
    prompts, prompt_mask, completions, mask, logprobs = (_matrix(generation, name, "trl") for name in names)
    tools = _matrix(generation, "tool_mask", "trl").bool() if "tool_mask" in generation.keys() else mask.bool()
    return _texts("trl", (prompts, prompt_mask.bool()), (completions, mask.bool()), tools & mask.bool(), logprobs)


def slime(rollout: Mapping[str, Any]) -> list[Text]:
    """The texts of a rollout of slime."""
    texts: list[Text] = []
    for number, sample in enumerate(_field(rollout, "samples", "slime")):
        what = f"slime: sample {number}"
        count = _field(sample, "response_length", what)
        if count == 0:
            continue  # aborted before its first token
        tokens, logprobs = list(map(int, _field(sample, "tokens", what))), list(_field(sample, "rollout_log_probs", what))
        mask = [1] * count if sample.get("loss_mask") is None else list(sample["loss_mask"])
        if count > len(tokens):
            raise ValueError(f"{what}: response_length is {count}; there are {len(tokens)} tokens")
        experts = _of_slime(sample, rollout, what, len(tokens))
        kept = _flat(what, sample.get("rollout_top_p_token_ids"), sample.get("rollout_top_p_token_offsets"))
        if kept is None:
            kept = (sample.get("meta_info") or {}).get("output_token_sampling_mask")
        texts += _row(what, tokens[: len(tokens) - count], tokens[len(tokens) - count :], logprobs, mask, experts, kept)
    return texts


def vllm(outputs: Any) -> list[Text]:
    """The texts of what `LLM.generate` of vLLM gives."""
    texts: list[Text] = []
    for number, request in enumerate(outputs):
        request = request if hasattr(request, "keys") else vars(request)
        for sample, output in enumerate(_field(request, "outputs", f"vllm: request {number}")):
            what = f"vllm: request {number}, output {sample}"
            output = output if hasattr(output, "keys") else vars(output)
            tokens = [int(token) for token in _field(output, "token_ids", what)]
            found = list(_field(output, "logprobs", what))
            if len(found) != len(tokens):
                raise ValueError(f"{what}: {len(tokens)} tokens, {len(found)} log-probabilities")
            # Of each place those of several tokens, the sampled one among them.
            logprobs = [one[token] if hasattr(one, "keys") else one for token, one in zip(tokens, found)]
            values = [getattr(one, "logprob", one) for one in logprobs]
            if tokens:
                experts = _of_vllm(request, output, what, len(tokens))
                prompt = [int(token) for token in _field(request, "prompt_token_ids", what)]
                kept = output["sampling_mask"] if "sampling_mask" in output.keys() else None
                if kept is not None and not isinstance(kept, (list, tuple)):
                    flat = kept if hasattr(kept, "keys") else vars(kept)
                    kept = _flat(what, _field(flat, "token_ids", what), _field(flat, "offsets", what))
                texts += _row(what, prompt, tokens, values, None, experts, kept)
    return texts


def _flat(what: str, ids: Any, offsets: Any) -> list[list[int]] | None:
    """A list for each token, of all of them one behind the other and where each begins."""
    if ids is None or offsets is None:
        return None
    ids, offsets = ([int(one) for one in values] for values in (ids, offsets))
    if not offsets or offsets[0] != 0 or offsets[-1] != len(ids) or any(a > b for a, b in zip(offsets, offsets[1:])):
        raise ValueError(f"{what}: offsets of a sampling mask must go from 0 up to its {len(ids)} tokens")
    return [ids[begin:end] for begin, end in zip(offsets, offsets[1:])]


def _of_each(experts: Any, count: int) -> Any:
    return [None] * count if experts is None else experts


def _of_slime(sample: Any, rollout: Any, what: str, tokens: int) -> Any:
    """Experts of a sample of slime: an array, or the int32 of SGLang in base64, `[tokens - 1, layers, chosen]` in a row."""
    experts = sample.get("rollout_routed_experts")
    if experts is None:
        experts = (sample.get("meta_info") or {}).get("routed_experts")
    if not isinstance(experts, (str, bytes)):
        return experts
    import numpy

    held = base64.b64decode(experts)
    layers, chosen = (sample.get(name, rollout.get(name)) for name in ("num_layers", "moe_router_topk"))
    if layers is None or chosen is None:
        raise ValueError(f"{what}: `routed_experts` is base64; say `num_layers` and `moe_router_topk` beside it, as slime's arguments have them")
    if len(held) != 4 * (tokens - 1) * layers * chosen:
        raise ValueError(f"{what}: `routed_experts` has {len(held)} bytes; {tokens - 1} tokens have {layers} x {chosen} int32 each")
    return numpy.frombuffer(held, "<i4").reshape(tokens - 1, layers, chosen)


def _of_vllm(request: Any, output: Any, what: str, tokens: int) -> Any:
    """Experts of an output of vLLM: of the prompt and of what was generated, or of both in one."""
    experts = output["routed_experts"] if "routed_experts" in output.keys() else None
    prompt = request["prompt_routed_experts"] if "prompt_routed_experts" in request.keys() else None
    if experts is None or prompt is None:
        return experts
    return [*_lists(prompt, what), *_lists(experts, what)]


def _lists(experts: Any, what: str) -> list[list[list[int]]]:
    """`[tokens, layers, chosen]` as lists."""
    found = experts.tolist() if hasattr(experts, "tolist") else [[list(row) for row in token] for token in experts]
    forms = {(len(token), *map(len, token)) for token in found}
    if len(forms) > 1 or any(len(set(form[1:])) != 1 for form in forms):
        raise ValueError(f"{what}: routed experts must be [tokens, layers, chosen]")
    return found


def _field(of: Any, name: str, what: str) -> Any:
    if not hasattr(of, "keys"):
        raise ValueError(f"{what}: is a {type(of).__name__}; it must hold `{name}` by name")
    if name not in of.keys() or of[name] is None:
        raise ValueError(f"{what}: `{name}` is missing; was it recorded? There are {', '.join(map(str, of.keys()))}")
    return of[name]


def _matrix(of: Any, name: str, what: str) -> Any:
    tensor = _field(of, name, what)
    if len(getattr(tensor, "shape", ())) != 2:
        form = list(tensor.shape) if hasattr(tensor, "shape") else f"a {type(tensor).__name__}"
        raise ValueError(f"{what}: `{name}` is {form}; it must be a tensor of two axes")
    return tensor


def _row(
    what: str,
    prompt: list[int],
    tokens: list[int],
    logprobs: list[float],
    sampled: list[Any] | None = None,
    experts: Any = None,
    kept: Any = None,
) -> Iterator[Text]:
    """One response without padding; all of it was sampled where nothing else is said."""
    sampled = [1] * len(tokens) if sampled is None else sampled
    if not len(tokens) == len(logprobs) == len(sampled):
        raise ValueError(f"{what}: {len(tokens)} tokens of response, {len(logprobs)} log-probabilities, a mask of {len(sampled)}")
    if kept is not None and len(kept) != len(tokens):
        raise ValueError(f"{what}: {len(tokens)} tokens of response, a sampling mask of {len(kept)}")
    return _runs(what, prompt, tokens, sampled, logprobs, experts, kept)


def _texts(
    what: str, prompts: tuple[Any, Any], responses: tuple[Any, Any], sampled: Any, logprobs: Any, experts: Any = None
) -> list[Text]:
    """Padded tensors and their masks, row by row."""
    if not responses[0].shape == responses[1].shape == sampled.shape == logprobs.shape:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (*responses, sampled, logprobs))
        raise ValueError(f"{what}: responses, their masks and log-probabilities have the shapes {shapes}; they must have one")
    if prompts[0].shape != prompts[1].shape or len(prompts[0]) != len(logprobs):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (*prompts, logprobs))
        raise ValueError(f"{what}: prompts, their mask and log-probabilities have the shapes {shapes}; they must have the same rows")
    texts: list[Text] = []
    for row in range(len(prompts[0])):
        prompt = prompts[0][row][prompts[1][row]].tolist()
        keep = responses[1][row]
        columns = (tensor[row][keep].tolist() for tensor in (responses[0], sampled, logprobs.float()))
        texts += _runs(f"{what}: row {row}", prompt, *columns, None if experts is None else experts[row])
    return texts


def _runs(
    what: str, before: list[int], tokens: list[int], sampled: list[Any], logprobs: list[float], experts: Any = None, kept: Any = None
) -> Iterator[Text]:
    """The runs of tokens that were sampled, each behind all that stands before it."""
    if not before:
        raise ValueError(f"{what}: the prompt is empty")
    rows = None if experts is None else _lists(experts, what)
    if rows is not None and len(before) + len(tokens) - len(rows) not in (0, 1):
        raise ValueError(f"{what}: experts of {len(rows)} tokens; there are {len(before)} + {len(tokens)}, of which the last has none")
    at = 0
    while at < len(tokens):
        end = at
        while end < len(tokens) and bool(sampled[end]) == bool(sampled[at]):
            end += 1
        if sampled[at]:
            values = [math.nan if value is None else float(value) for value in logprobs[at:end]]
            for place, value in enumerate(values):
                if not math.isfinite(value):
                    raise ValueError(f"{what}: token {at + place} of the response has the log-probability {value}")
            # Nothing is computed of a last token.
            of = () if rows is None and kept is None else (None if rows is None else rows[: len(before) + end - 1],)
            if kept is not None:
                of = (*of, [[int(token) for token in tokens] for tokens in kept[at:end]])
            yield (before + tokens[:at], tokens[at:end], values, *of)
        at = end


def write(
    texts: list[Text],
    out: str | os.PathLike[str],
    *,
    dtype: str = "bf16",
    temperature: float = 1.0,
    rope_length: int | None = None,
    sampling: Mapping[str, Any] | None = None,
    recorded_by: str = "another project",
) -> None:
    """Writes texts as a rollout of a model in `dtype`, sampled at `temperature`. Log-probabilities are rounded to f32. A model whose
    rotary positions depend on a length (longrope, dynamic) is scored at the `rope_length` of its engine, which must be given.
    `sampling` are the settings of `Engine.stream` under which they were recorded (`{"top_p": 0.9}`): which tokens were left is
    computed again. `samebits score` judges them by the gate for records of other projects, as `recorded_by` says that they are.
    """
    if dtype not in ("bf16", "fp16", "fp32"):
        raise ValueError(f"dtype {dtype}: use bf16, fp16 or fp32")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature {temperature}: use what logits were divided by, or 0 where the likeliest tokens were taken")
    if not texts:
        raise ValueError("there is no sampled token; nothing could be compared")
    first = {"samebits": "rollout", "dtype": dtype, "temperature": temperature, "sequences": len(texts), "recorded_by": recorded_by}
    settings = json.loads(settings_of(sampling or {}, temperature))
    if rope_length is not None:
        first["rope_length"] = rope_length
    # Whoever reads them looks whether they are experts of the model.
    experts = [_lists(text[3], f"text {number}") for number, text in enumerate(texts) if len(text) > 3 and text[3] is not None]
    forms = {(len(token), len(token[0])) for rows in experts for token in rows}
    if len(forms) > 1:
        raise ValueError(f"routed experts: there are some of {sorted(forms)} layers and experts; records of one model are written")
    most = max((max(row) for rows in experts for token in rows for row in token), default=0)
    code = "b" if most < 128 else "h" if most < 32768 else "i"
    if forms:
        dtype, (layers, chosen) = {"b": "int8", "h": "int16", "i": "int32"}[code], forms.pop()
        first["routed_experts"] = {"dtype": dtype, "layers": layers, "chosen": chosen}
    lines = [json.dumps(first)]
    for number, (prompt, tokens, logprobs, *of) in enumerate(texts):
        limit = len(prompt) + len(tokens)
        line = {"sequence": number, "limit": limit, "prompt_tokens": prompt, "tokens": tokens, "logprobs": logprobs}
        if len(of) > 1:
            line["sampling_mask"] = of[1]
        if of and of[0] is not None:
            each = [max(expert, -1) for token in _lists(of[0], f"text {number}") for row in token for expert in row]
            line["routed_experts"] = base64.b64encode(struct.pack(f"<{len(each)}{code}", *each)).decode()
        lines.append(json.dumps(line if sampling is None else {**line, "sampling": settings}))
    text = "\n".join(lines) + "\n"
    part = f"{os.fspath(out)}.part"
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(part, out)


_READERS: dict[str, Callable[[Any], list[Text]]] = {"verl": verl, "trl": trl, "slime": slime, "vllm": vllm}


def _load(path: str, project: str) -> Any:
    import pickle
    import zipfile

    import torch

    load = f"load it where {project} is installed, and give what it holds to samebits.adapters.{project}"
    with open(path, "rb") as file:
        if file.read(4) != b"PK\3\4" or not zipfile.is_zipfile(file):
            raise ValueError(f"{path}: is no whole file of torch.save; if {project} can read it, {load}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:
        raise ValueError(f"{path}: it holds more than tensors, numbers and texts; {load}") from e
    except RuntimeError as e:
        raise ValueError(f"{path}: is no whole file of torch.save: {str(e).splitlines()[0]}") from e


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m samebits.adapters", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("project", choices=sorted(_READERS))
    parser.add_argument("file")
    parser.add_argument("--out", required=True, help="the rollout to write")
    parser.add_argument("--dtype", default="bf16", help="the dtype that the model ran in: bf16, fp16 or fp32")
    parser.add_argument("--temperature", type=float, default=1.0, help="what logits were divided by")
    parser.add_argument("--rope-length", type=int, help="the longest text of the engine, where frequencies depend on a length")
    parser.add_argument("--sampling", type=json.loads, help="settings under which they were recorded: \'{\"top_p\": 0.9}\'")
    given = parser.parse_args()
    try:
        texts = _READERS[given.project](_load(given.file, given.project))
        how = {"dtype": given.dtype, "temperature": given.temperature, "rope_length": given.rope_length, "sampling": given.sampling}
        write(texts, given.out, recorded_by=given.project, **how)
    except (OSError, ValueError) as e:
        print(f"samebits.adapters: {e}", file=sys.stderr)
        return 2
    print(f"{sum(len(text[1]) for text in texts)} log-probabilities of {len(texts)} texts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
