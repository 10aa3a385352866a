"""Checkpoint formats: where weights come from, and how each device gets its own slice of them."""
