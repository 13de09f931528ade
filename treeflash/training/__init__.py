"""From prompts to a drafter: the target's own answers, and what is learned from them."""
