"""Conversations: messages, their prompts, and parsed answers."""
