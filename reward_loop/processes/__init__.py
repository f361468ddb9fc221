"""Processes in which sync reward functions run. Importing this imports nothing: workers are to start small."""
