"""ComfyUI as a later release would have it: one line of a method is another, and computes the same."""

import inspect
import linecache
import textwrap

__all__ = ["change"]


def change(monkeypatch, cls, method):
    """Give ``cls`` a ``method`` of other code: it has one statement more."""
    lines = textwrap.dedent(inspect.getsource(vars(cls)[method])).splitlines()
    end = next(i for i, line in enumerate(lines) if line.endswith(":") and not line.startswith("@"))
    lines.insert(end + 1, "    sdfastgn_other_release = None")
    lines = [line.replace("super()", f"super({cls.__qualname__}, self)") for line in lines]
    text = f"class {cls.__name__}:\n" + textwrap.indent("\n".join(lines), "    ") + "\n"
    file = f"<another release of {cls.__qualname__}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    # Its globals are ComfyUI's, so it is ComfyUI's code to all who look.
    module = inspect.getmodule(cls)
    found = {}
    exec(compile(text, file, "exec", dont_inherit=True), vars(module), found)
    monkeypatch.setattr(cls, method, vars(found[cls.__name__])[method])
