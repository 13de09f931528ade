"""Built-in refiners."""
