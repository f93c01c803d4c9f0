"""`python -m hocket.dist.launch` is `hocket-launch`."""

from hocket.dist.launch import main
from hocket.dist.launch.warm.main_module import end

end(main())
