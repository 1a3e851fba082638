"""`python -m gpu_hpc_exporter`."""

import sys

from gpu_hpc_exporter.cli import main

sys.exit(main())
