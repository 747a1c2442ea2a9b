"""What recording costs, measured: the parts of `benchmarks/tracing.py`"""
