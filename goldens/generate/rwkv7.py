"""RWKV-7 as the `rwkv` package of PyPI computes it, and a copy of its forward that autograd goes back through.

The package (the recorded files: rwkv 0.8.32) loads a `.pth` and computes one text at a time; `Reference` writes that file and
looks like a model of transformers. `Model` is the same forward in a module whose parameters have the names that samebits gives
them; `checkpoints.py` holds its logits to those of the package.
"""

import os
import re
import tempfile
import types
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

SIZES = dict(vocab_size=160, hidden_size=48, num_hidden_layers=3, head_dim=16, intermediate_size=96, ranks=(12, 12, 8, 20))
# As the tensors of narrow matrices are called in folders, and here: two matrices, and what is added.
NARROW = {f"{one}{n}": f"{one}{'2.bias' if n == 0 else f'{n}.weight'}" for one in "wavg" for n in (0, 1, 2)}


def named(name):
    """The name of a parameter, by that of its tensor."""
    base, _, last = name.rpartition(".")
    return f"{base}.{NARROW[last]}" if base.endswith(".att") and last in NARROW else name


def published(name):
    """The name of a tensor, by that of its parameter."""
    return re.sub(r"(\.att\.[wav])2\.bias$", r"\g<1>0", re.sub(r"(\.att\.[wavg][12])\.weight$", r"\1", name))


def tensors(sizes, generator):
    """Random weights of the shapes that folders have."""
    hidden, head, width, ranks = sizes["hidden_size"], sizes["head_dim"], sizes["intermediate_size"], sizes["ranks"]
    vocab = sizes["vocab_size"]
    normal = lambda *shape, std=1.0, mean=0.0: torch.randn(shape, generator=generator) * std + mean
    matrix = lambda n, k: normal(n, k, std=0.8 * k**-0.5)
    norm = lambda name: {f"{name}.weight": normal(hidden, std=0.2, mean=1.0), f"{name}.bias": normal(hidden, std=0.2)}
    found = {"emb.weight": normal(vocab, hidden), "head.weight": normal(vocab, hidden, std=1.6 * hidden**-0.5), **norm("ln_out"), **norm("blocks.0.ln0")}
    for i in range(sizes["num_hidden_layers"]):
        att, ffn = f"blocks.{i}.att.", f"blocks.{i}.ffn."
        found |= norm(f"blocks.{i}.ln1") | norm(f"blocks.{i}.ln2") | norm(att + "ln_x")
        for one in "rwkvag":
            found[att + f"x_{one}"] = torch.rand((1, 1, hidden), generator=generator)
        for (one, rank), mean in zip(zip("wavg", ranks), (-1.0, 0.0, 0.5, None)):
            if one == "v" and i == 0:
                continue
            found[att + f"{one}1"], found[att + f"{one}2"] = matrix(rank, hidden).T.contiguous(), matrix(hidden, rank).T.contiguous()
            if mean is not None:
                found[att + f"{one}0"] = normal(1, 1, hidden, std=1.5, mean=mean)
        found[att + "k_k"] = normal(1, 1, hidden, std=0.3, mean=0.7)
        found[att + "k_a"] = normal(1, 1, hidden, std=0.2, mean=1.0)
        found[att + "r_k"] = normal(hidden // head, head, std=0.3)
        for one in ("receptance", "key", "value", "output"):
            found[att + f"{one}.weight"] = matrix(hidden, hidden)
        found[ffn + "x_k"] = torch.rand((1, 1, hidden), generator=generator)
        found[ffn + "key.weight"], found[ffn + "value.weight"] = matrix(width, hidden), matrix(hidden, width)
    return found


def is_one(folder):
    """Whether a folder has the names of the package, and no config.json."""
    return not (Path(folder) / "config.json").exists()


class Reference:
    """The package over the tensors of a folder; it takes tokens [B, T] and gives logits."""

    def __init__(self, folder, dtype):
        os.environ.update(RWKV_V7_ON="1", RWKV_JIT_ON="0", RWKV_CUDA_ON="0")
        from rwkv.model import RWKV

        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / "model"
            stored = load_file(Path(folder) / "model.safetensors")
            torch.save({published(name): x for name, x in stored.items()}, f"{file}.pth")
            self.model = RWKV(str(file), "cpu " + {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype])

    def __call__(self, tokens, use_cache=False):
        with torch.no_grad():
            logits = [self.model.forward(row.tolist(), None, full_output=True)[0].float() for row in tokens]
        return types.SimpleNamespace(logits=torch.stack(logits))

    def both(self, tokens):
        """Logits of texts in one forward, and of one token at a time."""
        prefill, rows = self(tokens).logits, []
        for row in tokens:
            state, steps = None, []
            for token in row.tolist():
                logits, state = self.model.forward([token], state)
                steps.append(logits.float())
            rows.append(torch.stack(steps))
        return prefill, torch.stack(rows)


class Model(torch.nn.Module):
    """The forward of the package, in torch alone."""

    def __init__(self, folder, dtype):
        super().__init__()
        stored = load_file(Path(folder) / "model.safetensors")
        self.config = types.SimpleNamespace(vocab_size=stored["emb.weight"].shape[0], model_type="rwkv7")
        self.heads, self.size = stored["blocks.0.att.r_k"].shape
        self.layers = 1 + max(int(name.split(".")[1]) for name in stored if name.startswith("blocks."))
        self.z = {named(name): torch.nn.Parameter(x.squeeze().to(dtype)) for name, x in stored.items()}

    def named_parameters(self, *args, **kwargs):
        return iter(self.z.items())

    def zero_grad(self, *args, **kwargs):
        for parameter in self.z.values():
            parameter.grad = None

    def norm(self, x, name):
        return F.layer_norm(x, x.shape[-1:], self.z[name + ".weight"], self.z[name + ".bias"])

    def forward(self, tokens, use_cache=False):
        x, first = self.norm(self.z["emb.weight"], "blocks.0.ln0")[tokens], None
        for i in range(self.layers):
            own, first = self.time_mix(i, self.norm(x, f"blocks.{i}.ln1"), first)
            x = x + own
            a, ffn = self.norm(x, f"blocks.{i}.ln2"), f"blocks.{i}.ffn."
            mixed = a + self.shifted(a) * self.z[ffn + "x_k"]
            x = x + torch.relu(mixed @ self.z[ffn + "key.weight"].T) ** 2 @ self.z[ffn + "value.weight"].T
        return types.SimpleNamespace(logits=self.norm(x, "ln_out") @ self.z["head.weight"].T)

    def shifted(self, x):
        return F.pad(x, (0, 0, 1, 0))[:, :-1] - x

    def time_mix(self, i, x, first):
        z = {name.removeprefix(f"blocks.{i}.att."): p for name, p in self.z.items() if name.startswith(f"blocks.{i}.att.")}
        (batch, length, hidden), away = x.shape, self.shifted(x)
        r, w, k, v, a, g = (x + away * z[f"x_{one}"] for one in "rwkvag")
        w = z["w2.bias"] + torch.tanh(w @ z["w1.weight"]) @ z["w2.weight"]
        r, k, own = r @ z["receptance.weight"].T, k @ z["key.weight"].T, v @ z["value.weight"].T
        a = torch.sigmoid(z["a2.bias"] + (a @ z["a1.weight"]) @ z["a2.weight"])
        g = torch.sigmoid(g @ z["g1.weight"]) @ z["g2.weight"]
        by_heads = lambda x: x.reshape(batch, length, self.heads, self.size)
        unit = F.normalize(by_heads(k * z["k_k"]), dim=-1, p=2.0)
        k = k * (1 + (a - 1) * z["k_a"])
        if i == 0:
            v = first = own
        else:
            v = own + (first - own) * torch.sigmoid(z["v2.bias"] + (v @ z["v1.weight"]) @ z["v2.weight"])
        w = by_heads(torch.exp(-0.606531 * torch.sigmoid(w.float())))
        rows = [by_heads(one) for one in (r, k, v)]
        part, state, made = unit * by_heads(a), x.new_zeros((batch, self.heads, self.size, self.size), dtype=torch.float32), []
        for t in range(length):
            r_t, k_t, v_t = (one[:, t] for one in rows)
            taken = (-unit[:, t])[..., :, None] @ part[:, t][..., None, :]
            state = state * w[:, t][..., None, :] + state @ taken.float() + (v_t[..., :, None] @ k_t[..., None, :]).float()
            made.append((state.to(x.dtype) @ r_t[..., None])[..., 0])
        made = torch.stack(made, 1).reshape(batch * length, hidden)
        made = F.group_norm(made, self.heads, z["ln_x.weight"], z["ln_x.bias"], eps=64e-5).reshape(x.shape)
        bonus = (rows[0] * rows[1] * z["r_k"]).sum(-1, keepdim=True) * rows[2]
        return ((made + bonus.reshape(x.shape)) * g) @ z["output.weight"].T, first


def make(folder, sizes, generator):
    """A folder with random weights, rounded to bf16, under the names that samebits gives them: it loads those of the package too."""
    folder.mkdir(parents=True, exist_ok=True)
    vector = lambda x: x.flatten() if x.shape[:2] == (1, 1) else x
    found = {named(name): vector(x).to(torch.bfloat16).contiguous() for name, x in tensors(sizes, generator).items()}
    save_file(found, folder / "model.safetensors")
