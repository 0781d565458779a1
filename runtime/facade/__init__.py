"""frisket."""
