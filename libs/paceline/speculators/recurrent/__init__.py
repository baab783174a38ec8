"""Recurrent speculators: LSTM and MLP."""
