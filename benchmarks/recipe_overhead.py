"""How much longer a training step takes under each recipe than dense training: ``nmrun bench`` from
a checkout.
"""

import sys

from nmrun.bench import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
