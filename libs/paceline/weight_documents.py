"""Names the JSON documents that lie beside a version's tensors. Imports nothing: those who read one
file need nothing of the pushes that brought it.
"""

from __future__ import annotations

CONFIG, ACCEPTANCE, ADAPTERS = "config", "acceptance", "adapters"
DOCUMENTS = {CONFIG: "config.json", ACCEPTANCE: "acceptance.json", ADAPTERS: "adapters.json"}
"""Keys of a manifest's metadata that hold the text of a JSON object, and the file beside the
tensors that it becomes: what the tensors are, what of a drafter's drafts is accepted, and what a
policy's adapters are added to.
"""
