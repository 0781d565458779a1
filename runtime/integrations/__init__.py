"""Integrations with model libraries."""
