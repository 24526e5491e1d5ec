"""Keeps the CUDA graphs of one module, and drops the least recently used one if there are too many.

Calls are of one *kind* if the same graph can serve them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from sdfastgn.patches.graphs.arguments import Call
from sdfastgn.patches.graphs.capture import AnyGraph, Backend
from sdfastgn.patches.graphs.watch import Watch
from sdfastgn.patches.lora.adapter_survey import AdapterSurvey

# Maximum number of graphs that one module may have. Each graph is for one kind of call.
MAX_GRAPHS = 8


class Store:
    """Keeps one CUDA graph for each kind of call, all captured from the same state of one module.

    The caller of a method must hold the lock of ``backend``.

    Attributes:
        backend: captures and replays the graphs; None before the module's first call.
        watch: records the state of the module from which the graphs were captured. None until the first
            capture is tried, and after ``clear``.
        survey: knows the module's layers with merged weights of adapters, as they were when ``watch`` was
            made.
        captured, replays, dropped: numbers of captures, replays and dropped graphs so far.
    """

    __slots__ = ("_graphs", "_replays_before", "backend", "captured", "dropped", "replays", "survey", "watch")

    def __init__(self) -> None:
        self.backend: Backend | None = None
        self.watch: Watch | None = None
        self.survey: AdapterSurvey | None = None
        self.captured = self.replays = self.dropped = 0
        # Kind of call -> its graph. The least recently used graph comes first.
        self._graphs: OrderedDict[Any, AnyGraph] = OrderedDict()
        self._replays_before = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Any) -> bool:
        return key in self._graphs

    @property
    def replays_of_state(self) -> int:
        """Number of replays since ``begin`` was last called, which is when the module had last changed."""
        return self.replays - self._replays_before

    def begin(self, watch: Watch, survey: AdapterSurvey) -> None:
        """Set ``watch`` and ``survey``, which record the state of the module for all graphs added later.

        The store must be empty.
        """
        self.watch, self.survey = watch, survey
        self._replays_before = self.replays

    def find(self, key: Any) -> AnyGraph | None:
        """The graph for calls of kind ``key``, or None. Marks the graph as the most recently used one."""
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
        return graph

    def add(self, key: Any, graph: AnyGraph) -> None:
        self._graphs[key] = graph
        self.captured += 1

    def replayed(self, key: Any, call: Call) -> None:
        """Count ``call``, whose result came from the graph for ``key``.

        A forward may pop items from the front of lists in its arguments, which a replay does not do. So this
        method removes these items from the lists of ``call``.
        """
        self.replays += 1
        left = self._graphs[key].left
        for items, count in zip(call.lists(), left, strict=True) if left else ():
            del items[: len(items) - count]

    def make_room(self) -> None:
        """Drop the least recently used graphs until there is room for one more."""
        while len(self._graphs) >= MAX_GRAPHS:
            self.drop(next(iter(self._graphs)))

    def drop(self, key: Any) -> None:
        self._wait()
        del self._graphs[key]
        self.dropped += 1

    def clear(self) -> int:
        """Drop all graphs, and the record ``watch`` of the module's state.

        Returns the number of dropped graphs.
        """
        count = len(self._graphs)
        if count:
            self._wait()
        self.dropped += count
        self._graphs.clear()
        self.watch = self.survey = None
        return count

    def _wait(self) -> None:
        if self.backend is not None:  # a graph must not be dropped while the GPU runs it
            self.backend.wait()
