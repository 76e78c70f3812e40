"""A whole reinforcement-learning loop through a real experience buffer server, on the CPU.

Two rollout processes sample from a small transformer, the server groups what they push and computes
GRPO advantages, and the two ranks of a trainer share what they stream and learn from nothing else.
Run it with `make demo` or `python -m examples.demo --help`.
"""
