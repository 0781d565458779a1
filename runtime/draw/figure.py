"""A matplotlib figure that notebooks show as a picture, though `pyplot` did not make it."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Plain


class Figure(Plain):
    """A figure drawn by Agg, with the pixels per inch it was made with.

    Without `%matplotlib inline`, a notebook knows nothing of figures that are made without `pyplot`, and prints
    `<Figure size 960x720 with 1 Axes>`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=self.dpi, facecolor=self.get_facecolor())
        return out.getvalue()
