"""The process between an app and a server that is not ours: one token, the routes that serve, versions, and swaps."""
