"""Child processes that score: child and pool ask, own_rules and reward_model answer."""
