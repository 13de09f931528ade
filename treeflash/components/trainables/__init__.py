"""Built-in trainables: how the built-in drafters and refiners are trained."""
