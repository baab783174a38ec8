"""Drafters with a state from draft to draft: LSTM and MLP."""
