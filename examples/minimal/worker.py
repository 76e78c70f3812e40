"""A rollout worker: answers prompts with the newest policy, and pushes groups of answers.

The task is to count on from a digit: after 3 come 4, 5, 6. Start as many workers as you like.
"""

import itertools
import os
import time

import torch

from experience_buffer import EID, Client, Experience

GROUP_SIZE, LENGTH = 8, 3

with Client("127.0.0.1:50051") as buffer:
    for task in itertools.count():
        eid = EID(batch=os.getpid(), task=task)
        while not buffer.reserve_groups([eid.tid], buffer="count").granted:
            time.sleep(0.01)  # enough is under way: what began now would be too stale
        policy = torch.load("policy.pt")
        if policy["is_last"]:
            break
        digit = task % 10
        tokens = torch.full((GROUP_SIZE, 1), digit)
        logprobs = torch.empty(GROUP_SIZE, 0)
        for _ in range(LENGTH):
            candidates = policy["logits"][tokens[:, -1]].log_softmax(-1)
            chosen = torch.multinomial(candidates.exp(), num_samples=1)
            tokens = torch.cat([tokens, chosen], dim=1)
            logprobs = torch.cat([logprobs, candidates.gather(1, chosen)], dim=1)
        right = (digit + 1 + torch.arange(LENGTH)) % 10
        rewards = (tokens[:, 1:] == right).float().mean(dim=1)
        answers = [
            Experience(
                eid=EID(eid.batch, task, run=run),
                tokens=tokens[run],
                prompt_length=1,
                logprobs=logprobs[run],
                reward=rewards[run].item(),
                info={"model_version": policy["version"]},
            )
            for run in range(GROUP_SIZE)
        ]
        buffer.push(answers, buffer="count")
