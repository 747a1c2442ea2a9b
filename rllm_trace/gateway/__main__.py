"""``python -m rllm_trace.gateway``."""

import sys

from rllm_trace.gateway.command import main

if __name__ == "__main__":
    sys.exit(main())
