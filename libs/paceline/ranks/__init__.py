"""Rank processes of a trainer: started, watched, asked, ended."""
