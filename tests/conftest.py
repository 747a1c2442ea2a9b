"""What every test runs under: no accelerator, one thread a process, no hub, no proxy, and none of the caller's own settings."""

import os
import signal

for name in list(os.environ):
    foreign = name.startswith(("OTEL_", "OPENAI_", "RLLM_")) and not name.startswith("RLLM_TEST_")
    if foreign or name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
        del os.environ[name]

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell that runs a script in the background lets it ignore Ctrl-C, and whatever it starts; tests are about what Ctrl-C does.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
