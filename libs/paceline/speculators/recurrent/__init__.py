"""Drafters that carry a state from draft to draft: LSTM and MLP."""
