"""A whole reinforcement-learning loop through a real experience buffer server, on the CPU.

Two rollout processes sample from a small transformer, the server groups what they push and computes
GRPO advantages, and the two ranks of a trainer share what they stream and learn from nothing else.
To copy from: `worker.py` has what a worker says to the buffer, `trainer.py` what a trainer does,
`buffer_config` in `runner.py` the buffer's settings. The others are the task and its model, the
processes, and what is shown of them. Run it with `make demo` or `python -m examples.demo --help`.
"""
