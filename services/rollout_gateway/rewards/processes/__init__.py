"""Child processes that score: child and pool send requests, own_rules and reward_model answer."""
