"""The cost-model bandit and what it believes: tokens, seconds, lengths."""
