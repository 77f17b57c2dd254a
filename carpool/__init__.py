"""Carpool's face to programs: the SDK, under the product's own name (ING-7).

::

    from carpool import CrossModelScheduler

    with CrossModelScheduler("http://127.0.0.1:8080") as scheduler:
        print(scheduler.infer("What is a carpool?", max_tokens=32).text)

Contract of the folder: it holds no code of its own and imports ``subjects`` alone.
"""

from subjects.client import AsyncCrossModelScheduler, Chunk, CrossModelScheduler, Result
from subjects.errors import ApiError

__all__ = ["ApiError", "AsyncCrossModelScheduler", "Chunk", "CrossModelScheduler", "Result"]
