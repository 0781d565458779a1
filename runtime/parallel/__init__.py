"""Context parallel attention: queries and keys over ranks, under any mask."""
