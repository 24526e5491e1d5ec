"""Keeps plans on disk, so that a later process need not trace the same calls again.

A plan is the graph of a traced call, rewritten to kernels.

- ``description`` turns any value into text that is the same in all processes.
- ``key`` describes everything that a plan depends on in such a text. Its hash is the name of the plan's file.
- ``content`` writes a rewritten graph as JSON, and reads it. A file holds only data, and none of it is
  executed.
- ``files`` reads, writes and removes the files of a folder.
"""
