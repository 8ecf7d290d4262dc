"""``python -m nmrun`` is ``nmrun``."""

import sys

from nmrun.lab.cli import main

sys.exit(main())
