"""The state machine of a run: pure, standard library only."""
