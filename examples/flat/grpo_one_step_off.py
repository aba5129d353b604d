"""GRPO, one step off policy, in one file: plain PyTorch and transformers.

    generate   batch 0 ─▶ batch 1 ──────┐sync  batch 2 ──────┐sync  batch 3 ...
                      ╲                 ▼    ╱               ▼
    update              step 1 ───────▶ wait   step 2 ─────▶ wait   step 3 ...

A tiny chat model learns to sort digits. A thread samples the next batch with a copy of the weights
while the optimizer takes a step on the current one. So batch 0 is sampled by the weights that it
trains, and each later batch by weights that are one step older. The truncated importance weight
corrects for that. The letters of the formulas:

    q, o_i      a prompt, and the i-th of the G responses that are sampled for it
    o_i,t       token t of a response
    r_i         the reward of a response
    A_i         its advantage, the same for all of its tokens
    mu          behaviour policy: the one that sampled the tokens
    pi_old      proximal policy: before the optimizer step on the batch, one step newer than mu
    pi          current policy: the one that has a gradient

Rows of a batch are responses; the G samples of a prompt are neighbours: batch = prompts * G. A row
has the tokens of its prompt, then those of its response, then padding. ``length`` is that of the
longest row.

    python examples/flat/grpo_one_step_off.py --steps 20
"""

from __future__ import annotations

import argparse
import copy
import random
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers import PreTrainedModel as Model
from transformers import PreTrainedTokenizerBase as Tokenizer

MODEL = Path(__file__).parents[2] / "skyasync/examples/tiny/model_files"

PROMPTS = 16  # of a step
SAMPLES = 8  # G: responses to a prompt
MAX_NEW_TOKENS = 9  # eight digits, and the end of the message
CLIP = 0.2  # epsilon of the clipped ratio
MAX_WEIGHT = 2.0  # of the importance weight
MAX_GRAD_NORM = 1.0


# ---------------------------------------------------------------- the task


@dataclass(frozen=True)
class Question:
    text: str
    answer: str


def make_questions(count: int, generator: random.Random) -> list[Question]:
    """Sorting tasks with four to eight digits.

    One text in five, by its checksum, is left for evaluation.
    """
    questions: list[Question] = []
    while len(questions) < count:
        digits = generator.choices("0123456789", k=generator.randint(4, 8))
        text = f"Sort the digits: {''.join(digits)}"
        if zlib.crc32(text.encode()) % 5 != 0:
            questions.append(Question(text, "".join(sorted(digits))))
    return questions


def reward(question: Question, response: str) -> float:
    """r_i: 1 for the right answer, else 0."""
    return float(response.strip() == question.answer)


# ---------------------------------------------------------------- generation


@dataclass
class Rollout:
    """Sampled responses and their rewards, one entry per row."""

    prompts: list[list[int]]  # token ids
    responses: list[list[int]]  # token ids; the last one ends the message, if there was room
    behaviour_logprobs: list[list[float]]  # log mu(o_i,t) of each response token
    rewards: list[float]


@torch.no_grad()
def generate(
    policy: Model,
    tokenizer: Tokenizer,
    questions: list[Question],
    uniform: Tensor | None = None,
) -> Rollout:
    """Sample ``SAMPLES`` responses to each question, at temperature 1.

    Args:
        uniform: ``[batch, MAX_NEW_TOKENS]``, the numbers in [0, 1) that choose the tokens; by
            default random ones.
    """
    rows = [question for question in questions for _ in range(SAMPLES)]
    chats = [[{"role": "user", "content": question.text}] for question in rows]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    batch = len(rows)
    if uniform is None:
        uniform = torch.rand(batch, MAX_NEW_TOKENS)

    # Padding comes first here, so that the next token of every row has the same column.
    width = max(len(prompt) for prompt in prompts)
    tokens = torch.zeros(batch, width, dtype=torch.int64)  # [batch, width]
    attention_mask = torch.zeros_like(tokens)  # [batch, width]: 0 is padding
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, width - len(prompt) :] = 1
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)  # [batch, width]

    responses: list[list[int]] = [[] for _ in rows]
    behaviour_logprobs: list[list[float]] = [[] for _ in rows]
    unfinished = set(range(batch))
    cache = DynamicCache()
    for t in range(MAX_NEW_TOKENS):
        output = policy(
            input_ids=tokens,
            attention_mask=attention_mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        logits = output.logits[:, -1]  # [batch, vocabulary]
        logprobs = logits.log_softmax(-1)  # [batch, vocabulary]: log mu(. | q, o_<t)
        # Inverse of the cumulative distribution: the first token at which it exceeds the number.
        cumulative = logprobs.exp().cumsum(-1)  # [batch, vocabulary]
        threshold = uniform[:, t, None] * cumulative[:, -1:]  # [batch, 1]
        tokens = torch.searchsorted(cumulative, threshold, right=True)  # [batch, 1]
        sampled_logprobs = logprobs.gather(1, tokens)  # [batch, 1]: log mu(o_t | q, o_<t)
        for row in list(unfinished):
            responses[row].append(int(tokens[row]))
            behaviour_logprobs[row].append(float(sampled_logprobs[row]))
            if int(tokens[row]) == tokenizer.eos_token_id:
                unfinished.remove(row)
        if not unfinished:
            break
        attention_mask = F.pad(attention_mask, (0, 1), value=1)  # [batch, width + t + 1]
        positions = positions[:, -1:] + 1  # [batch, 1]

    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    rewards = [reward(question, text) for question, text in zip(rows, texts, strict=True)]
    return Rollout(prompts, responses, behaviour_logprobs, rewards)


# ---------------------------------------------------------------- the batch


@dataclass
class Batch:
    """Tensors of responses, ``[batch, length]`` each; padding comes last."""

    tokens: Tensor  # int64
    loss_mask: Tensor  # bool: the response's tokens
    advantages: Tensor  # float32, 0 outside the mask
    behaviour_logprobs: Tensor  # float32: log mu, 0 outside the mask


def group_advantages(rewards: Tensor) -> Tensor:
    """A_i = (r_i - mean(r_1 .. r_G)) / (std(r_1 .. r_G) + 1e-6), ``[batch]``.

    A group of equal rewards has advantages of 0. Source: Shao et al. 2024 (GRPO).
    """
    groups = rewards.double().view(-1, SAMPLES)  # [prompts, G]
    mean = groups.mean(1, keepdim=True)  # [prompts, 1]: sum of r_i / G
    deviation = groups.std(1, keepdim=True)  # [prompts, 1]: sqrt(sum of (r_i - mean)^2 / (G - 1))
    advantages = (groups - mean) / (deviation + 1e-6)  # [prompts, G]: A_i
    return advantages.flatten().float()  # [batch]


def collate(rollout: Rollout) -> Batch:
    """Lists of tokens as padded tensors, with advantages."""
    prompt_lengths = torch.tensor([len(prompt) for prompt in rollout.prompts])  # [batch]
    response_lengths = torch.tensor([len(response) for response in rollout.responses])  # [batch]
    lengths = prompt_lengths + response_lengths  # [batch]
    length = int(lengths.max())
    tokens = torch.zeros(len(lengths), length, dtype=torch.int64)  # [batch, length]
    for row, (prompt, response) in enumerate(zip(rollout.prompts, rollout.responses, strict=True)):
        tokens[row, : len(prompt) + len(response)] = torch.tensor(prompt + response)
    index = torch.arange(length)  # [length]
    loss_mask = (index >= prompt_lengths[:, None]) & (index < lengths[:, None])  # [batch, length]
    advantages = group_advantages(torch.tensor(rollout.rewards))  # [batch]
    behaviour_logprobs = torch.zeros(tokens.shape)  # [batch, length]
    behaviour_logprobs[loss_mask] = torch.tensor(list(chain(*rollout.behaviour_logprobs)))
    # Longest rows first, as the library has them: in this order floating-point sums are the same.
    order = lengths.argsort(descending=True, stable=True)  # [batch]
    return Batch(
        tokens=tokens[order],
        loss_mask=loss_mask[order],
        advantages=(advantages[:, None] * loss_mask)[order],  # [batch, length]: A_i,t = A_i
        behaviour_logprobs=behaviour_logprobs[order],
    )


# ---------------------------------------------------------------- the loss


def token_logprobs(policy: Model, batch: Batch) -> Tensor:
    """log pi(o_i,t | q, o_i,<t) of the response's tokens, else 0; ``[batch, length]``.

    Padding comes last and attention is causal, so no token of a row sees its padding.
    """
    output = policy.model(input_ids=batch.tokens, use_cache=False)
    states = output.last_hidden_state  # [batch, length, hidden]
    targets = batch.tokens[batch.loss_mask]  # [n]: the n response tokens of all rows
    predictors = states[:, :-1][batch.loss_mask[:, 1:]]  # [n, hidden]: the state before each
    logits = policy.lm_head(predictors)  # [n, vocabulary]
    # Cross-entropy of a token is -log pi: the logsumexp of all logits, minus the token's logit.
    logprobs = -F.cross_entropy(logits, targets, reduction="none")  # [n]
    zeros = torch.zeros(batch.tokens.shape)  # [batch, length]
    return zeros.masked_scatter(batch.loss_mask, logprobs)  # [batch, length]


def policy_loss(current_logprobs: Tensor, batch: Batch) -> Tensor:
    """The clipped surrogate with a truncated importance weight, averaged over all tokens.

        ratio_i,t  = pi(o_i,t) / pi_old(o_i,t)
        weight_i,t = min(pi_old(o_i,t) / mu(o_i,t), MAX_WEIGHT), a constant
        loss_i,t   = -min(ratio_i,t A_i,t, clip(ratio_i,t, 1 - eps, 1 + eps) A_i,t) weight_i,t
        loss       = sum of loss_i,t / number of response tokens in the batch

    Sources: Schulman et al. 2017 (PPO); Hilton et al. 2022 (a proximal policy that is not the
    behaviour policy); Yao et al. 2025 (truncated importance sampling); Yu et al. 2025 (DAPO: the
    mean over tokens). There is no KL term.
    """
    # A batch has one optimizer step, so pi_old is the current policy: the ratio is 1, and its
    # gradient is that of log pi. With several steps, as in grpo_sync.py, pi_old is computed first.
    proximal_logprobs = current_logprobs.detach()  # [batch, length]
    ratio = (current_logprobs - proximal_logprobs).exp()  # [batch, length]: ratio_i,t
    surrogate = ratio * batch.advantages  # [batch, length]: ratio A
    clipped_ratio = ratio.clamp(1 - CLIP, 1 + CLIP)  # [batch, length]
    clipped = clipped_ratio * batch.advantages  # [batch, length]: clip(ratio) A
    weight = (proximal_logprobs - batch.behaviour_logprobs).exp()  # [batch, length]: pi_old / mu
    weight = weight.clamp(max=MAX_WEIGHT)  # [batch, length]: weight_i,t
    token_loss = -torch.minimum(surrogate, clipped) * weight  # [batch, length]: loss_i,t
    # The denominator is the batch's, also if the batch is computed in several parts.
    mean_weights = batch.loss_mask.float() / batch.loss_mask.sum()  # [batch, length]: 1 / tokens
    return (mean_weights * token_loss).sum()  # []


# ---------------------------------------------------------------- training


def make_optimizer(policy: Model, learning_rate: float) -> torch.optim.AdamW:
    """m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  weight -= lr m' / (sqrt(v') + eps).

    m' = m / (1 - b1^k) and v' = v / (1 - b2^k) at step k. Source: Kingma and Ba 2015 (Adam).
    """
    return torch.optim.AdamW(
        policy.parameters(),
        lr=learning_rate,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        fused=True,  # another order of the same operations rounds differently
    )


def update(policy: Model, optimizer: torch.optim.Optimizer, rollout: Rollout) -> float:
    """One optimizer step on a batch; returns its loss."""
    batch = collate(rollout)
    loss = policy_loss(token_logprobs(policy, batch), batch)
    loss.backward()
    # The gradient g becomes g min(1, max_norm / (|g| + 1e-6)).
    torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@dataclass(frozen=True)
class StepResult:
    loss: float
    mean_reward: float


def train(
    policy: Model,
    tokenizer: Tokenizer,
    steps: list[list[Question]],
    learning_rate: float,
    sample: Callable[[Model, Tokenizer, list[Question]], Rollout] = generate,
) -> Iterator[StepResult]:
    """One step off policy: batch i, from 0, is sampled by the weights after max(0, i - 1) steps.

    Args:
        steps: the questions of each training step.
        sample: makes the rollout of a step, in a thread.
    """
    optimizer = make_optimizer(policy, learning_rate)
    engine = copy.deepcopy(policy)  # the weights that generate
    with ThreadPoolExecutor(max_workers=1) as executor:
        generation = executor.submit(sample, engine, tokenizer, steps[0])
        for step in range(1, len(steps) + 1):
            rollout = generation.result()
            if step < len(steps):  # the next batch is generated while this one is trained
                generation = executor.submit(sample, engine, tokenizer, steps[step])
            loss = update(policy, optimizer, rollout)
            wait([generation])  # weights change only while nothing is generated
            engine.load_state_dict(policy.state_dict())  # weight sync
            yield StepResult(loss, sum(rollout.rewards) / len(rollout.rewards))


def load(path: str | Path) -> tuple[Model, Tokenizer]:
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return policy.eval(), AutoTokenizer.from_pretrained(path)  # eval: no dropout


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO, one step off policy, of a tiny chat model.")
    parser.add_argument("--model", default=str(MODEL), help="folder of a Llama chat model")
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of questions and sampling")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # more threads gain nothing with a model of this size
    policy, tokenizer = load(args.model)
    generator = random.Random(args.seed)
    steps = [make_questions(PROMPTS, generator) for _ in range(args.steps)]
    for step, result in enumerate(train(policy, tokenizer, steps, args.lr), start=1):
        figures = f"reward {result.mean_reward:.3f}  loss {result.loss:+.4f}"
        print(f"step {step:3}  {figures}  {time.process_time():.0f} s of CPU")


if __name__ == "__main__":
    main()
