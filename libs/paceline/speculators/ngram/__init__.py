"""Drafts found in earlier text: by prompt, then in all sequences (Oliaro et al. 2024)."""
