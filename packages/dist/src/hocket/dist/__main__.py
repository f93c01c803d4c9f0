"""`python -m hocket.dist` is `hocket-launch`."""

from hocket.dist.launch.__main__ import run

run()
