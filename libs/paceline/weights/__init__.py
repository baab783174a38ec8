"""Versions of weights between processes: manifest, chunks, spool, Prepare/Push/Commit/Abort.

The package handles bytes, not models.
"""

from paceline.weights.push import (
    PushReport,
    abort_version,
    commit_versions,
    pull_weights,
    push_weights,
)
from paceline.weights.reception import WeightHooks
from paceline.weights.sender import Delivery, Parcel, WeightSender
from paceline.weights.servicer import WeightServicer
from paceline.weights.shares import build_manifest
from paceline.weights.spool import Spool
from paceline.weights.wire import SERVICE_NAME, add_weight_service

__all__ = [
    "SERVICE_NAME",
    "Delivery",
    "Parcel",
    "PushReport",
    "Spool",
    "WeightHooks",
    "WeightSender",
    "WeightServicer",
    "abort_version",
    "add_weight_service",
    "build_manifest",
    "commit_versions",
    "pull_weights",
    "push_weights",
]
