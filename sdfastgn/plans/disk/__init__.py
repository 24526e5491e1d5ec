"""Keeps rewritten plans on disk, so that a later process need not trace the same calls.

- ``description``: any value as text that is equal in all processes.
- ``key``: the text of all that a plan depends on. Its hash is the name of the plan's file.
- ``content``: a rewritten graph as JSON. It holds data only, and nothing of it is executed.
- ``files``: the folder of the files.
"""
