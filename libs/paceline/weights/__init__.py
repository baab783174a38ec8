"""Versions of weights between processes: manifest, chunks, spool, Prepare/Push/Commit/Abort.

The package handles bytes, not models.
"""

from paceline.weights.push import REFUSALS as REFUSALS
from paceline.weights.push import SERVICE_NAME as SERVICE_NAME
from paceline.weights.push import PushReport as PushReport
from paceline.weights.push import abort_version as abort_version
from paceline.weights.push import commit_versions as commit_versions
from paceline.weights.push import pull_weights as pull_weights
from paceline.weights.push import push_weights as push_weights
from paceline.weights.reception import WeightHooks as WeightHooks
from paceline.weights.sender import Parcel as Parcel
from paceline.weights.sender import WeightSender as WeightSender
from paceline.weights.servicer import WeightServicer as WeightServicer
from paceline.weights.spool import Spool as Spool
