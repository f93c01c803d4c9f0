"""`python -m hocket.dist` is `hocket-launch`."""

import sys

from hocket.dist.launch import main

sys.exit(main())
