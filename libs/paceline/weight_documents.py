"""Names the JSON documents beside a version's tensors.

The module has no imports, so that readers of a file do not import the code for pushes.
"""

CONFIG, ACCEPTANCE, ADAPTERS = "config", "acceptance", "adapters"
DOCUMENTS = {CONFIG: "config.json", ACCEPTANCE: "acceptance.json", ADAPTERS: "adapters.json"}
"""File name by metadata key of a manifest. Each value is the text of a JSON object, which becomes
that file. `config` describes the tensors. `acceptance` describes which drafts of a drafter are
accepted. `adapters` identifies the base weights of a policy's adapters.
"""
