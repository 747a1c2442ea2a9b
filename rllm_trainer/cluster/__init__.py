"""Runs on Ray: verl's own trainer with our agent-loop manager, or our loop over an engine that is a group of Ray workers.

What the user's process sees is plain records; verl, torch and Ray's workers are in processes of their own.
"""
