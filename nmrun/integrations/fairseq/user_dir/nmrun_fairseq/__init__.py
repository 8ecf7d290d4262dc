"""fairseq imports this folder by its own name, so it has a name that nothing else has."""

import nmrun.integrations.fairseq.plugin  # noqa: F401
