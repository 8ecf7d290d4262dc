"""``python -m nmrun`` is ``nmrun``."""

import sys

from nmrun.cli import main

sys.exit(main())
