"""Conversations: messages, the prompts that spell them, and what a model says in one."""
