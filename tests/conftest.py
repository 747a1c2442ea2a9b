"""What every test runs under: no accelerator, two torch threads, no hub, no proxy between a test and its own servers."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"
for name in ("http_proxy", "https_proxy", "all_proxy", "OTEL_SDK_DISABLED", "OTEL_TRACES_SAMPLER", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
    os.environ.pop(name, None)
    os.environ.pop(name.upper(), None)
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"
