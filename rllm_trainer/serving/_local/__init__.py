"""The embedded server, child side: requests in over HTTP, sampled tokens with exact logprobs out. Started by ``serving/local.py``."""
