"""`python -m hocket.dist.launch` is `hocket-launch`."""

import sys

from hocket.dist.launch import main

sys.exit(main())
