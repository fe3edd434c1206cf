"""For each `sitecustomize.py` of these tests: vLLM in engines without the machine that some of its code is for.

It is on the path of engines beside a folder with one. Modules are changed when they are imported.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

Change = Callable[[Any], None]


def is_engine() -> bool:
    """Not a helper of such a process: these have nothing to import."""
    return "-m" in sys.orig_argv


def interpret_triton(*, first_runner: bool = False) -> None:
    """Triton's kernels run in its interpreter. Call it before anything imports vLLM.

    `first_runner`: the model runner of engines without Triton, in place of that of GPUs.
    """
    # Before its own functions are made, too.
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

        @staticmethod
        def get_benchmarker() -> Any:
            # Of several configurations any will do.
            return lambda _, quantiles=None, **__: [1.0] * len(quantiles) if quantiles else 1.0

    if first_runner:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    # It compiles nothing: with no backend vLLM would use no Triton.
    triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=Driver)


def change_modules(changes: Mapping[str, Change], instead: Sequence[str] = ()) -> None:
    """Call a function with each module after its import; `instead`: of its own code."""
    sys.meta_path.insert(0, _ChangingFinder(changes, instead))


def run_next(file: str) -> None:
    """Python runs the first `sitecustomize.py` on the path alone: `file` runs the one behind it, if there is one."""
    behind = sys.path[sys.path.index(str(Path(file).parent)) + 1 :]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


class _ChangedLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, change: Change, *, is_instead: bool) -> None:
        self._loader, self._change, self._is_instead = loader, change, is_instead

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if not self._is_instead:
            self._loader.exec_module(module)
        self._change(module)


class _ChangingFinder(importlib.abc.MetaPathFinder):
    def __init__(self, changes: Mapping[str, Change], instead: Sequence[str]) -> None:
        self._changes, self._instead = changes, instead

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ChangedLoader(spec.loader, self._changes[name], is_instead=name in self._instead)
        return spec
