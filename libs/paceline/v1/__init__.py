"""Generated from proto/paceline/v1 by `make proto`; never edited."""
