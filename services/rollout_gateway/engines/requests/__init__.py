"""Per-request parts that every engine shares: admission, draws, penalties, grammars."""
