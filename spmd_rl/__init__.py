"""Reinforcement-learning post-training of language models as one SPMD program."""
