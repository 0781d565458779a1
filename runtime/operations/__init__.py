"""Attention operators by name."""
