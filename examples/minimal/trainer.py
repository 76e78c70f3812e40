"""A trainer: learns from whole groups of answers, and publishes each policy. Start it first."""

import os

import torch

from experience_buffer import BufferConfig, Client, ConsumerConfig, Pacing
from experience_buffer.collation import padded_collate

logits = torch.zeros(10, 10, requires_grad=True)  # of the next digit, by the last one
optimizer = torch.optim.Adam([logits], lr=0.2)
collate = padded_collate(pad_token_id=0, columns=["reward"])
trainer = ConsumerConfig("trainer", unit="group")
pacing = Pacing(consumer="trainer", max_staleness=1, batch_size=8)
config = BufferConfig("count", group_size=8, advantage="grpo", consumers=[trainer], pacing=pacing)

with Client("127.0.0.1:50051") as buffer:

    def publish(version: int, is_last: bool = False) -> None:
        """Write the policy, in one piece, and say that it is there."""
        policy = {"logits": logits.detach(), "version": version, "is_last": is_last}
        torch.save(policy, "policy.tmp")
        os.replace("policy.tmp", "policy.pt")
        buffer.publish_policy_version(version, buffer="count")

    if "count" in [each.config.name for each in buffer.list_buffers()]:
        buffer.delete_buffer("count", force=True)  # a run begins anew
    buffer.create_buffer(config)
    publish(0)
    with buffer.stream(8, buffer="count", format="packed") as batches:
        for step, batch in enumerate(batches, start=1):
            data = collate(batch)  # B answers, as tensors
            last, chosen = data["input_ids"][:, :-1].long(), data["input_ids"][:, 1:].long()
            logprobs = logits[last].log_softmax(-1).gather(-1, chosen[..., None])[..., 0]
            ratio = (logprobs - data["logprobs"]).exp()
            advantages, mask = data["advantages"], data["action_mask"]  # computed by the server
            gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            optimizer.zero_grad()
            (-(gain * mask).sum() / mask.sum()).backward()
            optimizer.step()
            reward = data["reward"].mean().item()
            publish(step, is_last=reward > 0.95)
            batch.ack(step)  # consumed: places for new groups are free
            print(f"step {step}: mean reward {reward:.2f}")
            if reward > 0.95:
                break
