"""``python -m rllm_trainer``: the command line, whatever else on the machine is called ``rllm``."""

from rllm_trainer.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
