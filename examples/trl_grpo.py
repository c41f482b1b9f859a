"""GRPO by the trainer of TRL, on policy to the bit: `sampling/sampling_logp_difference` is 0, not small.

    pip install trl==1.16.0                            # tried with this version, and transformers 5.23
    python examples/trl_grpo.py                        # two minutes on two cores
    python examples/trl_grpo.py --temperature 0.7 --top-p 0.9
    python examples/trl_grpo.py --lora 8               # a low-rank adapter is trained, and the model stays
    python examples/trl_grpo.py --plain                # the same run by transformers alone: the difference is not 0

TRL samples by an inference engine and trains by another program, measures how far their log-probabilities are apart, and weighs
tokens by it. Here `samebits.Engine` stands where TRL expects vLLM, and `samebits.torch.CausalLM` computes what TRL asks of the model:
the metrics, the loss and the loop are TRL's. In every step its `sampling/sampling_logp_difference` is exactly 0, mean and max,
its importance sampling ratios are exactly 1, and rollout, recomputation and first training forward have the same bits.

Exit code 1 where they have not, or where the damaged adder does not learn to add again.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import samebits
import samebits.testing
import samebits.torch
import torch
import transformers
import trl
from datasets import Dataset
from trl.trainer import grpo_trainer

# The questions, the damage and the share of right answers are those of grpo.py.
_of = importlib.util.spec_from_file_location("grpo", Path(__file__).with_name("grpo.py"))
grpo = importlib.util.module_from_spec(_of)
_of.loader.exec_module(grpo)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--plain", action="store_true", help="without samebits: generate and forward of transformers")
    parser.add_argument("--steps", type=int, default=26, help="steps of training")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--noise", type=float, default=3.7, help="what is added to weights, in units of their deviation")
    parser.add_argument("--lr", type=float, default=None, help="1e-4 without it, of an adapter 3e-3")
    parser.add_argument("--temperature", type=float, default=1.0, help="what answers are sampled at")
    parser.add_argument("--top-p", type=float, default=1.0, help="the share of the probability that they are sampled of")
    parser.add_argument("--lora", type=int, default=0, help="the rank of an adapter that is trained in the model's place")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=grpo.FOLDER)
    parser.add_argument("--tests", type=int, default=400, help="questions that it is judged by, before and after")
    parser.add_argument("--goal", type=float, default=0.9, help="the share of right answers at the end; 0: any")
    args = parser.parse_args()
    if args.plain and (args.lora or args.temperature != 1 or args.top_p != 1):
        parser.error("--plain is the run at a temperature of 1 from all tokens, without an adapter")
    return args


class Policy(transformers.PreTrainedModel, transformers.GenerationMixin):
    """A CausalLM in the clothes of a model of transformers."""

    def __init__(self, model: samebits.torch.CausalLM, folder: Path) -> None:
        super().__init__(transformers.AutoConfig.from_pretrained(folder))
        # How answers are sampled is the sampler's to say.
        self.model, self.sampling = model, {}

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, answer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-probability of each token, with its gradient, and the entropy before it, without. The last `answer` columns were
        sampled.
        """
        prompt = attention_mask[:, :-answer].sum(-1).tolist()
        logprob = self.model.logprob(input_ids, attention_mask, sampling=self.sampling, prompt=prompt)
        with torch.no_grad():
            logits = self.model(input_ids, attention_mask)
            entropy = samebits.ops.entropy(logits.flatten(0, 1))[0].reshape(logits.shape[:2])
        return logprob, entropy.roll(1, -1)


class Sampler:
    """What TRL asks of vLLM, of a model in this process: weights to sample with, and answers with their log-probabilities."""

    def __init__(self, *, model: torch.nn.Module, max_completion_length: int, **how: Any) -> None:
        # Those that TRL has no name for are what they are without it.
        self.sampling = {name: how[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty") if how[name] is not None}
        self.model, self.length, self.times = model, max_completion_length, 0
        if isinstance(model, Policy):
            model.sampling = self.sampling

    def generate(self, *, prompts: list[list[int]], images: None, num_generations: int, profiler: Any) -> tuple:
        self.times += 1
        with profiler:
            # A prompt stands there once for each of its answers.
            tokens, logprobs = self.sample(prompts[::num_generations], num_generations)
        return prompts, tokens, [[[value] for value in row] for row in logprobs], None


class Ours(Sampler):
    def __init__(self, engine: samebits.Engine, **how: Any) -> None:
        super().__init__(**how)
        self.engine = engine

    def sync_weights(self) -> None:
        self.engine.update(self.model.model, **{"adapter": name for name in self.engine.adapters})

    def sample(self, prompts: list[list[int]], n: int) -> tuple[list[list[int]], list[list[float]]]:
        samples = self.engine.generate(prompts, n, max_tokens=self.length, seed=self.times, **self.sampling)
        return [s.tokens.tolist() for s in samples], [s.logprobs.tolist() for s in samples]


class Plain(Sampler):
    """transformers' generate, with a cache, in bf16."""

    def sync_weights(self) -> None:
        self.copy = transformers.AutoModelForCausalLM.from_config(self.model.config, dtype=torch.bfloat16).eval()
        self.copy.load_state_dict(self.model.state_dict())

    def sample(self, prompts: list[list[int]], n: int) -> tuple[list[list[int]], list[list[float]]]:
        prompts = [prompt for prompt in prompts for _ in range(n)]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        how = {"do_sample": True, "max_new_tokens": self.length, "top_k": 0, "output_logits": True}
        with torch.no_grad():
            made = self.copy.generate(ids, attention_mask=(ids != 0).long(), return_dict_in_generate=True, **how)
        tokens = made.sequences[:, width:]
        logprobs = torch.stack(made.logits, 1).float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        # Of each row what stands before its padding.
        counts = (tokens != 0).sum(-1).tolist()
        return tuple([row[:count] for row, count in zip(rows.tolist(), counts)] for rows in (tokens, logprobs))


class Trainer(trl.GRPOTrainer):
    """TRL's, whose log-probabilities are those of a CausalLM, and which holds every step to equal bits."""

    compared = 0

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **_
    ):
        logprob, entropy = (rows[:, -logits_to_keep:] for rows in model(input_ids, attention_mask, logits_to_keep))
        if torch.is_grad_enabled():
            self.trained = logprob.detach().clone()
        return logprob, entropy if compute_entropy else None, None

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        rollout, recomputed = inputs["sampling_per_token_logps"], inputs["old_per_token_logps"]
        self.compared += samebits.testing.assert_on_policy(rollout, recomputed, self.trained, inputs["completion_mask"])
        return loss


class Told(transformers.TrainerCallback):
    """A line for each step."""

    def on_log(self, args, state, control, logs, **_):
        if "reward" in logs:
            difference, ratio = (f"sampling/{name}/" for name in ("sampling_logp_difference", "importance_sampling_ratio"))
            print(
                f"step {state.global_step:3} reward {logs['reward']:.3f} loss {logs['loss']:+.6f}"
                f" {difference}mean {logs[difference + 'mean']:g} max {logs[difference + 'max']:g}"
                f" ratio {logs[ratio + 'min']:g} to {logs[ratio + 'max']:g}",
                flush=True,
            )


def tokenizer_of(folder: Path) -> transformers.PreTrainedTokenizerFast:
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), padding_side="left", **named)


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(made == right) for made, right in zip(completions, answer)]


def main() -> int:
    args = arguments()
    started = time.perf_counter()
    model = samebits.torch.CausalLM.from_pretrained(args.folder)
    grpo.damage(model, args.noise, args.seed)
    draw = random.Random(args.seed)
    tests = [grpo.question(draw) for _ in range(args.tests)]
    adapter = tempfile.TemporaryDirectory()
    beside = {"policy": grpo.adapter(model, args.lora, args.seed, adapter.name)} if args.lora else {}
    engine = samebits.Engine(model, args.folder, batch=64, adapters=beside)
    if args.lora:
        model = samebits.torch.CausalLM(model, args.folder, adapter=beside["policy"])
    before = grpo.right(engine, tests)
    print(f"damaged: {before:.1%} of {len(tests)} answers are right", flush=True)

    tokenizer = tokenizer_of(args.folder)
    questions = [grpo.question(draw) for _ in range(args.prompts * args.steps)]
    data = Dataset.from_list([{"prompt": tokenizer.bos_token + q, "answer": a} for q, a in questions])
    batch, lr = args.prompts * args.samples, args.lr or (3e-3 if args.lora else 1e-4)
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=args.plain,
            seed=args.seed,
            max_steps=args.steps,
            per_device_train_batch_size=batch,
            steps_per_generation=1,
            num_generations=args.samples,
            max_completion_length=6,
            temperature=args.temperature,
            top_p=args.top_p,
            learning_rate=lr,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,  # the optimizer's
            gradient_checkpointing=False,
            shuffle_dataset=False,
            use_vllm=True,  # the sampler below
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        policy = plain_model(model, args.folder) if args.plain else Policy(model, args.folder)
        grpo_trainer.VLLMGeneration = Plain if args.plain else functools.partial(Ours, engine)
        optimizer = samebits.torch.AdamW(policy, lr=lr, weight_decay=0.0, max_norm=1.0)
        trainer = (trl.GRPOTrainer if args.plain else Trainer)(
            policy, [reward], config, data, processing_class=tokenizer, optimizers=(optimizer, None), callbacks=[Told()]
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    steps = [line for line in trainer.state.log_history if "reward" in line]
    differences = [line[f"sampling/sampling_logp_difference/{of}"] for line in steps for of in ("mean", "max")]
    ratios = [line[f"sampling/importance_sampling_ratio/{of}"] for line in steps for of in ("min", "mean", "max")]
    print(f"sampling/sampling_logp_difference: at most {max(differences):g} in {len(steps)} steps")
    print(f"sampling/importance_sampling_ratio: {min(ratios):g} to {max(ratios):g}")
    if args.plain:
        model.load_state_dict(policy.state_dict())
    else:
        print(f"{trainer.compared} tokens: rollout, recomputation and training have the same bits")
    engine.update(model, **{"adapter": name for name in engine.adapters})
    after = grpo.right(engine, tests)
    print(f"trained: {after:.1%} of {len(tests)} answers are right; {time.perf_counter() - started:.1f} s")
    if len(steps) != args.steps or any(differences) or set(ratios) != {1.0}:
        print("rollout and training differ")
        return 1
    return int(args.goal > 0 and not before < 0.5 < args.goal <= after)


def plain_model(model: samebits.torch.CausalLM, folder: Path) -> transformers.PreTrainedModel:
    """The same weights in the model of transformers."""
    config = transformers.AutoConfig.from_pretrained(folder)
    found = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    head = {} if "lm_head.weight" in model.state_dict() else {"lm_head.weight": model.state_dict()["model.embed_tokens.weight"]}
    found.load_state_dict(model.state_dict() | head)
    return found


if __name__ == "__main__":
    sys.exit(main())
