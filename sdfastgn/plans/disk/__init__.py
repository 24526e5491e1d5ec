"""Keeps plans on disk, so that a later process need not trace the same calls again.

A plan is the graph of a traced call, rewritten to kernels.

- ``description`` turns any value into text that is the same in all processes.
- ``key`` makes such a text of everything that a plan depends on. The hash of the text is the name of the
  plan's file.
- ``content`` writes a rewritten graph as JSON, and reads it. A file holds only data, and none of it is
  executed.
- ``files`` reads, writes and removes the files of a folder.
"""
