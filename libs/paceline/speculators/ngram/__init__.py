"""Drafts looked up in what was said before: by prompt, then in all (Oliaro et al. 2024)."""
