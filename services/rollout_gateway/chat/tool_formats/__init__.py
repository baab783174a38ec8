"""The forms of tool calls by model family, and their grammars for responses."""
