"""Passes that make the fx graph of a traced model call faster.

They replace PyTorch's ops by *steps*: functions in ``plans/run/steps``, most of which call a kernel. Models
write the same operation in several ways. The first pass replaces these by one form, so that later passes look
for one form only.
"""
