"""The built-in parts, one strategy a file. The kinds do not import each other."""
