"""The policy: a small decoder-only transformer over digits, and how to sample from it.

No task knowledge, no training, no I/O. Shapes: B sequences, S tokens, K keys, D width, H heads,
R response tokens, V digits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.demo import task

WIDTH = 64
NUM_HEADS = 4
NUM_LAYERS = 2

KeyValue = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Past:
    """What attention remembers of the tokens so far."""

    real_BK: Tensor
    """False where the token is padding."""
    layers: tuple[KeyValue, ...]
    """Keys and values of each layer, shape [B, H, K, D / H]."""


class Block(nn.Module):
    """Attention and a feed-forward layer, each on the normalised residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attention_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed_norm = nn.LayerNorm(WIDTH)
        self.feed_in = nn.Linear(WIDTH, 4 * WIDTH)
        self.feed_out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(
        self, x_BSD: Tensor, visible_B1SK: Tensor, past: KeyValue | None
    ) -> tuple[Tensor, KeyValue]:
        """Return the new residual stream and all keys and values up to now."""
        num_rows, num_tokens, _ = x_BSD.shape
        projected = self.query_key_value(self.attention_norm(x_BSD))
        shape = (num_rows, num_tokens, 3, NUM_HEADS, WIDTH // NUM_HEADS)
        query, key, value = projected.view(shape).permute(2, 0, 3, 1, 4)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible_B1SK)
        x_BSD = x_BSD + self.attention_out(mixed.transpose(1, 2).flatten(2))
        fed = self.feed_out(functional.gelu(self.feed_in(self.feed_norm(x_BSD))))
        return x_BSD + fed, (key, value)


class Policy(nn.Module):
    """Maps tokens to logits over the next digit. Prompts are padded on the left."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(task.VOCABULARY, WIDTH)
        self.positions = nn.Embedding(task.PROMPT_LENGTH + task.MAX_LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.out_norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.3)
        nn.init.normal_(self.positions.weight, std=0.3)

    def forward(self, tokens_BS: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
        """Compute logits for what follows each token.

        Args:
            tokens_BS: int64; the tokens after those in `past`.
            past: What an earlier call returned, to continue from there.

        Returns:
            Logits, shape [B, S, V], float32; and the past that includes these tokens.
        """
        real_BK = tokens_BS != task.PADDING
        start = 0
        if past is not None:
            start = past.real_BK.shape[1]
            real_BK = torch.cat([past.real_BK, real_BK], 1)
        keys_K = torch.arange(real_BK.shape[1])
        queries_S1 = keys_K[start:, None]
        # A token always sees itself: a row of padding that saw nothing would become NaN.
        visible_B1SK = (
            ((keys_K <= queries_S1) & real_BK[:, None, :]) | (keys_K == queries_S1)
        ).unsqueeze(1)
        x_BSD = self.tokens(tokens_BS) + self.positions(keys_K[start:])
        layers = []
        for index, block in enumerate(self.blocks):
            x_BSD, layer = block(x_BSD, visible_B1SK, past.layers[index] if past else None)
            layers.append(layer)
        # The digits' embeddings are also the output weights: copying a digit is easy to discover.
        digits_VD = self.tokens.weight[: task.NUM_DIGITS]
        logits_BSV = functional.linear(self.out_norm(x_BSD), digits_VD) * WIDTH**-0.5
        return logits_BSV, Past(real_BK, tuple(layers))


@torch.no_grad()
def generate(
    policy: Policy, prompts_BP: Tensor, *, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Let the policy answer with `MAX_LENGTH` digits.

    Args:
        policy: Samples.
        prompts_BP: Prompts, padded on the left to `PROMPT_LENGTH`, int64.
        generator: Source of randomness; None: always the likeliest digit.

    Returns:
        Responses, shape [B, R], int64, and the log-probability of each digit, float32.
    """
    logits_BSV, past = policy(prompts_BP)
    responses, logprobs = [], []
    for position in range(task.MAX_LENGTH):
        logprobs_BV = functional.log_softmax(logits_BSV[:, -1], dim=-1)
        if generator is None:
            chosen_B1 = logprobs_BV.argmax(-1, keepdim=True)
        else:
            chosen_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)
        responses.append(chosen_B1)
        logprobs.append(logprobs_BV.gather(1, chosen_B1))
        if position + 1 < task.MAX_LENGTH:
            logits_BSV, past = policy(chosen_B1, past)
    return torch.cat(responses, 1), torch.cat(logprobs, 1)


def pad_prompts(problems: list[task.Problem]) -> Tensor:
    """Make a batch of prompts: shape [B, `PROMPT_LENGTH`], int64, padded on the left."""
    rows = []
    for problem in problems:
        tokens = task.prompt_tokens(problem)
        rows.append([task.PADDING] * (task.PROMPT_LENGTH - len(tokens)) + tokens)
    return torch.tensor(rows)


def accuracy(policy: Policy, problems: list[task.Problem]) -> float:
    """Return the share of problems whose likeliest answer is right in every digit."""
    responses_BR, _ = generate(policy, pad_prompts(problems), generator=None)
    pairs = zip(problems, responses_BR.tolist(), strict=True)
    right = sum(tuple(row[: len(problem)]) == task.solution(problem) for problem, row in pairs)
    return right / len(problems)
