"""python -m gtp_vit_command, the same as gtp-vit."""

import sys

from gtp_vit_command import main

if __name__ == "__main__":
    sys.exit(main())
