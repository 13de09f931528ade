"""Measuring recipes: side by side on the same prompts, and along texts the target wrote."""
