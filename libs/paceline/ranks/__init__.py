"""Rank processes of a trainer: started, watched, commanded, ended."""
