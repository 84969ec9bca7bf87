"""Lets the torchvision of PyPI, built for CUDA, be imported beside a CPU build of torch.

Python runs this file at its start, in an engine's worker processes too, where PYTHONPATH holds this folder.
torchvision registers meta kernels for two operators of its binary part, which does not load here; with their schemas
declared first, the import goes through.
"""

import importlib.abc
import sys


class _DeclareSchemas(importlib.abc.MetaPathFinder):
    """Acts once, when torchvision is first looked for, and finds nothing itself."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            _declare()
        return None


def _declare() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declare.library = library  # a library that is collected takes its operators with it


sys.meta_path.insert(0, _DeclareSchemas())
