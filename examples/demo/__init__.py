"""A whole reinforcement-learning loop through a real experience buffer server, on the CPU.

Two rollout processes sample from a small transformer, the server groups what they push and computes
GRPO advantages, and a trainer process learns from nothing but what it streams. Run it with
`make demo` or `python -m examples.demo --help`.
"""
