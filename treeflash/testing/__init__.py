"""What plugin authors, and our own tests, test with: a tiny target, oracles, strategies."""
