"""Semantic axes, runtime modes, and the partition specs they become."""
