"""A rank of the policy trainer that writes spans only at its end: its interval is an hour."""

from __future__ import annotations

from paceline.services.policy_trainer.rank import main
from paceline.telemetry import exporters

if __name__ == "__main__":
    exporters._INTERVAL_MS = 3_600_000.0
    main()
