"""Conversations: messages, the chat template, and what a model says in one.

Owns no session and no engine.
"""
