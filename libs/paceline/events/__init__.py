"""Facts by broadcast: what is so, numbered; commands go by gRPC."""

from paceline.events.facts import FACTS_QUEUED, FactPublisher, FactSubscriber, OnGap

__all__ = ["FACTS_QUEUED", "FactPublisher", "FactSubscriber", "OnGap"]
