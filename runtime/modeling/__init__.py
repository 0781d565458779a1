"""Helpers for models around attention."""
