"""What is put on vLLM's own path: modules of vLLM's plug-in points, imported by vLLM's interpreter and by no other."""
