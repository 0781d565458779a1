"""What plugs frisket into model libraries."""
