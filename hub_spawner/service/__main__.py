"""The entry of the service's process."""

import sys

from hub_spawner.service.app import main

if __name__ == "__main__":
    sys.exit(main())
